"""How tensor parallelism divides weights, from their names alone, so that every rank knows what each other one has.

Of a linear layer that widens, each rank has some of the outputs; of one that narrows, the inputs that these are. Words
are divided where they can be. What is left is small, and every rank has it.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from leaderless.planner import Layout
from leaderless.planner.vision_size import sees
from leaderless.weights.blocks import Block, Division, Shape

WIDENING = {"q_proj", "k_proj", "v_proj", "gate_proj", "up_proj"}
"""Layers of which each rank has some rows of the weight, and of the bias."""
NARROWING = {"o_proj", "down_proj"}
"""Layers of which each rank has some columns of the weight, and the whole bias."""
ROWS, COLUMNS = {"weight", "bias", "lora_B"}, {"weight", "lora_A"}
"""Of a layer that widens, what has an output in each row; of one that narrows, what has an input in each column."""
WORDS = {"embed_tokens", "lm_head"}
"""Embeddings of which each rank has those of some words, if the ranks divide their number."""


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


def tensor_rows(name: str, shape: Shape, layout: Layout) -> Division:
    """Give each of the ranks along `tp` its part of a weight, and divide the rows of a part over ranks along others."""
    dim = divided_dim(name, shape, layout.tp)
    if dim is None or layout.tp == 1:
        return Division(shape, len(layout.ranks), layout.tp)
    return _PartDivision(shape, len(layout.ranks), dim=dim, tp=layout.tp)


@dataclass(frozen=True)
class _PartDivision(Division):
    """Equal parts along one dimension, each divided by rows; neighbors have parts, so that each has a block alone."""

    tp: int = 1

    @property
    def _part(self) -> Shape:
        """Shape of a part."""
        return tuple(size // self.tp if dim == self.dim else size for dim, size in enumerate(self.shape))

    @property
    def _rows(self) -> int:
        """Rows of the first block of a part."""
        return -(-self._part[0] // (self.num_ranks // self.tp))

    def block(self, number: int) -> Block:
        index, part = divmod(number, self.tp)
        first = min(index * self._rows, self._part[0])
        offsets = [part * size if dim == self.dim else 0 for dim, size in enumerate(self._part)]
        offsets[0] += first
        return Block(tuple(offsets), (min(self._rows, self._part[0] - first), *self._part[1:]))

    def touching(self, block: Block) -> list[int]:
        return sorted(self._touching(block)) if block.numel else []

    def _touching(self, block: Block) -> Iterator[int]:
        size = self._part[self.dim]
        first, last = block.offsets[self.dim], block.offsets[self.dim] + block.sizes[self.dim] - 1
        for part in range(first // size, last // size + 1):
            begin = part * size if self.dim == 0 else 0
            top, bottom = block.offsets[0] - begin, block.offsets[0] + block.sizes[0] - 1 - begin
            rows = range(max(top, 0) // self._rows, min(bottom, self._part[0] - 1) // self._rows + 1)
            yield from (index * self.tp + part for index in rows)
