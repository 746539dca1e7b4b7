r"""Matrices of which ranks hold parts, each whole on one rank for a while.

    rank            0          1          along any axes
    parts        a0 b0 c0   a1 b1 c1      as ranks hold the weights
                    \   swap   /          every number once, to the rank that owns its matrix
    matrices      a, c         b          as evenly as matrices allow, in the order of their sizes
                    /   swap   \
    parts        a0 b0 c0   a1 b1 c1

A rank sends and receives its share of all numbers twice, whatever their number of ranks is. Matrices in a batch, such
as experts', are divided into single ones, which stay where they are if ranks hold them whole.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch

from leaderless.distributed.transport import ProcessGroup
from leaderless.distributed.weights.blocks import (
    HeldWeights,
    LocalWeight,
    Placement,
    Pool,
    Shape,
    WeightBlock,
    WeightDivision,
    even_rows,
    whole_block,
)
from leaderless.distributed.weights.route import WeightRoute
from leaderless.distributed.weights.stream import fill_weights
from leaderless.planner import Layout


@dataclass(frozen=True, kw_only=True)
class _OwnedWhole(WeightDivision):
    """The whole weight on one rank, as block 0; blocks of other ranks are empty, and have negative numbers."""

    owner: int

    def number_of(self, place: int) -> int:
        return 0 if place == self.owner else -1 - place

    def places(self, number: int) -> range:
        place = self.owner if number == 0 else -1 - number
        return range(place, place + 1)

    def block(self, number: int) -> WeightBlock:
        return whole_block(self.shape) if number == 0 else WeightBlock((0,) * len(self.shape), (0, *self.shape[1:]))

    def touching(self, block: WeightBlock) -> Sequence[int]:
        return range(1 if block.numel else 0)


def owners_of(shapes: Mapping[str, Shape], num_ranks: int) -> dict[str, int]:
    """The place of the rank that owns each matrix: the largest first, each to the rank with the least work so far.

    Work is what products of a matrix with itself take.
    """

    def work(name: str) -> int:
        return min(shapes[name]) ** 2 * max(shapes[name])

    owners, loads = dict[str, int](), [0] * num_ranks
    for name in sorted(shapes, key=lambda name: (-work(name), name)):
        owners[name] = min(range(num_ranks), key=loads.__getitem__)
        loads[owners[name]] += work(name)
    return owners


class WholeMatrices:
    """The way of matrices to the ranks that own them, and back.

    Args:
        shapes: Shapes of the whole matrices, [rows, columns], and of batches, [number, rows, columns], by name; the
            same on all ranks.
        holders: Ranks, and the part of each matrix that each of them has.
        process_group: Ranks of `holders`.
    """

    def __init__(self, shapes: Mapping[str, Shape], holders: Pool, process_group: ProcessGroup) -> None:
        """Decide who owns what; no rank asks another."""
        self._group, layout = process_group, holders.layout
        self._shapes = {name: shape for name, shape in shapes.items() if not _stays(name, shape, holders)}
        singles = {name: shape for name, shape in self._shapes.items() if len(shape) == 2}
        self._owners = owners_of(singles, len(layout.ranks))
        rank, owning = process_group.rank, Pool(layout, self._placement())
        there, back = ((holders, owning), (owning, holders))
        self._there, self._back = (
            WeightRoute(f"matrices {way}", self._shapes, *pools, torch.float32, rank)
            for way, pools in (("to their owners", there), ("from their owners", back))
        )
        self._owning = owning

    def _placement(self) -> Placement:
        def place(name: str, shape: Shape, layout: Layout) -> WeightDivision:
            if len(shape) == 2:
                return _OwnedWhole(shape, len(layout.ranks), owner=self._owners[name])
            return even_rows(name, shape, layout)

        return place

    def owned(self, parts: Mapping[str, LocalWeight]) -> dict[str, LocalWeight]:
        """Matrices that this rank owns, gathered from all ranks, by name; all ranks call it together.

        Args:
            parts: Parts of matrices that this rank holds, float32, by name; none of those that it has no part of.
        """
        found = {name: self._room(name) for name in self._shapes}
        fill_weights(self._there, HeldWeights(found, 0), self._group, HeldWeights(self._complete(parts), 0))
        staying = {name: one for name, one in parts.items() if name not in self._shapes}
        return {**staying, **found}

    def give_back(self, owned: Mapping[str, LocalWeight], parts: Mapping[str, LocalWeight]) -> None:
        """Write what owners have made of matrices into the parts that ranks hold; all ranks call it together."""
        held = HeldWeights({name: owned[name] for name in self._shapes}, 0)
        fill_weights(self._back, HeldWeights(self._complete(parts), 0), self._group, held)

    def _complete(self, parts: Mapping[str, LocalWeight]) -> dict[str, LocalWeight]:
        return {
            name: parts.get(name) or LocalWeight.nothing(name, shape, self._group.payload_device)
            for name, shape in self._shapes.items()
        }

    def _room(self, name: str) -> LocalWeight:
        shape = self._shapes[name]
        block = self._owning.block(name, shape, self._group.rank)
        return LocalWeight(name, shape, block, torch.empty(block.sizes, device=self._group.payload_device))


def _stays(name: str, shape: Shape, holders: Pool) -> bool:
    """Whether ranks hold all matrices that they have a part of whole."""
    return holders.division(name, shape).block(0).sizes[-2:] == shape[-2:]
