"""How pipeline parallelism divides weights, from their names alone; see `tensor_parallel`."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace
from functools import partial

from leaderless.distributed.weights.blocks import Placement, Shape, WeightBlock, WeightDivision
from leaderless.distributed.weights.tensor_parallel import tensor_rows
from leaderless.planner import Layout
from leaderless.planner.memory.pipeline_stages import count_layers, stage_of


def stage_rows(names: Iterable[str]) -> Placement:
    """Divide weights over the ranks of their stage, as `tensor_rows`; `names` covers all weights of a model."""
    return partial(_rows_of_stage, count_layers(names))


def _rows_of_stage(num_layers: int, name: str, shape: Shape, layout: Layout) -> WeightDivision:
    if layout.pp == 1:
        return tensor_rows(name, shape, layout)
    num_peers = len(layout.ranks) // layout.pp
    within = tensor_rows(name, shape, replace(layout, ranks=tuple(range(num_peers)), pp=1))
    stage, width = stage_of(name, num_layers, layout.pp), layout.cp * layout.tp
    return _StageDivision(shape, len(layout.ranks), within=within, stage=stage, pp=layout.pp, width=width)


@dataclass(frozen=True, kw_only=True)
class _StageDivision(WeightDivision):
    """Blocks of the ranks of one stage, of which every shard of rows has a number; other ranks have empty blocks.

    Blocks are numbered among the ranks of the stage; blocks of other ranks have negative numbers.
    """

    within: WeightDivision
    stage: int
    pp: int
    width: int

    def number_of(self, place: int) -> int:
        shard, along = divmod(place, self.pp * self.width)
        stage, inside = divmod(along, self.width)
        return self.within.number_of(shard * self.width + inside) if stage == self.stage else -1 - place

    def places(self, number: int) -> range:
        if number < 0:
            return range(-1 - number, -number)
        inside = self.within.places(number)  # neighbors along `tp`, so that they are neighbors in the layout, too
        shard, along = divmod(inside[0], self.width)
        first = (shard * self.pp + self.stage) * self.width + along
        return range(first, first + len(inside))

    def block(self, number: int) -> WeightBlock:
        if number < 0:
            return WeightBlock((0,) * len(self.shape), (0, *self.shape[1:]))
        return self.within.block(number)

    def touching(self, block: WeightBlock) -> list[int]:
        return list(self.within.touching(block))
