"""The groups at given positions among the groups of all ranks, in the order of their ids.

Few ranks gather the ids of all groups. With many ranks, each gets the ids of a range, and the number of ids in other
ranges.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import numpy as np
import torch

from leaderless.data.buffer.block_exchange import MeshPosition, Talk, hold
from leaderless.distributed.transport import ProcessGroup
from leaderless.planner.assign.balance import NO_GROUP, Int, at_places
from leaderless.planner.assign.blocks import SELECTION_LEGS, Mesh, is_in_blocks

Places = Callable[[int], Int]
"""Takes the number of all groups, and returns the places that are asked for."""


class Span(NamedTuple):
    """Number of some groups, and the first and the last id; None where there are none."""

    groups: int
    first_group: int | None = None
    last_group: int | None = None


def span_of(process_group: ProcessGroup, mine: Int, what: str) -> Span:
    """The different groups of all ranks, which call it together; `mine` are this rank's groups."""
    count, ends = select(process_group, mine, lambda count: np.array([0, count - 1]), what)
    return Span(count, *ends.tolist()) if count else Span(0)


def select(process_group: ProcessGroup, mine: Int, places: Places, what: str) -> tuple[int, Int]:
    """Number of different groups of all ranks, and [k >= 1] which are at certain places of their ascending order.

    All ranks of the process group call it together; `mine` are groups of this one, of which others may have some, too.
    """
    mine = np.unique(mine)
    if is_in_blocks(process_group.size, SELECTION_LEGS):
        place = MeshPosition(Mesh(process_group.size), process_group.ranks.index(process_group.rank))
        return hold(process_group, select_in_blocks(place, mine, places), what)
    groups = np.unique(torch.cat(process_group.gather(torch.from_numpy(mine), what)).numpy())
    return len(groups), at_places(groups, places(len(groups)))


def select_in_blocks(place: MeshPosition, mine: Int, places: Places) -> Talk[tuple[int, Int]]:
    """The same where each rank hears of one range of ids, and how many there are in the others."""
    ends = np.array([[mine.min(initial=NO_GROUP), -mine.max(initial=-NO_GROUP)]])
    least, most = (yield from _lowest(place, ends)).tolist()
    if least == NO_GROUP:
        return 0, np.full_like(places(0), NO_GROUP)
    width = (-most - least) // place.mesh.num_ranks + 1
    here = np.unique((yield from place.route((mine - least) // width, mine[:, None])))
    counts = np.concatenate((yield from place.to_block(np.array([[len(here)]]))))[:, 0]
    totals = (yield from place.across(np.array([counts.sum()])))[:, 0]
    begin = int(totals[: place.block].sum() + counts[: place.column].sum())
    wanted = places(int(totals.sum()))
    is_here = (wanted >= begin) & (wanted < begin + len(here))
    found = np.where(is_here, at_places(here, np.clip(wanted - begin, 0, len(here))), NO_GROUP)
    return int(totals.sum()), (yield from _lowest(place, found[None]))


def _lowest(place: MeshPosition, row: Int) -> Talk[Int]:
    """[k] the lowest of all ranks' rows, [1, k] each."""
    block = np.concatenate((yield from place.to_block(row)))
    world = yield from place.across(block.min(axis=0))
    found: Int = world.min(axis=0)
    return found
