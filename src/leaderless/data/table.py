"""The rows of one row set that a rank holds under one layout, with columns from several nodes."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import pairwise

import torch
from torch import Tensor

from leaderless.data.batch import Batch, Column, select_rows
from leaderless.data.column_store import merge

ColumnKey = tuple[str, str]
"""The node that wrote a column, and the column's name: two nodes may write the same name one after the other."""


@dataclass
class Table:
    """Rows in ascending order of their ids, and what nodes wrote about them.

    Attributes:
        ids: [n] int64, ascending.
        prompts: The prompts that rows point to, in ascending order of their ids; None when rows are prompts.
        prompt_index: [n] int64, each row's row of `prompts`.
        columns: The rows' own columns.
    """

    ids: Tensor
    prompts: Batch | None
    prompt_index: Tensor | None
    columns: dict[ColumnKey, Column] = field(default_factory=dict)

    @classmethod
    def of(cls, batch: Batch, writer: str) -> Table:
        """The table of rows that a node, or the data, made.

        Args:
            batch: The rows, in any order.
            writer: The node.

        Raises:
            ValueError: Two rows have the same id.
        """
        batch = sort_rows(batch, writer)
        prompts, prompt_index = batch.prompts, batch.prompt_index
        if prompts is not None and prompt_index is not None:
            prompts = sort_rows(prompts, writer)
            prompt_index = torch.searchsorted(prompts.ids, batch.group_ids)
        table = cls(batch.ids, prompts, prompt_index)
        table.add(batch, writer)
        return table

    def add(self, batch: Batch, writer: str) -> None:
        """Take in columns about the rows that are here, and about their prompts.

        Args:
            batch: The same rows.
            writer: The node that wrote the columns.

        Raises:
            ValueError: The rows are others.
        """
        batch = sort_rows(batch, writer)
        if not torch.equal(batch.ids, self.ids):
            raise ValueError(f"node '{writer}' must keep its {len(self.ids)} rows, but gave {len(batch)} others")
        self.columns |= {(writer, name): column for name, column in batch.columns.items()}
        if batch.prompts is not None and self.prompts is not None and batch.prompts.columns:
            self.prompts = self.prompts.with_columns(sort_rows(batch.prompts, writer).columns)

    def batch(self, sources: Mapping[str, str]) -> Batch:
        """The rows with the columns that a reader asks for.

        Args:
            sources: Which node each column comes from.
        """
        own = {name: self.columns[source, name] for name, source in sources.items() if (source, name) in self.columns}
        prompts = None if self.prompts is None else self.prompts.only(set(sources) - set(own))
        return Batch(self.ids, own, prompts, self.prompt_index)

    def drop(self, keys: Iterable[ColumnKey]) -> None:
        """Free columns that nobody will read any more.

        Args:
            keys: Of columns; those of prompts stay, as other rows point to them.
        """
        for key in keys:
            self.columns.pop(key, None)

    def divided(self, num_parts: int) -> list[Table]:
        """The rows in parts of about equal size, in order.

        Args:
            num_parts: How many; some may have no rows.
        """
        borders = [len(self.ids) * place // num_parts for place in range(num_parts + 1)]
        return [self._part(torch.arange(begin, end)) for begin, end in pairwise(borders)]

    def _part(self, index: Tensor) -> Table:
        columns = {key: select_rows(column, index) for key, column in self.columns.items()}
        prompt_index = None if self.prompt_index is None else self.prompt_index[index]
        return Table(self.ids[index], self.prompts, prompt_index, columns)

    @classmethod
    def joined(cls, parts: Sequence[Table]) -> Table:
        """The rows of several tables with the same columns, and no row in common; the parts give up their columns.

        Args:
            parts: At least one.
        """
        batches = [Batch(part.ids, {}, part.prompts, part.prompt_index) for part in parts]
        ids = torch.cat([batch.ids for batch in batches]).sort().values
        prompts = prompt_index = None
        if parts[0].prompts is not None:
            tables = [batch.prompts for batch in batches if batch.prompts is not None]
            known = torch.unique(torch.cat([table.ids for table in tables]))
            columns = {name: merge(known, [(t.ids, t.columns[name]) for t in tables]) for name in tables[0].columns}
            prompts = Batch(known, columns)
            group_ids = torch.empty_like(ids)
            for batch in batches:
                group_ids[torch.searchsorted(ids, batch.ids)] = batch.group_ids
            prompt_index = torch.searchsorted(known, group_ids)
        joined = cls(ids, prompts, prompt_index)
        for key in list(parts[0].columns):
            joined.columns[key] = merge(ids, [(part.ids, part.columns.pop(key)) for part in parts])
        return joined


def sort_rows(batch: Batch, writer: str) -> Batch:
    """The same rows in ascending order of their ids.

    Args:
        batch: The rows.
        writer: The node that made them, for the error.

    Raises:
        ValueError: Two rows have the same id.
    """
    if bool((batch.ids[1:] > batch.ids[:-1]).all()):
        return batch
    batch = batch.select(torch.argsort(batch.ids))
    twice = batch.ids[1:][batch.ids[1:] == batch.ids[:-1]]
    if len(twice):
        raise ValueError(f"node '{writer}' put out row {int(twice[0])} twice")
    return batch
