"""The databuffer between ranks: rows, bytes, groups, prompts, versions and traffic."""

from __future__ import annotations

import json
from dataclasses import astuple

import pytest
import torch
from hypothesis import Phase, example, given, note, settings
from tests.counts import counting_traffic, held_bytes
from tests.distributed.ranks import RankPool
from tests.distributed.user_stages import Loop, prompts_of, recipe_of, short_workflow, whole_workflow
from tests.distributed.walks import Case, Step, Truth, cases, plan_of, walk

from leaderless.base.values import Json
from leaderless.data.batch import SIBLING_BITS, Batch, Jagged, make_sample_ids
from leaderless.data.buffer import transfer
from leaderless.planner import Action, Cluster, Reshard, RunNode, make_plan

SPLIT_GROUPS = Case(
    4,
    (
        Step("expand", (0, 1), 2, {"prompt_tokens": "data", "rows": "data"}, ("tokens", "notes"), False),
        Step("filter", (0, 1, 2), 3, {"tokens": "n0", "rows": "n0"}, ("group_id",), False),
        Step("same", (1, 3), 1, {"tokens": "n1"}, ("scores",), False),
        Step("same", (0, 1, 2, 3), 4, {"scores": "n2"}, ("tokens",), True),
        Step("same", (0, 1, 2, 3), 2, {"tokens": "n3", "rows": "n1", "group_id": "n1"}, (), True),
    ),
    num_prompts=11,
    spread="random",
    seed=1,
)


IN_WINDOWS = Case(
    4,
    (
        Step("expand", (0, 1), 2, {"prompt_tokens": "data", "rows": "data", "image": "data"}, ("tokens",), False, True),
        Step("same", (2, 3), 2, {"tokens": "n0", "rows": "n0"}, ("scores", "notes"), True, True),
        Step("same", (0, 1), 2, {"scores": "n1"}, ("flags",), False, True),
        Step("same", (1, 2), 1, {"scores": "n1", "flags": "n2"}, ("halves",), False, True),
        Step("filter", (0, 1, 2, 3), 4, {"tokens": "n0", "halves": "n3", "notes": "n1", "image": "n0"}, (), True),
        Step("same", (0,), 1, {"tokens": "n4", "halves": "n4", "notes": "n4", "image": "n4"}, (), False),
    ),
    num_prompts=10,
    spread="even",
    seed=3,
    num_windows=3,
)


def test_the_walk_in_windows_streams_its_first_four_nodes() -> None:
    windowed = plan_of(IN_WINDOWS).windowed
    assert windowed is not None
    assert [str(action) for action in windowed.body if isinstance(action, RunNode)] == ["n0", "n1", "n2", "n3"]
    assert windowed.delays == (0, 0, 0, 1, 1, 1, 1, 2, 2, 3, 3)


@settings(
    max_examples=settings.default.max_examples // 2,  # each takes four processes
    # A failure ends the processes, and each of hundreds of attempts to shrink an example would start new ones.
    phases=(Phase.explicit, Phase.reuse, Phase.generate),
)
@given(case=cases())
@example(case=SPLIT_GROUPS)
@example(case=IN_WINDOWS)
def test_every_row_and_byte_arrives_over_any_chain_of_layouts(ranks: RankPool, case: Case) -> None:
    note("\n".join(map(str, plan_of(case).schedule)))
    first, second = zip(*ranks.run(case.world_size, walk, case, timeout_s=60, deadline_s=120), strict=True)
    assert first == second  # the buffer is reset for the next step
    truth = Truth(case)
    rows = {"data": truth.prompts()}
    for node in plan_of(case).nodes:
        expected = rows[node.row_set]
        rows.setdefault(node.row_set_after, truth.after(node.name, expected))
        shards: dict[int, list[int]] = {}
        for rank in node.layout.ranks:
            there = first[rank][node.name]
            assert shards.setdefault(node.layout.shard_of(rank), there) == there, f"replicas of {node.name} differ"
        assert sorted(row for shard in shards.values() for row in shard) == expected
        if node.spec.needs_whole_groups and any(row >> SIBLING_BITS for row in expected):
            groups = [{row >> SIBLING_BITS for row in shard} for shard in shards.values()]
            assert sum(map(len, groups)) == len(set().union(*groups)), f"{node.name} got parts of groups"


