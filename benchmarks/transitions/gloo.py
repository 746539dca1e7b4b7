"""A controller among the ranks: it gathers padded rows from all others and scatters them, over torch.distributed."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist
from benchmarks.transitions.case import RESPONSES, Case
from benchmarks.transitions.padded import Padded, empty, share_out

CONTROLLER = 0
"""The rank that all rows pass through."""


def through_controller(case: Case, rank: int, held: Padded | None) -> Padded | None:
    """Bring rows from one layout to the other. All ranks call it together.

    Args:
        case: Says who has how many rows, and who gets some.
        rank: Of this process.
        held: Its rows, if it is part of the source layout.

    Returns:
        Its rows, if it is part of the target layout.
    """
    if rank != CONTROLLER:
        if held is not None:
            _finish(_operations(dist.isend, held, CONTROLLER))
        if rank not in case.action.target_layout:
            return None
        share = empty(case, case.prompts * RESPONSES // len(case.action.target_layout.ranks))
        _finish(_operations(dist.irecv, share, CONTROLLER))
        return share
    return _scatter(case, _gather(case, held)).get(rank)


def _gather(case: Case, held: Padded | None) -> Padded:
    """All rows, received where they belong in one table."""
    everything = empty(case, case.prompts * RESPONSES)
    operations: list[dist.P2POp] = []
    for rank in case.action.source_layout.ranks:
        prompts = case.prompts_held(rank)
        part = {name: table[prompts.start * RESPONSES : prompts.stop * RESPONSES] for name, table in everything.items()}
        if rank == CONTROLLER:
            assert held is not None
            for name, table in part.items():
                table.copy_(held[name])
        else:
            operations += _operations(dist.irecv, part, rank)
    _finish(operations)
    return everything


def _scatter(case: Case, everything: Padded) -> dict[int, Padded]:
    """Every rank's share, sent to those that are elsewhere."""
    ranks = case.action.target_layout.ranks
    members = share_out(everything["prompt_lengths"], everything["response_lengths"], len(ranks))
    shares: dict[int, Padded] = {
        rank: {name: table[index] for name, table in everything.items()}
        for rank, index in zip(ranks, members, strict=True)
    }
    _finish([op for rank, share in shares.items() if rank != CONTROLLER for op in _operations(dist.isend, share, rank)])
    return shares


def _operations(operation: Callable[..., dist.Work | None], tables: Padded, peer: int) -> list[dist.P2POp]:
    """One message for each table, as bytes."""
    return [dist.P2POp(operation, tables[name].view(torch.uint8), peer) for name in sorted(tables)]


def _finish(operations: list[dist.P2POp]) -> None:
    for work in dist.batch_isend_irecv(operations) if operations else ():
        work.wait()
