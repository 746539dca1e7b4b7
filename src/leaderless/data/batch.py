"""Rows and their columns, in host memory: what stages exchange. Engines move micro-batches to their devices."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from leaderless.base.values import Json
from leaderless.config.rollout import MAX_RESPONSES
from leaderless.planner.workflow.columns import EPISODE_IDS

SIBLING_BITS = (MAX_RESPONSES - 1).bit_length()
"""Room for 65,536 responses to a prompt, and for 2^47 prompts in a run."""


@dataclass(frozen=True)
class Jagged:
    """Values of each row, one row after the other, never padded.

    Attributes:
        values: [total, ...], of any dtype.
        lengths: [n] int64, non-negative, summing to `total`.
        axis: Name of the dimension along which the values lie. Jagged columns of a batch with the same axis have the
            same lengths.
    """

    values: Tensor
    lengths: Tensor
    axis: str

    def __post_init__(self) -> None:
        if self.lengths.dtype != torch.int64 or self.lengths.ndim != 1:
            raise ValueError(f"lengths on axis '{self.axis}' must be int64 [n], not {_describe(self.lengths)}")
        if bool((self.lengths < 0).any()):
            raise ValueError(f"lengths on axis '{self.axis}' must not be negative, but {int(self.lengths.min())} is")
        total = int(self.lengths.sum())
        if self.values.ndim < 1 or self.values.shape[0] != total:
            raise ValueError(
                f"lengths on axis '{self.axis}' sum to {total}, but there are {_describe(self.values)} values"
            )

    @classmethod
    def from_lists(cls, rows: Sequence[Sequence[float]], dtype: torch.dtype, axis: str) -> Jagged:
        """A jagged column from one list per row.

        Args:
            rows: Values of each row.
            dtype: Type of the values.
            axis: Name of the dimension along which the values lie.
        """
        values = torch.tensor([value for row in rows for value in row], dtype=dtype)
        return cls(values, torch.tensor([len(row) for row in rows], dtype=torch.int64), axis)

    def __len__(self) -> int:
        """Number of rows."""
        return self.lengths.shape[0]

    @property
    def offsets(self) -> Tensor:
        """[n + 1] int64: where each row begins, and the total."""
        return torch.cat([self.lengths.new_zeros(1), self.lengths.cumsum(0)])

    def rows(self) -> tuple[Tensor, ...]:
        """The values of each row, as views."""
        return torch.split(self.values, self.lengths.tolist())

    def to_lists(self) -> list[list[int]]:
        """The values of each row, as Python numbers."""
        return [row.tolist() for row in self.rows()]

    def select(self, index: Tensor) -> Jagged:
        """The selected rows, in the order of the index; repeats are allowed.

        Args:
            index: [m] int64.
        """
        lengths = self.lengths[index]
        if self.values.dtype == torch.uint8:  # bytes of files, for which an index takes eight times the memory
            rows = self.rows()
            return Jagged(torch.cat([self.values[:0], *(rows[row] for row in index.tolist())]), lengths, self.axis)
        return Jagged(self.values[ragged_index(self.offsets[:-1][index], lengths)], lengths, self.axis)


Column = Tensor | Jagged | tuple[Json, ...]
"""A dense column is a tensor [n, ...], an object column a tuple of JSON-able values."""


def ragged_index(starts: Tensor, lengths: Tensor) -> Tensor:
    """[sum(lengths)] indices of consecutive runs, from the first index [m] and the length [m] of each."""
    ends = lengths.cumsum(0)
    return torch.arange(int(lengths.sum())) + torch.repeat_interleave(starts - ends + lengths, lengths)


@dataclass(frozen=True)
class Batch:
    """Rows with unique ids, and the columns of the rows and of their prompts.

    Before the rollout a row is a prompt and its id is the group id. Afterwards a row is a sample and points to its
    prompt. `prompts` holds a prompt's columns once, however many samples share it; looking one up repeats it for each
    sample.

    Attributes:
        ids: [n] int64, unique.
        columns: The rows' own columns by name.
        prompts: The prompts that rows point to; None when rows are prompts.
        prompt_index: [n] int64, each row's row of `prompts`.
    """

    ids: Tensor
    columns: Mapping[str, Column] = field(default_factory=dict)
    prompts: Batch | None = None
    prompt_index: Tensor | None = None

    def __post_init__(self) -> None:
        if self.ids.dtype != torch.int64 or self.ids.ndim != 1:
            raise ValueError(f"ids must be int64 [n], not {_describe(self.ids)}")
        if (self.prompts is None) != (self.prompt_index is None):
            raise ValueError("prompts and prompt_index go together")
        if self.prompt_index is not None and self.prompt_index.shape != self.ids.shape:
            raise ValueError(f"prompt_index must be [{len(self)}], not {_describe(self.prompt_index)}")
        axes: dict[str, tuple[str, Tensor]] = {}
        for name, column in self.columns.items():
            if len(column) != len(self):
                raise ValueError(f"column '{name}' has {len(column)} rows, the batch has {len(self)}")
            if isinstance(column, Jagged):
                first, lengths = axes.setdefault(column.axis, (name, column.lengths))
                if not torch.equal(lengths, column.lengths):
                    raise ValueError(f"columns '{first}' and '{name}' differ in length along axis '{column.axis}'")

    def __len__(self) -> int:
        """Number of rows."""
        return self.ids.shape[0]

    def __contains__(self, name: str) -> bool:
        """Whether rows or their prompts have a column."""
        return name in self.columns or (self.prompts is not None and name in self.prompts)

    def __getitem__(self, name: str) -> Column:
        """A column with one entry per row; a prompt's column is repeated for its samples."""
        if name in self.columns:
            return self.columns[name]
        if self.prompts is not None and self.prompt_index is not None and name in self.prompts:
            return select_rows(self.prompts[name], self.prompt_index)
        raise KeyError(f"no column '{name}' here; there are: {', '.join(self.names()) or 'none'}")

    def names(self) -> list[str]:
        """Names of all columns, sorted."""
        return sorted({*self.columns, *(() if self.prompts is None else self.prompts.names())})

    def dense(self, name: str) -> Tensor:
        """A dense column, [n, ...]."""
        column = self[name]
        if not isinstance(column, Tensor):
            raise TypeError(f"column '{name}' is not dense")
        return column

    def jagged(self, name: str) -> Jagged:
        """A jagged column."""
        column = self[name]
        if not isinstance(column, Jagged):
            raise TypeError(f"column '{name}' is not jagged")
        return column

    def objects(self, name: str) -> tuple[Json, ...]:
        """An object column."""
        column = self[name]
        if not isinstance(column, tuple):
            raise TypeError(f"column '{name}' does not hold objects")
        return column

    @property
    def group_ids(self) -> Tensor:
        """[n] int64: the id of each row's prompt, equal for all samples of a group."""
        if self.prompts is None or self.prompt_index is None:
            return self.ids
        return self.prompts.ids[self.prompt_index]

    @property
    def episode_ids(self) -> Tensor:
        """[n] int64: the episode of each sample; its own id where no stage has written the column `episode_ids`."""
        return self.dense(EPISODE_IDS) if EPISODE_IDS in self else self.ids

    def with_columns(self, columns: Mapping[str, Column] | None = None, /, **more: Column) -> Batch:
        """The same rows with some columns added or replaced."""
        return Batch(self.ids, {**self.columns, **(columns or {}), **more}, self.prompts, self.prompt_index)

    def only(self, names: Iterable[str]) -> Batch:
        """The same rows with only these columns, of rows and of prompts."""
        names = set(names)
        missing = names - set(self.names())
        if missing:
            raise KeyError(f"no column '{min(missing)}' here; there are: {', '.join(self.names()) or 'none'}")
        own = {name: column for name, column in self.columns.items() if name in names}
        prompts = None if self.prompts is None else self.prompts.only(names - set(own))
        return Batch(self.ids, own, prompts, self.prompt_index)

    def select(self, index: Tensor) -> Batch:
        """The selected rows in the order of the index, with the prompts that they point to.

        Args:
            index: [m] int64, or [n] bool.
        """
        if index.dtype == torch.bool:
            index = index.nonzero().squeeze(1)
        columns = {name: select_rows(column, index) for name, column in self.columns.items()}
        if self.prompts is None or self.prompt_index is None:
            return Batch(self.ids[index], columns)
        used, prompt_index = torch.unique(self.prompt_index[index], return_inverse=True)
        return Batch(self.ids[index], columns, self.prompts.select(used), prompt_index)

    @staticmethod
    def concat(batches: Sequence[Batch]) -> Batch:
        """All rows of one or more batches with the same columns; a shared prompt is held once."""
        if len(batches) == 1:
            return batches[0]
        names = batches[0].columns.keys()
        columns = {name: concat_columns([batch.columns[name] for batch in batches]) for name in names}
        ids = torch.cat([batch.ids for batch in batches])
        if batches[0].prompts is None:
            return Batch(ids, columns)
        prompts = Batch.concat([batch.prompts for batch in batches if batch.prompts is not None])
        _, first, inverse = map(torch.from_numpy, np.unique(prompts.ids, return_index=True, return_inverse=True))
        sizes = torch.tensor([0, *(len(batch.prompts) for batch in batches if batch.prompts is not None)]).cumsum(0)
        index = [
            inverse[batch.prompt_index + start]
            for batch, start in zip(batches, sizes.tolist(), strict=False)
            if batch.prompt_index is not None
        ]
        return Batch(ids, columns, prompts.select(first), torch.cat(index))