def walk_in_small_pieces(case: Case) -> None:
    before = transfer.PIECE_BYTES
    transfer.PIECE_BYTES = (7, 7)
    try:
        walk(case)
    finally:
        transfer.PIECE_BYTES = before


@settings(max_examples=8, phases=(Phase.explicit, Phase.reuse, Phase.generate))
@given(case=cases())
@example(case=SPLIT_GROUPS)
def test_long_parcels_travel_in_pieces(ranks: RankPool, case: Case) -> None:
    ranks.run(case.world_size, walk_in_small_pieces, case)


# A workflow of custom stages


def collected(layout: dict[str, Json], world_size: int) -> list[dict[str, Json]]:
    """The rows that a step collects on one rank; replicas of a shard collect the same."""
    loop = Loop(recipe_of(layout), whole_workflow(), world_size)
    loop.step()
    assert held_bytes(loop.buffer) == 0
    return loop.context.collected


def in_order(results: list[list[dict[str, Json]]]) -> list[dict[str, Json]]:
    rows = {str(sorted(row.items())): row for result in results for row in result}
    return [rows[key] for key in sorted(rows)]


@pytest.mark.parametrize(
    ("world_size", "layout"),
    [
        (2, {}),
        (4, {"sample": {"ranks": "0-1"}, "score": {"ranks": "2-3"}, "collect": {"ranks": "0-3"}}),
        (4, {"sample": {"tp": 2}, "score": {"ranks": "1-3", "tp": 3}, "center": {"ranks": "0,3"}}),
        (3, {"sample": {"ranks": "0"}, "look": {"ranks": "1"}, "double": {"ranks": "2"}, "positive": {"ranks": "0-2"}}),
        (4, {"double": {"tp": 4}, "center": {"dp": 2, "cp": 2}, "positive": {"dp": 4}, "collect": {"ranks": "3"}}),
    ],
)
def test_results_do_not_depend_on_the_layout(ranks: RankPool, world_size: int, layout: dict[str, Json]) -> None:
    alone = ranks.run(1, collected, {}, 1)[0]
    assert len(alone) == 48 + 24  # all samples were seen, and half of them were better than their group
    assert in_order(ranks.run(world_size, collected, layout, world_size)) == in_order([alone])


def test_both_versions_of_a_column_are_kept_for_their_readers(ranks: RankPool) -> None:
    rows = ranks.run(1, collected, {}, 1)[0]
    first = {row["id"]: row["first score"] for row in rows if "first score" in row}
    second = {row["id"]: row["score"] for row in rows if "score" in row}
    assert second
    for row, value in second.items():
        assert value == 2 * float(str(first[row]))


def bytes_by_entry(layout: dict[str, Json], world_size: int) -> list[tuple[str, int]]:
    """The columns on a rank after each entry of its chain."""
    loop = Loop(recipe_of(layout), whole_workflow(), world_size)
    held: list[tuple[str, int]] = []
    release = loop.buffer.release

    def note_and_release(action: Action) -> None:
        release(action)
        held.append((str(action), held_bytes(loop.buffer)))

    loop.buffer.release = note_and_release
    loop.step()
    return held


def test_columns_are_freed_behind_their_last_reader(ranks: RankPool) -> None:
    (entries,) = ranks.run(1, bytes_by_entry, {}, 1)
    held = dict(entries)
    ids = make_sample_ids(torch.arange(12).repeat_interleave(4), torch.arange(4).repeat(12))
    tokens, scores = 8 * int((ids % 5).sum()), 4 * len(ids)
    prompts = 8 * sum(1 + place % 3 for place in range(12))
    kept = held.pop("positive")
    assert held == {
        "load": prompts,
        "sample": prompts + tokens,  # the prompts' columns belong to the samples now, and `unread` was never kept
        "score": tokens + scores,  # no other node reads prompts
        "look": tokens + scores,
        "double": tokens + scores,  # the first version is freed
        "center": tokens + 2 * scores,
        "collect": 0,
    }
    assert 0 < kept < held["center"]  # only what the filter kept


