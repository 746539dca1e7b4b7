"""Rows in a checkpoint: the rows that a channel held when it was written."""

from __future__ import annotations

import json
import math
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
import torch
from safetensors import safe_open
from safetensors.torch import save_file
from torch import Tensor

from leaderless.data.batch import Batch, Column, Jagged, with_rows
from leaderless.data.buffer.databuffer import sort_rows
from leaderless.data.buffer.wire import (
    DTYPES,
    HeldRows,
    Schema,
    ragged_key,
    schema_from_json,
    schema_of,
    schema_to_json,
)
from leaderless.planner.workflow import COLUMNS

GROUP_COLUMN = "<group id>"
"""Column for the id of each row's prompt, with a name that no stage would use."""
ALIGNMENT = 8


def save_rows(batch: Batch, folder: Path, name: str, shard: int, num_shards: int) -> None:
    """Write the rows of a shard into a checkpoint's folder, as bytes and schemas, under a name shared by all shards."""
    parts = _parts(batch)
    save_file(
        {name: pack(part) for name, part in parts.items()},
        folder / f"{name}-{shard:05d}-of-{num_shards:05d}.safetensors",
        metadata={name: schema_to_json(schema_of(part)) for name, part in parts.items()},
    )


def _parts(batch: Batch) -> dict[str, Batch]:
    """The rows of a batch, and the prompts that they point to."""
    rows = {"rows": batch.with_columns({GROUP_COLUMN: batch.group_ids})}
    return rows if batch.prompts is None else rows | {"prompts": batch.prompts}


def rows_to_bytes(batch: Batch) -> Tensor:
    """[num_bytes] uint8: the rows of a batch with their prompts, as one message for another rank."""
    parts = _parts(batch)
    packed = {name: pack(part) for name, part in parts.items()}
    facts = {name: [schema_to_json(schema_of(part)), len(packed[name])] for name, part in parts.items()}
    header = json.dumps(facts).encode()
    header += b" " * (-len(header) % ALIGNMENT)
    size = torch.tensor([len(header)]).view(torch.uint8)
    return torch.cat([size, torch.frombuffer(bytearray(header), dtype=torch.uint8), *packed.values()])


def rows_from_bytes(message: Tensor) -> Batch:
    """The batch of a message of `rows_to_bytes`."""
    begin = ALIGNMENT + int(message[:ALIGNMENT].view(torch.int64))
    parts: dict[str, Batch] = {}
    for name, (schema, num_bytes) in json.loads(bytes(message[ALIGNMENT:begin].numpy())).items():
        parts[name] = unpack(message[begin : begin + num_bytes], schema_from_json(schema))
        begin += num_bytes
    return _joined(parts)


def share_of(groups: Tensor, shard: int, num_shards: int) -> Tensor:
    """A shard's share of groups, [n] ascending ids, after the number of shards has changed."""
    return groups[len(groups) * shard // num_shards : len(groups) * (shard + 1) // num_shards]


def load_rows(folder: Path, name: str, shard: int, num_shards: int) -> Batch | None:
    """Read one of `num_shards` shards from the folder of a checkpoint, written by any number of shards.

    Returns:
        The shard's own rows, in order, if the number of shards is the same; else its share of whole groups, ascending.
        None if there are no rows under this name.
    """
    files = sorted(folder.glob(f"{name}-*-of-*.safetensors"))
    if len(files) == num_shards:  # the same rows on the same shards: sums are bitwise equal
        return _read(files[shard])
    if not files:
        return None
    batch = Batch.concat(with_rows([_read(file) for file in files]))
    mine = share_of(torch.unique(batch.group_ids), shard, num_shards)
    return sort_rows(batch.select(torch.isin(batch.group_ids, mine)), name)


def _read(file: Path) -> Batch:
    with safe_open(file, framework="pt") as content:
        schemas = {name: schema_from_json(text) for name, text in content.metadata().items()}
        parts = {name: unpack(content.get_tensor(name), schema) for name, schema in schemas.items()}
    for column in schemas["rows"]:
        known = COLUMNS.get(column.name)
        if known is not None and known.kind != column.kind:
            raise RuntimeError(
                f"{file}: column '{column.name}' is {column.kind} there, but {known.kind} in this version: continue "
                "with the version that wrote the checkpoint, or start again with --fresh"
            )
    return _joined(parts)


def _joined(parts: Mapping[str, Batch]) -> Batch:
    """The rows of some parts, pointing to their prompts."""
    rows, prompts = parts["rows"], parts.get("prompts")
    columns = {name: column for name, column in rows.columns.items() if name != GROUP_COLUMN}
    if prompts is None:
        return Batch(rows.ids, columns)
    return Batch(rows.ids, columns, prompts, torch.searchsorted(prompts.ids, rows.dense(GROUP_COLUMN)))


def pack(batch: Batch) -> Tensor:
    """[num_bytes] uint8: number of rows, ids and own columns of a batch, concatenated, without its prompts."""
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
    """The batch packed by `pack`. Tensors are views of the message: nothing is copied."""
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
