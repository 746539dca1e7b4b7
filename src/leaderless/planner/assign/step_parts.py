"""The groups of a step in parts of even number, by their ids: the samples of a part share an optimizer update."""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from leaderless.planner.assign.balance import Int

NO_GROUP = np.iinfo(np.int64).max
"""Stands for the group at a place after the last one."""


class EarlierWork(NamedTuple):
    """Work of shards in earlier windows of a step whose other groups are unknown.

    Attributes:
        loads: [parts, shards] work of each part; what shards get in this window is added.
        num_groups: Groups of the step. Their ids are their positions in the data, so that the part of each is known.
    """

    loads: Int
    num_groups: int

    def parts_of(self, groups: Int) -> Int:
        """[n] part of each group, [n]."""
        parts: Int = groups % self.num_groups * len(self.loads) // self.num_groups
        return parts


def first_places(num_groups: int, num_parts: int) -> Int:
    """[num_parts - 1] place of the first group of every part but the first; group i is in part i * parts // groups."""
    places: Int = -(np.arange(-1, -num_parts, -1, dtype=np.int64) * num_groups // num_parts)
    return places


def parts_of(groups: Int, borders: Int) -> Int:
    """[n] part of each group, [n], from the first group of every part but the first."""
    return np.searchsorted(borders, groups, side="right").astype(np.int64)


def by_part(parts: Int, assign_some: Callable[[NDArray[np.bool_]], Int]) -> Int:
    """[n] owners, found for one part after the other by a function that takes which rows are in it."""
    owners = np.empty_like(parts)
    for part in np.unique(parts).tolist():
        chosen = parts == part
        owners[chosen] = assign_some(chosen)
    return owners


def at_places(groups: Int, places: Int) -> Int:
    """[k] group at each place of some groups in ascending order, or NO_GROUP behind the last."""
    found: Int = np.append(groups, NO_GROUP)[np.minimum(places, len(groups))]
    return found
