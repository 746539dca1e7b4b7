"""The controller of `gloo.py` without padding: its remaining cost when only true values are sent."""

from __future__ import annotations

from collections.abc import Mapping

import torch
import torch.distributed as dist
from benchmarks.transitions.case import COLUMNS, RESPONSES, Case
from benchmarks.transitions.gloo import CONTROLLER, finish, operations
from benchmarks.transitions.padded import DTYPES, share_out
from torch import Tensor

from leaderless.data.batch import Batch, Jagged

HEADS = ("ids", "prompt_lengths", "response_lengths", "rewards")
"""Columns with one value per row; they are sent first, since they determine how long the others are."""
RUNS = tuple(name for name in COLUMNS if name not in HEADS)


def flat(rows: Batch) -> Batch:
    """The same rows, each with its own prompt."""
    return Batch(rows.ids, {name: rows[name] for name in COLUMNS})


def through_controller(case: Case, rank: int, held: Batch | None) -> Batch | None:
    """Take rows from one layout to the other. All ranks call it together.

    Args:
        case: Number of rows of each rank before and after.
        rank: Rank of this process.
        held: Rows of this rank, each with its own prompt, if it is part of the source layout.

    Returns:
        Rows of this rank, if it is part of the target layout.
    """
    target = case.action.target_layout
    if rank == CONTROLLER:
        return _scatter(case, _gather(case, held)).get(rank)
    if held is not None:
        finish(operations(dist.isend, _heads(held), CONTROLLER))
        finish(operations(dist.isend, _runs(held), CONTROLLER))
    if rank not in target:
        return None
    heads = _empty_heads(case.prompts * RESPONSES // target.dp)
    finish(operations(dist.irecv, heads, CONTROLLER))
    runs = _empty_runs(heads)
    finish(operations(dist.irecv, runs, CONTROLLER))
    return _join(heads, runs)


def _gather(case: Case, held: Batch | None) -> Batch:
    """All rows, received in their final place."""
    others = [rank for rank in case.action.source_layout.ranks if rank != CONTROLLER]
    parts = {rank: _empty_heads(len(case.prompts_held(rank)) * RESPONSES) for rank in others}
    finish([operation for rank in others for operation in operations(dist.irecv, parts[rank], rank)])
    mine = [] if held is None else [_heads(held)]
    everyone = [*mine, *parts.values()]
    heads = {name: torch.cat([part[name] for part in everyone]) for name in HEADS}
    runs = _empty_runs(heads)
    counts = [{name: int(part[_lengths_of(name)].sum()) for name in RUNS} for part in everyone]
    slices = {name: torch.split(runs[name], [count[name] for count in counts]) for name in RUNS}
    if held is not None:
        for name, values in _runs(held).items():
            slices[name][0].copy_(values)
    waiting = []
    for place, rank in enumerate(others, start=len(mine)):
        waiting += operations(dist.irecv, {name: slices[name][place] for name in RUNS}, rank)
    finish(waiting)
    return _join(heads, runs)


def _scatter(case: Case, everything: Batch) -> dict[int, Batch]:
    """The share of every rank, sent to those in other processes."""
    ranks = case.action.target_layout.ranks
    prompts, responses = everything.jagged("prompt_tokens").lengths, everything.jagged("tokens").lengths
    members = share_out(prompts, responses, len(ranks))
    shares = {rank: everything.select(index) for rank, index in zip(ranks, members, strict=True)}
    others = {rank: share for rank, share in shares.items() if rank != CONTROLLER}
    for part in (_heads, _runs):
        finish([o for rank, share in others.items() for o in operations(dist.isend, part(share), rank)])
    return shares


def _heads(rows: Batch) -> Mapping[str, Tensor]:
    lengths = rows.jagged("prompt_tokens").lengths, rows.jagged("tokens").lengths
    return dict(zip(HEADS, (rows.ids, *lengths, rows.dense("rewards")), strict=True))


def _runs(rows: Batch) -> Mapping[str, Tensor]:
    return {name: rows.jagged(name).values for name in RUNS}


def _empty_heads(num_rows: int) -> Mapping[str, Tensor]:
    return {name: torch.empty(num_rows, dtype=DTYPES[name]) for name in HEADS}


def _empty_runs(heads: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
    return {name: torch.empty(int(heads[_lengths_of(name)].sum()), dtype=DTYPES[name]) for name in RUNS}


def _lengths_of(name: str) -> str:
    return "prompt_lengths" if name == "prompt_tokens" else "response_lengths"


def _join(heads: Mapping[str, Tensor], runs: Mapping[str, Tensor]) -> Batch:
    columns = {name: Jagged(values, heads[_lengths_of(name)], name) for name, values in runs.items()}
    dense = {name: heads[name] for name in ("response_lengths", "rewards")}
    return Batch(heads["ids"], {**columns, **dense})
