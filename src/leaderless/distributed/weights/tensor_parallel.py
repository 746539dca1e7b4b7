"""How parallelism divides weights (tensor, expert, pipeline), from names alone, so that ranks know what others have.

Of a linear layer that widens, each rank has some of the outputs; of one that narrows, the inputs that these are. Words
are divided where they can be. Of experts, each rank has some, or a part of these. What is left is small, and every rank
has it.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass, replace
from functools import partial

from leaderless.distributed.weights.blocks import Placement, Shape, WeightBlock, WeightDivision
from leaderless.planner import Layout
from leaderless.planner.memory.layers import count_layers, sees, stage_of

WIDENING = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
"""Layers of which each rank has some rows of the weight, and of the bias."""
NARROWING = {"o_proj", "down_proj"}
"""Layers of which each rank has some columns of the weight, and the whole bias."""
ROWS, COLUMNS = {"weight", "bias", "lora_B"}, {"weight", "lora_A"}
"""Of a layer that widens, what has an output in each row; of one that narrows, what has an input in each column."""
WORDS = {"embed_tokens", "lm_head"}
"""Embeddings of which each rank has some words', if the ranks divide their number."""


def divided_dim(name: str, shape: Shape, tp: int) -> int | None:
    """The dimension along which `tp` ranks divide a weight or what the optimizer keeps of it; None if all have it.

    What sees images is small next to the rest, and its layers have other names in each family: all have it.
    """
    if sees(name):
        return None
    *_, module, kind = ("", *name.split("."))
    is_rows, is_columns = module in WIDENING | WORDS and kind in ROWS, module in NARROWING and kind in COLUMNS
    dim = 0 if is_rows else 1 if is_columns else None
    return dim if dim is not None and dim < len(shape) and shape[dim] % tp == 0 else None


def is_of_experts(name: str, shape: Shape) -> bool:
    """Whether a weight, or what the optimizer keeps of it, covers all experts of a layer, one row for each."""
    return len(shape) == 3 and ("", *name.split("."))[-2] == "experts"


def copies_dim(shape: Shape, ep: int, num_copies: int) -> int:
    """The dimension along which ranks with the same experts divide a weight of theirs, [experts, ...].

    They take some experts each. If there are not as many for each, they take a part of every expert, where they can.
    """
    is_even = shape[0] // ep % num_copies == 0
    return 0 if is_even or shape[1] % num_copies else 1


def tensor_rows(name: str, shape: Shape, layout: Layout) -> WeightDivision:
    """Give each of the ranks along `tp` its part of a weight, and divide the rows of a part over ranks along others.

    Experts are divided along `ep`, and the experts of a rank over the ranks with the same ones.
    """
    if layout.ep > 1 and is_of_experts(name, shape):
        count = len(layout.ranks)
        along = copies_dim(shape, layout.ep, count // layout.ep)
        return _PartDivision(shape, count, parts=layout.ep, along=along)
    dim = divided_dim(name, shape, layout.tp)
    if dim is None or layout.tp == 1:
        return WeightDivision(shape, len(layout.ranks), layout.tp)
    return _PartDivision(shape, len(layout.ranks), dim=dim, parts=layout.tp)


@dataclass(frozen=True)
class _PartDivision(WeightDivision):
    """Equal parts along a dimension, each divided along one; neighbors have parts, so that each has a block alone."""

    parts: int = 1
    along: int = 0

    @property
    def _part(self) -> Shape:
        return tuple(size // self.parts if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def _length(self) -> int:
        """Size of the first block of a part, in the dimension along which it is divided."""
        return -(-self._part[self.along] // (self.num_ranks // self.parts))

    def block(self, number: int) -> WeightBlock:
        index, part = divmod(number, self.parts)
        offsets, sizes = [0] * len(self.shape), [*self._part]
        first = min(index * self._length, sizes[self.along])
        offsets[self.dim] = part * sizes[self.dim]
        offsets[self.along] += first
        sizes[self.along] = min(self._length, sizes[self.along] - first)
        return WeightBlock(tuple(offsets), tuple(sizes))

    def touching(self, block: WeightBlock) -> list[int]:
        return sorted(self._touching(block)) if block.numel else []

    def _touching(self, block: WeightBlock) -> Iterator[int]:
        size, along, length = self._part[self.dim], self.along, self._length
        first, last = block.offsets[self.dim], block.offsets[self.dim] + block.sizes[self.dim] - 1
        for part in range(first // size, last // size + 1):
            begin = part * size if self.dim == along else 0
            top, bottom = block.offsets[along] - begin, block.offsets[along] + block.sizes[along] - 1 - begin
            indices = range(max(top, 0) // length, min(bottom, self._part[along] - 1) // length + 1)
            yield from (index * self.parts + part for index in indices)


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
