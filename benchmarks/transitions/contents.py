"""Rows summarized in three numbers, to compare rows before and after a transition."""

from __future__ import annotations

from collections.abc import Mapping

import torch
from benchmarks.transitions.case import COLUMNS, Message
from torch import Tensor

from leaderless.data.batch import Batch, Jagged, ragged_index
from leaderless.planner.assign.balance import sequence_cost
from leaderless.planner.entries import QUADRATIC_TOKENS

_ODD = 0x5851F42D4C957F2D
"""Spreads small numbers over 64 bits; sums wrap around."""


class Contents(Message):
    """Some rows.

    Attributes:
        rows: Number of rows.
        cost: Cost of processing them.
        fingerprint: Fingerprint of ids and all values; that of several parts is the sum of theirs, modulo 2^64.
    """

    rows: int = 0
    cost: int = 0
    fingerprint: int = 0

    def __add__(self, other: Contents) -> Contents:
        """The contents of both together."""
        fingerprint = (self.fingerprint + other.fingerprint) % 2**64
        return Contents(rows=self.rows + other.rows, cost=self.cost + other.cost, fingerprint=fingerprint)

    @classmethod
    def of_batch(cls, rows: Batch | None) -> Contents:
        """The contents of a rank's rows, if it has any."""
        return cls() if rows is None else cls.of(rows.ids, {name: _column(rows, name) for name in COLUMNS})

    @classmethod
    def of(cls, ids: Tensor, columns: Mapping[str, Tensor | Jagged]) -> Contents:
        """The contents of rows with all columns.

        Args:
            ids: [n] int64.
            columns: Each row's own, by name.
        """
        prompts, tokens = columns["prompt_tokens"], columns["tokens"]
        assert isinstance(prompts, Jagged)
        assert isinstance(tokens, Jagged)
        cost = int(sequence_cost((prompts.lengths + tokens.lengths).numpy(), QUADRATIC_TOKENS).sum())
        return cls(rows=len(ids), cost=cost, fingerprint=_fingerprint(ids, columns))


def _column(rows: Batch, name: str) -> Tensor | Jagged:
    column = rows[name]
    assert not isinstance(column, tuple)
    return column


def _fingerprint(ids: Tensor, columns: Mapping[str, Tensor | Jagged]) -> int:
    rows = ids * _ODD
    for place, name in enumerate(sorted(columns)):
        column = columns[name]
        lengths = column.lengths if isinstance(column, Jagged) else torch.ones_like(ids)
        values = column.values if isinstance(column, Jagged) else column
        bits = (values.view(torch.int32) if values.is_floating_point() else values).long()
        positions = ragged_index(torch.zeros_like(lengths), lengths)
        sums = torch.cat([bits.new_zeros(1), ((bits + 1) * (positions * 2 + 1)).cumsum(0)])
        ends = lengths.cumsum(0)
        rows = (rows ^ ((sums[ends] - sums[ends - lengths]) * (place * 2 + 1))) * _ODD
    return int(rows.sum()) % 2**64