# Bytes that are sent


def traffic_of(layout: dict[str, Json], last: str, world_size: int) -> tuple[int, int]:
    """Bytes that a rank sends and receives to reshard answers of equal length to the last node."""
    loop = Loop(recipe_of(layout, prompts=64, responses=8), short_workflow(last), world_size)
    loop.stages["sample"] = even_answers
    with counting_traffic() as traffic:
        loop.step()
    return astuple(traffic)


def even_answers(batch: Batch, context: object) -> Batch:
    index = torch.arange(len(batch)).repeat_interleave(8)
    ids = make_sample_ids(batch.ids[index], torch.arange(8).repeat(len(batch)))
    tokens = Jagged(torch.arange(len(ids) * 32), torch.full((len(ids),), 32), "tokens")
    return Batch(ids, {"tokens": tokens, "note": ("",) * len(ids), "unread": torch.zeros(len(ids))}, batch, index)


@pytest.mark.parametrize(
    ("sample", "last"),
    [
        ({"ranks": "0-1"}, {"ranks": "2-3"}),
        ({"ranks": "0-1"}, {"ranks": "0-3"}),
        ({"ranks": "0-3"}, {"ranks": "2-3"}),
        ({"ranks": "0-3"}, {"ranks": "0-3", "tp": 2}),
        ({"ranks": "0-3", "tp": 4}, {"ranks": "0-3", "dp": 2, "tp": 2}),
        ({"ranks": "0-1", "tp": 2}, {"ranks": "2-3"}),
        ({"ranks": "0-2"}, {"ranks": "1-3"}),
        ({"ranks": "0-2", "tp": 3}, {"ranks": "3"}),
    ],
)
def test_no_rank_moves_more_than_its_share(ranks: RankPool, sample: dict[str, Json], last: dict[str, Json]) -> None:
    layout: dict[str, Json] = {"sample": sample, "last": last}
    traffic = ranks.run(4, traffic_of, layout, "use_tokens", 4)
    plan = make_plan(recipe_of(layout, prompts=64, responses=8), short_workflow("use_tokens"), Cluster(4))
    (edge,) = (action for action in plan.schedule if isinstance(action, Reshard))
    total = 64 * 8 * (4 + 8 * 32)  # the length of each row, and its tokens
    source, target = edge.source_layout, edge.target_layout
    for rank, (sent, received) in enumerate(traffic):
        may_send = total * target.ranks_per_shard / len(source.ranks) if rank in source else 0
        may_receive = total / target.dp if rank in target else 0
        assert sent <= 1.1 * may_send, f"rank {rank} sent {sent} bytes"
        assert received <= 1.1 * may_receive, f"rank {rank} received {received} bytes"
    assert sum(sent for sent, _ in traffic) == sum(received for _, received in traffic)


def test_ranks_that_have_the_rows_already_are_sent_none(ranks: RankPool) -> None:
    layout: dict[str, Json] = {"sample": {"ranks": "0-3", "tp": 4}, "last": {"ranks": "0-3"}}
    assert ranks.run(4, traffic_of, layout, "use_tokens", 4) == [(0, 0)] * 4


def test_only_what_is_asked_for_travels_and_prompts_travel_once(ranks: RankPool) -> None:
    layout: dict[str, Json] = {"sample": {"ranks": "0"}, "last": {"ranks": "1"}}
    prompts = prompts_of(0, 64)
    ((sent, _), (_, received)) = ranks.run(2, traffic_of, layout, "use_tokens", 2)
    assert sent == received == 64 * 8 * (4 + 8 * 32)  # the length of each row, and its tokens
    ((sent, _), (_, received)) = ranks.run(2, traffic_of, layout, "use_prompts", 2)
    texts = sum(len(json.dumps(row, ensure_ascii=False).encode()) for row in prompts.objects("rows"))
    assert sent == received == 64 * (4 + 4) + 8 * len(prompts.jagged("prompt_tokens").values) + texts
