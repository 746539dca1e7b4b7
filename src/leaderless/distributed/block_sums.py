"""Few numbers of many ranks: combined in each block, then among blocks, as a ring would go round all ranks."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import torch
import torch.distributed as dist
from torch import Tensor

from leaderless.planner.assign.blocks import Mesh

if TYPE_CHECKING:
    from leaderless.distributed.transport import ProcessGroup


def all_reduce_in_blocks(group: ProcessGroup, values: Tensor, operation: dist.ReduceOp.RedOpType, what: str) -> Tensor:
    """The sum or the largest over all ranks, of values in host memory.

    All combine the same values in the same order, so that each gets the same bits.
    """
    mesh, place = Mesh(group.size), group.ranks.index(group.rank)
    members = mesh.members(int(mesh.blocks(np.array([place]))[0]))
    block = _combined(_swap(group, values, (members, members), what), operation)
    across = mesh.below(place).tolist(), mesh.above(place).tolist()
    return _combined(_swap(group, block, across, what), operation)


def _swap(group: ProcessGroup, values: Tensor, places: tuple[Sequence[int], Sequence[int]], what: str) -> list[Tensor]:
    """Values of one shape from some places, in their order, in return for values to some; `places` are to and from."""
    own, here, ranks = group.rank, values.contiguous(), group.ranks
    to, senders = places
    message = here.reshape(-1).view(torch.uint8)
    received = {ranks[place]: torch.empty_like(here) for place in senders if ranks[place] != own}
    sent = [(ranks[place], message) for place in to if ranks[place] != own]
    arriving = [(rank, part.reshape(-1).view(torch.uint8)) for rank, part in received.items()]
    by_torch = replace(group, payload_device=torch.device("cpu"), endpoint=None)
    by_torch.exchange_rounds([(sent, arriving)], what)
    return [received.get(ranks[place], here) for place in senders]


def _combined(parts: Sequence[Tensor], operation: dist.ReduceOp.RedOpType) -> Tensor:
    """The sum or the largest of tensors, one after the other, so that all processors round alike."""
    add = torch.add if operation == dist.ReduceOp.SUM else torch.maximum
    return functools.reduce(add, parts[1:], parts[0].clone())
