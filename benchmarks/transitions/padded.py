"""Rows in the form of a controller: tables of equal width, padded to the longest allowed response."""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np
import torch
from benchmarks.transitions.case import COLUMNS, MAX_PROMPT_TOKENS, Case
from benchmarks.transitions.contents import Contents
from torch import Tensor

from leaderless.data.batch import Batch, Jagged
from leaderless.planner.assign.balance import sequence_cost
from leaderless.planner.entries import QUADRATIC_TOKENS

Padded = Mapping[str, Tensor]
"""Tables [n] or [n, width] by name: the columns, `ids` and `prompt_lengths`."""
DTYPES = {
    "ids": torch.int64,
    "prompt_lengths": torch.int64,
    "prompt_tokens": torch.int64,
    "tokens": torch.int64,
    "response_mask": torch.bool,
    "response_lengths": torch.int64,
    "rollout_log_probs": torch.float32,
    "old_log_probs": torch.float32,
    "rewards": torch.float32,
}
_DENSE = {"ids", "prompt_lengths", "response_lengths", "rewards"}


def empty(case: Case, num_rows: int) -> Padded:
    """Tables for a number of rows, not filled."""
    tables: dict[str, Tensor] = {}
    for name, dtype in DTYPES.items():
        width = MAX_PROMPT_TOKENS if name == "prompt_tokens" else case.max_tokens
        tables[name] = torch.empty((num_rows,) if name in _DENSE else (num_rows, width), dtype=dtype)
    return tables


def pad(case: Case, rows: Batch) -> Padded:
    """The same rows, padded with zeros on the right, each with its prompt."""
    tables = empty(case, len(rows))
    tables["ids"].copy_(rows.ids)
    tables["prompt_lengths"].copy_(rows.jagged("prompt_tokens").lengths)
    for name in COLUMNS:
        column = rows[name]
        if isinstance(column, Jagged):
            tables[name].zero_()[_is_filled(tables[name], column.lengths)] = column.values
        else:
            tables[name].copy_(rows.dense(name))
    return tables


def contents(tables: Padded | None) -> Contents:
    """The contents of padded rows, if there are any."""
    if tables is None:
        return Contents()
    columns: dict[str, Tensor | Jagged] = {}
    for name in COLUMNS:
        table = tables[name]
        if table.ndim == 1:
            columns[name] = table
        else:
            lengths = tables["prompt_lengths" if name == "prompt_tokens" else "response_lengths"]
            columns[name] = Jagged(table[_is_filled(table, lengths)], lengths, name)
    return Contents.of(tables["ids"], columns)


def share_out(prompt_lengths: Tensor, response_lengths: Tensor, num_shares: int) -> list[Tensor]:
    """The rows of each share, as a controller divides them: equal numbers of rows, with about equal cost.

    Going from the most to the least expensive row, each share gets one of every `num_shares` rows; the most expensive
    of them goes to the share with the least work.

    Args:
        prompt_lengths: [n] int64 tokens of each row's prompt.
        response_lengths: [n] int64 tokens of each response.
        num_shares: Number of shares, a divisor of n.

    Returns:
        [n / num_shares] int64 indices of rows for each share, ascending.
    """
    costs = sequence_cost((prompt_lengths + response_lengths).numpy(), QUADRATIC_TOKENS)
    dearest_first = np.argsort(-costs, kind="stable").reshape(-1, num_shares)
    members = np.empty_like(dearest_first)
    work = np.zeros(num_shares, dtype=np.int64)
    for place, rows in enumerate(dearest_first):
        least_first = np.argsort(work, kind="stable")
        members[place, least_first] = rows
        work[least_first] += costs[rows]
    return list(torch.from_numpy(np.sort(members, axis=0)).unbind(1))


def _is_filled(table: Tensor, lengths: Tensor) -> Tensor:
    """[n, width] bool."""
    return torch.arange(table.shape[1]) < lengths[:, None]