def with_rows(batches: Sequence[Batch]) -> Sequence[Batch]:
    """The batches that have rows, or else the first: an empty batch may not know the types of its columns."""
    return [batch for batch in batches if len(batch)] or batches[:1]


def select_rows(column: Column, index: Tensor) -> Column:
    """Some rows of a column of any kind, in the order of an index [m] int64."""
    match column:
        case Tensor():
            return column[index]
        case Jagged():
            return column.select(index)
        case _:
            return tuple(column[position] for position in index.tolist())


def concat_columns(columns: Sequence[Column]) -> Column:
    """The rows of one or more columns of the same kind, concatenated."""
    match columns[0]:
        case Tensor():
            return torch.cat([column for column in columns if isinstance(column, Tensor)])
        case Jagged(axis=axis):
            jagged = [column for column in columns if isinstance(column, Jagged)]
            values = torch.cat([column.values for column in jagged])
            return Jagged(values, torch.cat([column.lengths for column in jagged]), axis)
        case _:
            return tuple(value for column in columns if isinstance(column, tuple) for value in column)


def make_sample_ids(group_ids: Tensor, siblings: Tensor) -> Tensor:
    """Globally unique ids of samples; ascending ids follow the order of the data.

    A group id is the position of a prompt in the order of the run. It determines epoch and row; a prompt that is used
    again, in a later epoch or after a failure, gets a new id.

    Args:
        group_ids: [n] int64.
        siblings: [n] int64, index of each sample among the responses to its prompt, from 0.

    Returns:
        [n] int64.
    """
    if siblings.numel() and int(siblings.max()) >= 1 << SIBLING_BITS:
        raise ValueError(f"{int(siblings.max()) + 1} responses to one prompt: at most {1 << SIBLING_BITS} are possible")
    return torch.bitwise_left_shift(group_ids, SIBLING_BITS) + siblings


def _describe(tensor: Tensor) -> str:
    return f"{str(tensor.dtype).removeprefix('torch.')} {list(tensor.shape)}"
