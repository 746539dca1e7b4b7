"""How tensor and expert parallelism divide weights, from names alone, so that every rank knows what each other one has.

Of a linear layer that widens, each rank has some of the outputs; of one that narrows, the inputs that these are. Words
are divided where they can be. Of experts, each rank has some, or a part of these. What is left is small, and every rank
has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leaderless.distributed.weights.blocks import Shape, WeightBlock, WeightDivision
from leaderless.planner import Layout
from leaderless.planner.memory.vision_size import sees

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
        """Shape of a part."""
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
