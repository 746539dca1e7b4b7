"""The rows of one row set that a rank holds under one layout, with columns from several nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import numpy as np
import torch
from torch import Tensor

from leaderless.data.batch import Batch, Column, concat_columns, select_rows

ColumnKey = tuple[str, str]
"""The node that wrote a column, and the column's name: two nodes may write the same name one after the other."""


@dataclass
class Table:
    """Rows in ascending order of their ids, and what nodes wrote about them.

    Attributes:
        ids: [n] int64, ascending.
        prompt_ids: [m] int64, the prompts that rows point to, ascending; None when rows are prompts.
        prompt_index: [n] int64, each row's place in `prompt_ids`.
        columns: The rows' own columns.
        prompt_columns: The prompts' columns. Other tables may hold the same tensors; each drops them by itself.
    """

    ids: Tensor
    prompt_ids: Tensor | None
    prompt_index: Tensor | None
    columns: dict[ColumnKey, Column] = field(default_factory=dict)
    prompt_columns: dict[ColumnKey, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, writer: str) -> Table:
        """The table of rows, in any order, that a node or the data made."""
        batch = sort_rows(batch, writer)
        if batch.prompts is None:
            table = cls(batch.ids, None, None)
        else:
            prompt_ids = batch.prompts.ids.sort().values
            table = cls(batch.ids, prompt_ids, torch.searchsorted(prompt_ids, batch.group_ids))
        table.add(batch, writer)
        return table

    def add(self, batch: Batch, writer: str) -> None:
        """Take in columns that a node wrote about the very rows that are here, and about their prompts."""
        batch = sort_rows(batch, writer)
        if not torch.equal(batch.ids, self.ids):
            raise ValueError(f"node '{writer}' must keep its {len(self.ids)} rows, but gave {len(batch)} others")
        self.columns |= {(writer, name): column for name, column in batch.columns.items()}
        if batch.prompts is not None:
            prompts = sort_rows(batch.prompts, writer)
            self.prompt_columns |= {(writer, name): column for name, column in prompts.columns.items()}

    def batch(self, sources: Mapping[str, str]) -> Batch:
        """The rows with the columns that a reader asks for; `sources` has the node that wrote each column."""
        own = {name: self.columns[source, name] for name, source in sources.items() if (source, name) in self.columns}
        if self.prompt_ids is None:
            return Batch(self.ids, own)
        others = {name: self.prompt_columns[source, name] for name, source in sources.items() if name not in own}
        return Batch(self.ids, own, Batch(self.prompt_ids, others), self.prompt_index)

    def drop(self, keys: Iterable[ColumnKey]) -> None:
        """Free columns that have no further reader."""
        for key in keys:
            self.columns.pop(key, None)
            self.prompt_columns.pop(key, None)

    def divided(self, num_parts: int) -> list[Table]:
        """The rows in parts of about equal size, in order; some may have no rows."""
        borders = [len(self.ids) * place // num_parts for place in range(num_parts + 1)]
        return [self._part(torch.arange(begin, end)) for begin, end in pairwise(borders)]

    def _part(self, index: Tensor) -> Table:
        columns = {key: select_rows(column, index) for key, column in self.columns.items()}
        prompt_index = None if self.prompt_index is None else self.prompt_index[index]
        return Table(self.ids[index], self.prompt_ids, prompt_index, columns, dict(self.prompt_columns))

    @classmethod
    def joined(cls, parts: Sequence[Table]) -> Table:
        """The rows of tables with the same columns, and no row in common; the parts give up their columns."""
        ids, order = torch.cat([part.ids for part in parts]).sort()
        twice = ids[1:][ids[1:] == ids[:-1]]
        if len(twice):
            raise ValueError(f"row {int(twice[0])} is in several of the parts that are joined")
        joined = cls(ids, None, None)
        for key in list(parts[0].columns):
            joined.columns[key] = _merge([part.columns.pop(key) for part in parts], order)
        known = [part.prompt_ids for part in parts if part.prompt_ids is not None]
        if not known:
            return joined
        group_ids = torch.cat([prompts[part.prompt_index] for part, prompts in zip(parts, known, strict=True)])[order]
        # Parts of one table share their prompts.
        distinct = {id(prompts): (part, prompts) for part, prompts in zip(parts, known, strict=True)}.values()
        all_ids = np.concatenate([prompts for _, prompts in distinct])
        joined.prompt_ids, first = map(torch.from_numpy, np.unique(all_ids, return_index=True))
        joined.prompt_index = torch.searchsorted(joined.prompt_ids, group_ids)
        for key in list(parts[0].prompt_columns):
            joined.prompt_columns[key] = _merge([part.prompt_columns.pop(key) for part, _ in distinct], first)
        return joined


def _merge(columns: list[Column], index: Tensor) -> Column:
    """Some rows of several columns; one without rows may not know the type of its values."""
    return select_rows(concat_columns([column for column in columns if len(column)] or columns[:1]), index)


def sort_rows(batch: Batch, writer: str) -> Batch:
    """The rows that a node made, in ascending order of their ids, which must differ."""
    if bool((batch.ids[1:] > batch.ids[:-1]).all()):
        return batch
    batch = batch.select(torch.argsort(batch.ids))
    twice = batch.ids[1:][batch.ids[1:] == batch.ids[:-1]]
    if len(twice):
        raise ValueError(f"node '{writer}' put out row {int(twice[0])} twice")
    return batch
