"""A controller among the ranks: it gathers padded rows from all others and scatters them, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
import torch.distributed as dist
from benchmarks.transitions.case import RESPONSES, Case
from benchmarks.transitions.padded import Padded, empty, share_out
from torch import Tensor

CONTROLLER = 0
"""The rank that all rows pass through."""


def through_controller(case: Case, rank: int, held: Padded | None) -> Padded | None:
    """Take rows from one layout to the other. All ranks call it together.

    Args:
        case: Number of rows of each rank before and after.
        rank: Rank of this process.
        held: Rows of this rank, if it is part of the source layout.

    Returns:
        Rows of this rank, if it is part of the target layout.
    """
    if rank != CONTROLLER:
        if held is not None:
            finish(operations(dist.isend, held, CONTROLLER))
        if rank not in case.action.target_layout:
            return None
        share = empty(case, case.prompts * RESPONSES // len(case.action.target_layout.ranks))
        finish(operations(dist.irecv, share, CONTROLLER))
        return share
    return _scatter(case, _gather(case, held)).get(rank)


def _gather(case: Case, held: Padded | None) -> Padded:
    """All rows, received in their final place in one table."""
    everything = empty(case, case.prompts * RESPONSES)
    waiting: list[dist.P2POp] = []
    for rank in case.action.source_layout.ranks:
        prompts = case.prompts_held(rank)
        part = {name: table[prompts.start * RESPONSES : prompts.stop * RESPONSES] for name, table in everything.items()}
        if rank == CONTROLLER:
            assert held is not None
            for name, table in part.items():
                table.copy_(held[name])
        else:
            waiting += operations(dist.irecv, part, rank)
    finish(waiting)
    return everything


def _scatter(case: Case, everything: Padded) -> dict[int, Padded]:
    """The share of every rank, sent to those in other processes."""
    ranks = case.action.target_layout.ranks
    members = share_out(everything["prompt_lengths"], everything["response_lengths"], len(ranks))
    shares: dict[int, Padded] = {
        rank: {name: table[index] for name, table in everything.items()}
        for rank, index in zip(ranks, members, strict=True)
    }
    finish([op for rank, share in shares.items() if rank != CONTROLLER for op in operations(dist.isend, share, rank)])
    return shares


def operations(operation: Callable[..., dist.Work | None], tables: Mapping[str, Tensor], peer: int) -> list[dist.P2POp]:
    """One message for each table, as bytes.

    Args:
        operation: `isend` or `irecv`.
        tables: Tables whose names and sizes the other side knows.
        peer: Other rank.
    """
    return [dist.P2POp(operation, tables[name].view(torch.uint8), peer) for name in sorted(tables)]


def finish(waiting: list[dist.P2POp]) -> None:
    """Start these operations and wait for all."""
    for work in dist.batch_isend_irecv(waiting) if waiting else ():
        work.wait()
