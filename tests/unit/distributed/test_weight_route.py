"""The route of weights: what each rank computes from its own place is what a list of all ranks gives."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from types import FrameType

import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from leaderless.distributed.weights import route as routes
from leaderless.distributed.weights.blocks import (
    Placement,
    Pool,
    Shape,
    WeightBlock,
    WeightDivision,
    even_rows,
    everything,
    shard_rows,
    whole_block,
)
from leaderless.distributed.weights.route import RouteLeg, RouteTurn, WeightPiece, WeightRoute
from leaderless.distributed.weights.tensor_parallel import stage_rows, tensor_rows
from leaderless.planner import Layout


def columns(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Every rank has some columns; vectors are on all ranks."""
    return everything(name, shape, layout) if len(shape) == 1 else WeightDivision(shape, len(layout.ranks), dim=1)


def in_pairs(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Two ranks each have the same rows."""
    return WeightDivision(shape, len(layout.ranks), ranks_per_block=2)


def wide(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Parts of rows, of which each rank has some."""
    return tensor_rows("layers.0.mlp.up_proj.weight", shape, layout)


def narrow(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Parts of columns, of which each rank has some rows."""
    return tensor_rows("layers.0.mlp.down_proj.weight", shape, layout)


def experts(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Two neighbors divide experts, if there are any and the ranks are even; other ranks have the same ones."""
    even = layout.tp == 1 and len(layout.ranks) % 2 == 0 and shape[0] % 2 == 0
    return tensor_rows("layers.0.mlp.experts.down_proj", shape, replace(layout, ep=2) if even else layout)


def stages(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Weights of the second of two stages, if the ranks can be divided so."""
    return stage_rows(["layers.1.up_proj.weight"])(f"layers.1.{name}", shape, in_stages(layout))


def in_stages(layout: Layout) -> Layout:
    return layout if layout.dp % 2 else replace(layout, dp=layout.dp // 2, pp=2)


@dataclass(frozen=True)
class Listed:
    """The ranks of a pool with the block of a weight that each has, one after the other, as `torch.chunk` cuts it."""

    blocks: dict[int, WeightBlock]

    @classmethod
    def of(cls, pool: Pool, shape: Shape) -> Listed:
        ranks, placement = pool.layout.ranks, pool.placement
        tp, part_dim = pool.layout.tp, int(placement is narrow)
        if placement in {wide, narrow} and len(shape) > part_dim and shape[part_dim] % tp == 0:
            return cls({rank: part_of(shape, len(ranks) // tp, tp, part_dim, i) for i, rank in enumerate(ranks)})
        if placement is experts and len(shape) == 3 and tp == 1 and len(ranks) % 2 == shape[0] % 2 == 0:
            holders = len(ranks) // 2
            along = int(shape[0] // 2 % holders != 0 and shape[1] % holders == 0)
            return cls({rank: part_of(shape, holders, 2, 0, i, along) for i, rank in enumerate(ranks)})
        if placement is stages and in_stages(pool.layout).pp == 2:
            peers = [rank for rank in ranks if in_stages(pool.layout).coordinates(rank)["pp"]]
            within = cls.of(Pool(Layout(tuple(peers), len(peers) // tp, tp=tp), shard_rows), shape).blocks
            return cls({rank: within.get(rank, whole_block((0, *shape[1:]))) for rank in ranks})
        dim = int(placement is columns and len(shape) > 1)
        num_same = {even_rows: 1, columns: 1 if dim else len(ranks), in_pairs: 2, everything: len(ranks)}.get(
            placement, pool.layout.ranks_per_shard
        )
        chunks = torch.arange(shape[dim]).chunk(math.ceil(len(ranks) / num_same))
        blocks: dict[int, WeightBlock] = {}
        for place, rank in enumerate(ranks):
            number = place // num_same
            first, size = (int(chunks[number][0]), len(chunks[number])) if number < len(chunks) else (shape[dim], 0)
            offsets, sizes = [0] * len(shape), list(shape)
            offsets[dim], sizes[dim] = first, size
            blocks[rank] = WeightBlock(tuple(offsets), tuple(sizes))
        return cls(blocks)

    def holders(self) -> dict[WeightBlock, list[int]]:
        """The ranks that have each block."""
        holders: dict[WeightBlock, list[int]] = {}
        for rank, block in self.blocks.items():
            holders.setdefault(block, []).append(rank)
        return {block: ranks for block, ranks in holders.items() if block.numel}


def part_of(shape: Shape, num_holders: int, tp: int, dim: int, place: int, along: int = 0) -> WeightBlock:
    """What a rank has of a part, as indices of a tensor that is cut twice."""
    part = [torch.arange(size) for size in shape]
    part[dim] = part[dim].chunk(tp)[place % tp]
    begin, chunks = int(part[along][0]), part[along].chunk(num_holders)
    number = place // tp
    end = begin + len(part[along])
    part[along] = chunks[number] if number < len(chunks) else part[along][:0]
    offsets = tuple(int(indices[0]) if len(indices) else end for indices in part)
    return WeightBlock(offsets, tuple(len(indices) for indices in part))


def listed_leg(route: WeightRoute, bucket: Sequence[RouteTurn]) -> RouteLeg:
    """What a rank sends and receives of a bucket, found by a walk over all pairs of ranks."""
    sent, received, own = dict[int, list[WeightPiece]](), dict[int, list[WeightPiece]](), list[WeightPiece]()
    for turn in bucket:
        holders = Listed.of(route.holders, route.shapes[turn.name]).holders()
        wanted = Listed.of(route.receivers, route.shapes[turn.name]).blocks
        for place, (receiver, block) in enumerate(wanted.items()):
            for held, ranks in holders.items():
                common = block.rows(turn.first, turn.last).common(held)
                sender = receiver if receiver in ranks else ranks[place % len(ranks)]
                if not common.numel or turn.name in route.local:
                    continue
                if sender == receiver == route.rank:
                    own.append(WeightPiece(turn.name, common))
                elif sender == route.rank:
                    sent.setdefault(receiver, []).append(WeightPiece(turn.name, common))
                elif receiver == route.rank:
                    received.setdefault(sender, []).append(WeightPiece(turn.name, common))
    return RouteLeg(dict(sorted(sent.items())), dict(sorted(received.items())), own)


layouts = st.builds(
    lambda ranks, tp: Layout(tuple(sorted(ranks))[: len(ranks) // tp * tp], len(ranks) // tp, tp=tp),
    st.lists(st.integers(0, 15), min_size=3, max_size=12, unique=True),
    st.integers(1, 3),
)


def pools(*placements: Placement) -> st.SearchStrategy[Pool]:
    return st.builds(Pool, layouts, st.sampled_from(placements))


shapes_drawn = st.lists(st.lists(st.integers(1, 20), min_size=1, max_size=3).map(tuple), min_size=1, max_size=4)


PAIR, FOUR = Layout((0, 1), 2), Layout((1, 2, 3, 4), 4)


@settings(max_examples=max(20, settings.default.max_examples // 10))
@example([(20, 1)], Pool(PAIR, everything), Pool(PAIR, even_rows), 40)
@example([(6, 4, 3)], Pool(FOUR, experts), Pool(PAIR, everything), 40)
@example([(8, 4, 3)], Pool(PAIR, even_rows), Pool(FOUR, experts), 40)
@given(
    shapes_drawn,
    pools(even_rows, shard_rows, everything, columns, in_pairs, wide, narrow, experts, stages),
    pools(everything, everything, even_rows, shard_rows, columns, in_pairs, wide, narrow, experts, stages),
    st.sampled_from([1, 40, 400, 2000, 1 << 25]),
)
def test_each_rank_finds_its_part_of_the_way_without_a_list_of_all(
    drawn: list[Shape], holders: Pool, takers: Pool, bucket_bytes: int
) -> None:
    shapes, is_gathered = (
        {f"weight {index}": shape for index, shape in enumerate(drawn)},
        takers.placement is everything,
    )
    for rank in sorted({*holders.layout.ranks, *takers.layout.ranks}):
        route = WeightRoute(
            "weights of role 'policy'", shapes, holders, takers, torch.float32, rank, is_gathered=is_gathered
        )
        legs = [listed_leg(route, bucket) for bucket in route.buckets(bucket_bytes)]
        assert route.legs(bucket_bytes) == legs
    num_bytes = dict[str, int]()
    for name, shape in shapes.items():
        held, wanted, received = (
            Listed.of(pool, shape).blocks for pool in (route.holders, route.takers, route.receivers)
        )
        assert {rank: route.holders.block(name, shape, rank) for rank in held} == held
        assert route.rows(name) == max(block.sizes[0] for block in received.values())
        is_there = is_gathered and all(rank in held and held[rank].sizes == shape for rank in wanted)
        assert (name in route.local) == is_there
        turns = [turn for bucket in route.buckets(bucket_bytes) for turn in bucket if turn.name == name]
        assert [turn.first for turn in turns[1:]] == [turn.last for turn in turns[:-1]]
        assert (turns[0].first, turns[-1].last) == (0, route.rows(name))
        assert [turn.is_last for turn in turns] == [False] * (len(turns) - 1) + [True]
        largest = math.prod(shape) if is_gathered else max(b.numel for b in (*held.values(), *wanted.values()))
        count = 1 if is_there else min(math.ceil(4 * largest / bucket_bytes), route.rows(name))
        assert len(turns) == count, "as many turns as the rank with most of a weight needs"
        num_bytes[name] = 0 if is_there else 4 * largest // count
    for bucket in route.buckets(bucket_bytes):
        names = [turn.name for turn in bucket]
        assert len(names) == len(set(names)), "a bucket has one turn of a weight"
        assert len(names) == 1 or sum(num_bytes[name] for name in names) <= bucket_bytes


def calls_of(function: Callable[[], object]) -> int:
    """How often functions of Python are entered in a call."""
    count = 0

    def note(_: FrameType, event: str, __: object) -> None:
        nonlocal count
        count += event == "call"

    before = sys.getprofile()
    sys.setprofile(note)
    try:
        function()
    finally:
        sys.setprofile(before)
    return count


def test_the_way_takes_no_more_work_among_a_thousand_ranks() -> None:
    shapes = {f"weight {index}": (4096, 64) for index in range(20)}

    def calls(num_trainers: int, num_servers: int) -> list[int]:
        ranks = range(num_trainers + num_servers)
        layouts = (Layout(tuple(some), len(some)) for some in (ranks[:num_trainers], ranks[num_trainers:]))
        holders, takers = (Pool(layout, place) for layout, place in zip(layouts, (shard_rows, everything), strict=True))
        made = [
            WeightRoute("weights of role 'policy'", shapes, holders, takers, torch.bfloat16, rank, is_gathered=True)
            for rank in (0, num_trainers // 2, num_trainers)
        ]
        return [calls_of(lambda route=route: route.legs(routes.BUCKET_BYTES)) for route in made]  # type: ignore[misc]

    for few, many in zip(calls(3, 1), calls(750, 250), strict=True):
        assert many < 2 * few


def test_each_server_receives_its_share_from_the_trainers_that_hold_it() -> None:
    shapes = {f"weight {index}": (4096, 4096) for index in range(20)}
    holders, takers = Pool(Layout(tuple(range(512)), 512), even_rows), Layout(tuple(range(512, 640)), 128)
    route = WeightRoute(
        "weights of role 'policy'", shapes, holders, Pool(takers, everything), torch.bfloat16, 600, is_gathered=True
    )
    pieces = [piece for leg in route.legs(routes.BUCKET_BYTES) for some in leg.received.values() for piece in some]
    assert len(pieces) == 20 * 4, "each server receives from four trainers"
    assert sum(piece.block.numel for piece in pieces) * 128 == 20 * 4096 * 4096


def test_neighbors_divide_experts_and_ranks_of_a_stage_have_the_same_ones() -> None:
    layout = Layout(tuple(range(12)), dp=3, pp=2, tp=2, ep=2)
    assert layout.stage(5) == (0, 1, 4, 5, 8, 9)
    assert [layout.experts(rank) for rank in (0, 5, 8)] == [(0, 1), (4, 5), (8, 9)]
    assert [layout.copies(rank) for rank in (0, 5, 10)] == [(0, 4, 8), (1, 5, 9), (2, 6, 10)]
