"""Groups of a step in parts, the places of groups among all, and the work of each part."""

from __future__ import annotations

from functools import partial

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tests.unit.data.test_block_routes import Heard, play
from tests.unit.recipes import plan_of

from leaderless.data.batch import Batch, Jagged
from leaderless.data.buffer import reshard as ways
from leaderless.data.buffer.block_exchange import MeshPosition
from leaderless.data.buffer.row_agreement import Span, select_in_blocks, span_of
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Layout, Load, Reshard, flat
from leaderless.planner.assign.balance import (
    NO_GROUP,
    EarlierWork,
    Int,
    at_places,
    first_places,
    parts_of,
    sequence_cost,
)
from leaderless.planner.assign.blocks import ROUNDS_PER_LEG, SELECTION_LEGS, Mesh, is_in_blocks, num_messages
from leaderless.planner.entries import QUADRATIC_TOKENS
from leaderless.planner.simulate.rows import RowPlacement, SimulatedRows, Workload


@given(st.sets(st.integers(0, 1000), max_size=30), st.integers(1, 9))
def test_group_number_i_is_in_part_i_times_parts_by_groups(chosen: set[int], num_parts: int) -> None:
    groups = np.array(sorted(chosen), dtype=np.int64)
    borders = at_places(groups, first_places(len(groups), num_parts))
    assert parts_of(groups, borders).tolist() == [i * num_parts // len(groups) for i in range(len(groups))]


@given(st.data())
def test_each_rank_of_a_few_or_many_finds_the_groups_at_the_same_places(data: st.DataObject) -> None:
    num_ranks = data.draw(st.integers(1, 20))
    ids = st.sets(st.one_of(st.integers(0, 20), st.integers(0, 2**45)), max_size=8)
    mine = [np.array(sorted(data.draw(ids)), dtype=np.int64) for _ in range(num_ranks)]
    count = data.draw(st.integers(2, 5))
    every = np.unique(np.concatenate(mine))
    mesh, places = Mesh(num_ranks), partial(first_places, num_parts=count)
    found = play([select_in_blocks(MeshPosition(mesh, number), one, places) for number, one in enumerate(mine)])
    expected = at_places(every, first_places(len(every), count)).tolist()
    assert [(known, some.tolist()) for known, some in found] == [(len(every), expected)] * num_ranks


def test_what_a_rank_hears_of_groups_grows_with_the_root_of_the_ranks() -> None:
    def heard(num_ranks: int) -> Heard:
        note, mesh, places = Heard(), Mesh(num_ranks), partial(first_places, num_parts=4)
        mine = [np.arange(8, dtype=np.int64) + 8 * number for number in range(num_ranks)]
        play([select_in_blocks(MeshPosition(mesh, number), one, places) for number, one in enumerate(mine)], note)
        return note

    small, large = heard(16), heard(256)
    assert small.legs == large.legs == SELECTION_LEGS
    assert large.messages <= 5.1 * small.messages  # 15 of 16, and 3 of 4
    assert large.numbers <= 5.1 * small.numbers
    assert ROUNDS_PER_LEG * large.messages <= num_messages(256, SELECTION_LEGS)
    assert not is_in_blocks(8, SELECTION_LEGS)
    assert is_in_blocks(64, SELECTION_LEGS)


def test_a_span_names_the_ends() -> None:
    alone = ProcessGroup((0,), 0)
    assert span_of(alone, np.array([7, 3, 7, 5]), "groups") == Span(3, 3, 7)
    assert span_of(alone, np.empty(0, dtype=np.int64), "groups") == Span(0)
    assert at_places(np.array([4, 6]), np.array([0, 1, 2, 9])).tolist() == [4, 6, NO_GROUP, NO_GROUP]


def rows_for(num_updates: int, window: Int | None = None, earlier: EarlierWork | None = None) -> tuple[Int, Int, Int]:
    """Group, cost and owner of rows that one rank gives to eight others, as all at once find it."""
    window = np.arange(256) if window is None else window
    lengths = np.random.default_rng(3).integers(1, 500, 256)[window]
    ids = torch.from_numpy(window)
    tokens = Jagged(torch.zeros(int(lengths.sum()), dtype=torch.int64), torch.from_numpy(lengths), "tokens")
    held = Batch(ids, {"tokens": tokens})
    layouts = Layout((0,), 1), Layout(tuple(range(1, 9)), 8)
    action = Reshard("rollout", "rollout", ("tokens",), *layouts, keep_groups=False, num_updates=num_updates)
    routes = ways.agree_at_once(action, ProcessGroup((0,), 0), held, None, None, earlier)
    return routes.ids, lengths, routes.owners


def fullest(parts: Int, costs: Int, owners: Int) -> float:
    """Work of the fullest shards of all parts, in that of the means."""
    most = sum(np.bincount(owners[parts == part], weights=costs[parts == part]).max() for part in np.unique(parts))
    return float(most * 8 / costs.sum())


def test_each_update_has_even_work_where_rows_are_for_several() -> None:
    ids, costs, owners = rows_for(4)
    assert fullest(ids * 4 // 256, costs, owners) < 1.02
    assert fullest(ids * 4 // 256, costs, rows_for(1)[2]) > 1.2, "what only the whole step is balanced for"
    assert fullest(np.zeros_like(ids), costs, owners) < 1.02


def test_each_update_has_even_work_where_its_rows_come_in_windows() -> None:
    ids, lengths, _ = rows_for(1)
    costs = sequence_cost(lengths, QUADRATIC_TOKENS)
    unevenness = {}
    for num_parts in (1, 4):
        earlier = EarlierWork(np.zeros((num_parts, 8), dtype=np.int64), 256)
        owners = np.empty_like(ids)
        for half in (0, 1):  # of the rows of each of four ranks
            here = np.flatnonzero(ids // 32 % 2 == half)
            owners[here] = rows_for(num_parts, here, earlier)[2]
        for part in range(num_parts):
            own = ids * num_parts // 256 == part
            assert earlier.loads[part].tolist() == np.bincount(owners[own], weights=costs[own], minlength=8).tolist()
        unevenness[num_parts] = fullest(ids * 4 // 256, costs, owners)
    assert unevenness[4] < 1.05
    assert unevenness[1] > 1.15, "what only the whole step is balanced for"


@pytest.mark.parametrize(("num_updates", "settings"), [(1, {}), (4, {"batch": {"updates_per_step": 4}})])
def test_rows_are_divided_by_update_where_they_are_trained(num_updates: int, settings: dict[str, object]) -> None:
    layout = {"rollout": {"ranks": "0-1"}, "reference": {"ranks": "2"}, "policy": {"ranks": "3"}}
    plan = plan_of("grpo", 4, algorithm={"kl": {"coefficient": 0.1}}, layout=layout, **settings)
    found = {
        entry.target_layout.ranks: entry.num_updates for entry in flat(plan.schedule) if isinstance(entry, Reshard)
    }
    assert found.pop((3,)) == num_updates
    assert set(found.values()) <= {1}


@pytest.mark.parametrize(("num_updates", "layout"), [(1, {}), (4, {}), (4, {"policy": {"ranks": "2-3"}})])
def test_ranks_take_prompts_in_turns_where_they_train_them_in_several_updates(
    num_updates: int, layout: dict[str, object]
) -> None:
    layouts = {"rollout": {"ranks": "0-1"}, **layout} if layout else {}
    plan = plan_of("grpo", 4, batch={"prompts_per_step": 32, "updates_per_step": num_updates}, layout=layouts)
    (load,) = (entry for entry in plan.schedule if isinstance(entry, Load))
    assert load.in_turns == (num_updates > 1 and not layout)
    rows = SimulatedRows(np.arange(32), np.ones(32, dtype=np.int64), np.zeros(32, dtype=np.int64), are_samples=False)
    shards = RowPlacement(plan, Workload(rows, rows)).load(load)
    counts = [np.bincount(shards[part * 8 : part * 8 + 8], minlength=load.layout.dp).tolist() for part in range(4)]
    assert counts == [[2] * 4] * 4 if load.in_turns else counts[0][-1] == 0
