"""Which part of a weight a rank has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, replace

from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.planner import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class Block:
    """A box of a whole tensor: the index of its first element, and its size, in each dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def common(self, other: Block) -> Block:
        """The elements that two blocks of a tensor share; a block without elements if there are none."""
        first = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        last = (min(a + n, b + m) for a, n, b, m in ends)
        return Block(first, tuple(max(0, end - begin) for begin, end in zip(first, last, strict=True)))

    def view(self, data: Tensor, held: Block) -> Tensor:
        """View this block in a tensor that holds another one, which contains it."""
        for dim, (first, size, begin) in enumerate(zip(self.offsets, self.sizes, held.offsets, strict=True)):
            data = data.narrow(dim, first - begin, size)
        return data

    def rows(self, first: int, last: int) -> Block:
        """The rows from `first` to `last`, which is not included, counted from the first row, as far as there are any.

        Rows are the first dimension.
        """
        first, last = min(first, self.sizes[0]), min(last, self.sizes[0])
        return Block((self.offsets[0] + first, *self.offsets[1:]), (last - first, *self.sizes[1:]))


def whole_block(shape: Shape) -> Block:
    """The block of all elements."""
    return Block((0,) * len(shape), shape)


Placement = Callable[[str, Shape, Layout, int], Block]
"""From the name and shape of a weight, a layout and one of its ranks to the block that the rank has.

It is a pure function, so that every rank knows what each other one has. The blocks of the ranks of a layout are equal
or disjoint, and cover the weight.
"""


def everything(name: str, shape: Shape, layout: Layout, rank: int) -> Block:  # noqa: ARG001
    """Give every rank the whole weight."""
    return whole_block(shape)


def even_rows(name: str, shape: Shape, layout: Layout, rank: int) -> Block:  # noqa: ARG001
    """Give every rank equal numbers of rows, rounded up, the last ones fewer."""
    return _rows_of(shape, layout.ranks.index(rank), len(layout.ranks))


def shard_rows(name: str, shape: Shape, layout: Layout, rank: int) -> Block:  # noqa: ARG001
    """Give every shard of the layout equal numbers of rows, as `even_rows`, and all of its ranks the same."""
    return _rows_of(shape, layout.shard_of(rank), layout.dp)


def _rows_of(shape: Shape, place: int, num_parts: int) -> Block:
    size = -(-shape[0] // num_parts)
    first = min(place * size, shape[0])
    return Block((first, *(0,) * (len(shape) - 1)), (min(size, shape[0] - first), *shape[1:]))


@dataclass(frozen=True)
class Pool:
    """The ranks of a layout, and the block of each weight that each of them has."""

    layout: Layout
    placement: Placement

    def block(self, name: str, shape: Shape, rank: int) -> Block:
        """The block of a weight that a rank has."""
        return self.placement(name, shape, self.layout, rank)


@dataclass(frozen=True)
class LocalWeight:
    """What a rank holds of a weight.

    Attributes:
        name: Name of the weight in `transformers`.
        shape: Shape of the whole weight.
        block: Part of the whole that this rank holds.
        local: Tensor with the elements of the block.
    """

    name: str
    shape: Shape
    block: Block
    local: Tensor

    @classmethod
    def of(cls, name: str, value: Tensor) -> LocalWeight:
        """What this rank holds of a tensor, distributed or whole; a single number is taken as a row."""
        value = value.detach()
        if not isinstance(value, DTensor):
            value = value if value.ndim else value.view(1)
            return cls(name, tuple(value.shape), whole_block(tuple(value.shape)), value)
        (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        local = value.to_local()
        return cls(name, tuple(value.shape), Block(tuple(chunk.offsets), tuple(local.shape)), local)


@dataclass(frozen=True)
class HeldWeights:
    """All weights of one policy version as a rank holds them, by name: those of a live model, or a copy."""

    weights: Mapping[str, LocalWeight]
    policy_version: int

    @classmethod
    def of(cls, weights: Iterable[LocalWeight], policy_version: int) -> HeldWeights:
        """Collect weights, which keep their order."""
        return cls({weight.name: weight for weight in weights}, policy_version)

    def copied(self) -> HeldWeights:
        """Copy them to host memory, so that training can change the originals."""
        weights = (replace(weight, local=weight.local.to("cpu", copy=True)) for weight in self.weights.values())
        return HeldWeights.of(weights, self.policy_version)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the whole weights, by name."""
        return {name: weight.shape for name, weight in self.weights.items()}
