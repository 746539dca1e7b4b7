"""Which part of a weight a rank has."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor
from torch.distributed.tensor import Placement as PlacedPart
from torch.distributed.tensor._dtensor_spec import DTensorSpec, TensorMeta

from leaderless.planner import Layout

Shape = tuple[int, ...]


@dataclass(frozen=True)
class WeightBlock:
    """A box of a whole tensor: the index of its first element, and its size, in each dimension."""

    offsets: Shape
    sizes: Shape

    @property
    def numel(self) -> int:
        """Number of elements."""
        return math.prod(self.sizes)

    def common(self, other: WeightBlock) -> WeightBlock:
        """The elements that two blocks of a tensor share; a block without elements if there are none."""
        first = tuple(max(a, b) for a, b in zip(self.offsets, other.offsets, strict=True))
        ends = zip(self.offsets, self.sizes, other.offsets, other.sizes, strict=True)
        last = (min(a + n, b + m) for a, n, b, m in ends)
        return WeightBlock(first, tuple(max(0, end - begin) for begin, end in zip(first, last, strict=True)))

    def view(self, data: Tensor, held: WeightBlock) -> Tensor:
        """View this block in a tensor that holds another one, which contains it."""
        for dim, (first, size, begin) in enumerate(zip(self.offsets, self.sizes, held.offsets, strict=True)):
            data = data.narrow(dim, first - begin, size)
        return data

    def rows(self, first: int, last: int) -> WeightBlock:
        """The rows from `first` to `last`, which is not included, counted from the first row, as far as there are any.

        Rows are the first dimension.
        """
        first, last = min(first, self.sizes[0]), min(last, self.sizes[0])
        return WeightBlock((self.offsets[0] + first, *self.offsets[1:]), (last - first, *self.sizes[1:]))


def whole_block(shape: Shape) -> WeightBlock:
    """The block of all elements."""
    return WeightBlock((0,) * len(shape), shape)


@dataclass(frozen=True)
class WeightDivision:
    """Which block of a weight each rank of a layout has, by the place of the rank among the others.

    Blocks have equal sizes along one dimension, rounded up; the last ones may be smaller or empty. So it follows from
    the index of an element which ranks have it, without a look at each of them.

    Attributes:
        shape: Shape of the weight.
        num_ranks: Ranks of the layout.
        ranks_per_block: Neighbors that have the same block.
        dim: Dimension that is divided.
    """

    shape: Shape
    num_ranks: int
    ranks_per_block: int = 1
    dim: int = 0

    @property
    def _size(self) -> int:
        """Size of the first block along the dimension that is divided."""
        return -(-self.shape[self.dim] // -(-self.num_ranks // self.ranks_per_block))

    def number_of(self, place: int) -> int:
        """The number of the block that the rank at a place has."""
        return place // self.ranks_per_block

    def places(self, number: int) -> range:
        """The places of the ranks that have a block."""
        first = number * self.ranks_per_block
        return range(first, min(first + self.ranks_per_block, self.num_ranks))

    def block(self, number: int) -> WeightBlock:
        """The elements of a block; no later one has more rows or elements than the first."""
        dim, first = self.dim, min(number * self._size, self.shape[self.dim])
        size = min(self._size, self.shape[dim] - first)
        offsets = (*(0,) * dim, first, *(0,) * (len(self.shape) - dim - 1))
        return WeightBlock(offsets, (*self.shape[:dim], size, *self.shape[dim + 1 :]))

    def touching(self, block: WeightBlock) -> Sequence[int]:
        """The numbers of the blocks that share elements with another block of the weight, ascending."""
        if not block.numel:
            return range(0)
        first, size = block.offsets[self.dim], block.sizes[self.dim]
        return range(first // self._size, (first + size - 1) // self._size + 1)


Placement = Callable[[str, Shape, Layout], WeightDivision]
"""From the name and shape of a weight and a layout to the block that each rank has.

It is a pure function, so that every rank knows what each other one has.
"""


def everything(name: str, shape: Shape, layout: Layout) -> WeightDivision:  # noqa: ARG001
    """Give every rank the whole weight."""
    return WeightDivision(shape, len(layout.ranks), len(layout.ranks))


def even_rows(name: str, shape: Shape, layout: Layout) -> WeightDivision:  # noqa: ARG001
    """Give every rank equal numbers of rows, rounded up, the last ones fewer."""
    return WeightDivision(shape, len(layout.ranks))


def shard_rows(name: str, shape: Shape, layout: Layout) -> WeightDivision:  # noqa: ARG001
    """Give every shard of the layout equal numbers of rows, as `even_rows`, and all of its ranks the same."""
    return WeightDivision(shape, len(layout.ranks), layout.ranks_per_shard)


@dataclass(frozen=True)
class Pool:
    """The ranks of a layout, and the block of each weight that each of them has."""

    layout: Layout
    placement: Placement

    def division(self, name: str, shape: Shape) -> WeightDivision:
        """Which block of a weight each rank has."""
        return self.placement(name, shape, self.layout)

    def block(self, name: str, shape: Shape, rank: int) -> WeightBlock:
        """The block of a weight that a rank has."""
        division = self.division(name, shape)
        return division.block(division.number_of(self.layout.place(rank)))


@dataclass(frozen=True)
class LocalWeight:
    """Part of a weight that a rank holds: a block of the whole, its elements in `local`, named as in `transformers`."""

    name: str
    shape: Shape
    block: WeightBlock
    local: Tensor

    @classmethod
    def of(cls, name: str, value: Tensor) -> LocalWeight:
        """Part of a tensor that this rank holds, distributed or whole; a single number is taken as a row."""
        value = value.detach()
        if not isinstance(value, DTensor):
            value = value if value.ndim else value.view(1)
            return cls(name, tuple(value.shape), whole_block(tuple(value.shape)), value)
        (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        local = value.to_local()
        return cls(name, tuple(value.shape), WeightBlock(tuple(chunk.offsets), tuple(local.shape)), local)

    @classmethod
    def nothing(cls, name: str, shape: Shape, device: torch.device) -> LocalWeight:
        """Nothing of a weight, which other ranks have."""
        block = WeightBlock((0,) * len(shape), (0, *shape[1:]))
        return cls(name, shape, block, torch.empty(block.sizes, device=device))


@dataclass(frozen=True)
class HeldWeights:
    """All weights of one policy version as a rank holds them, by name: the weights of a live model, or a copy."""

    weights: Mapping[str, LocalWeight]
    policy_version: int

    @classmethod
    def of(cls, weights: Iterable[LocalWeight], policy_version: int) -> HeldWeights:
        """Collect weights, which keep their order."""
        return cls({weight.name: weight for weight in weights}, policy_version)

    @property
    def shapes(self) -> dict[str, Shape]:
        """Shapes of the whole weights, by name."""
        return {name: weight.shape for name, weight in self.weights.items()}


def part_of(local: Tensor, mesh: DeviceMesh, placements: Sequence[PlacedPart], shape: torch.Size) -> DTensor:
    """A whole tensor of a shape, of which this rank has a part, on any device.

    `DTensor.from_local` would copy what is in host memory to the device of the mesh.
    """
    strides = torch.empty(shape, device="meta").stride()
    described = DTensorSpec(mesh, tuple(placements), tensor_meta=TensorMeta(shape, strides, local.dtype))
    return DTensor(local, described, requires_grad=False)  # type: ignore[no-untyped-call]
