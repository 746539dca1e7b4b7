"""Groups that repeated nodes have chosen and no step has taken yet, carried over from step to step."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from leaderless.data.batch import Batch, Column, Jagged
from leaderless.data.column_store import HeldRows, ragged_key
from leaderless.data.transport import ProcessGroup
from leaderless.data.wire import DTYPES, Schema, schema_from_json, schema_of, schema_to_json

GROUP_COLUMN = "<group id>"
"""Rows are written with the id of their prompt in a column of this name, which no stage would take."""
ALIGNMENT = 8


class Surplus:
    """The rows of one shard, whole groups; None until the first round. A checkpoint holds them as bytes and schemas."""

    def __init__(self, batch: Batch | None = None) -> None:
        self.batch = batch

    def add(self, batch: Batch) -> None:
        """Take in what has come out of a round: whole groups, none of which is here already."""
        self.batch = batch if self.batch is None else _concat([self.batch, batch])

    @property
    def num_groups(self) -> int:
        """Groups that this shard has."""
        return 0 if self.batch is None else len(torch.unique(self.batch.group_ids))

    def take(self, num_groups: int, process_group: ProcessGroup) -> Batch:
        """Take out the groups with the lowest ids of all shards, at most `num_groups`. All ranks of the layout call it.

        Ids follow the order of the data, so which groups are taken depends on no layout, and those that have waited
        come first.
        """
        assert self.batch is not None, "a step takes groups after a round, or those that it has inherited"
        mine = self.batch.group_ids
        known = torch.unique(torch.cat(process_group.gather(torch.unique(mine), "the groups that were chosen")))
        is_taken = torch.isin(mine, known[:num_groups])
        taken, self.batch = self.batch.select(is_taken), self.batch.select(~is_taken)
        return taken

    def save(self, folder: Path, shard: int, num_shards: int) -> None:
        """Write the groups of a shard into the folder of a checkpoint."""
        if self.batch is None:
            return
        parts = {"rows": self.batch.with_columns({GROUP_COLUMN: self.batch.group_ids})}
        if self.batch.prompts is not None:
            parts["prompts"] = self.batch.prompts
        save_file(
            {name: pack(part) for name, part in parts.items()},
            folder / f"surplus-{shard:05d}-of-{num_shards:05d}.safetensors",
            metadata={name: schema_to_json(schema_of(part)) for name, part in parts.items()},
        )

    @classmethod
    def load(cls, folder: Path, shard: int, num_shards: int) -> Surplus:
        """Read one of `num_shards` shards from the folder of a checkpoint, written by as many shards or by others."""
        files = sorted(folder.glob("surplus-*.safetensors"))
        if len(files) == num_shards:  # the very rows on the very shards: sums come out the same to the last bit
            return cls(_read(files[shard]))
        if not files:
            return cls()
        batch = _concat([_read(file) for file in files])
        groups = torch.unique(batch.group_ids)
        mine = groups[len(groups) * shard // num_shards : len(groups) * (shard + 1) // num_shards]
        return cls(batch.select(torch.isin(batch.group_ids, mine)))


def _read(file: Path) -> Batch:
    with safe_open(file, framework="pt") as content:
        schemas = {name: schema_from_json(text) for name, text in content.metadata().items()}
        parts = {name: unpack(content.get_tensor(name), schema) for name, schema in schemas.items()}
    rows, prompts = parts["rows"], parts.get("prompts")
    columns = {name: column for name, column in rows.columns.items() if name != GROUP_COLUMN}
    if prompts is None:
        return Batch(rows.ids, columns)
    return Batch(rows.ids, columns, prompts, torch.searchsorted(prompts.ids, rows.dense(GROUP_COLUMN)))


def _concat(batches: list[Batch]) -> Batch:
    """All rows. One without rows is left out if it can be, as it may not know the types of its columns."""
    return Batch.concat([batch for batch in batches if len(batch)] or batches[:1])


def pack(batch: Batch) -> Tensor:
    """[num_bytes] uint8: number of rows, ids and own columns of a batch, one after the other; not its prompts."""
    rows, everything = HeldRows(batch), np.arange(len(batch))
    parts = [np.array([len(batch)]), batch.ids.numpy()]
    for column in schema_of(batch):
        if column.kind != "dense":
            parts.append(rows.lengths(ragged_key(column), everything))
        parts.append(rows.column(column.name).data)
    gaps = [np.zeros(-part.nbytes % ALIGNMENT, dtype=np.uint8) for part in parts]
    contents = [np.ascontiguousarray(part).view(np.uint8) for part in parts]
    return torch.from_numpy(np.concatenate([piece for pair in zip(contents, gaps, strict=True) for piece in pair]))


def unpack(message: Tensor, schema: Schema) -> Batch:
    """The batch that `pack` made bytes of. Tensors are views of the message: nothing is copied."""
    offset = 0

    def take(count: int, dtype: torch.dtype, shape: Sequence[int] = ()) -> Tensor:
        nonlocal offset
        begin, end = offset, offset + count * math.prod(shape) * dtype.itemsize
        if end > len(message):
            raise RuntimeError(f"message ends at byte {len(message)}, {end} were expected")
        offset = end + -end % ALIGNMENT
        return message[begin:end].view(dtype).view(count, *shape)

    num_rows = int(take(1, torch.int64))
    ids = take(num_rows, torch.int64)
    columns: dict[str, Column] = {}
    for column in schema:
        if column.kind == "dense":
            columns[column.name] = take(num_rows, DTYPES[column.dtype], column.shape)
            continue
        lengths = take(num_rows, torch.int64)
        if column.kind == "jagged":
            values = take(int(lengths.sum()), DTYPES[column.dtype], column.shape)
            columns[column.name] = Jagged(values, lengths, column.axis)
        else:
            texts = torch.split(take(int(lengths.sum()), torch.uint8), lengths.tolist())
            columns[column.name] = tuple(json.loads(bytes(text.numpy())) for text in texts)
    return Batch(ids, columns)
