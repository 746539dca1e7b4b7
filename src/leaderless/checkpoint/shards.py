"""Writes the parts of tensors that a rank holds to safetensors files, and reads them, block by block.

The files are those of `HuggingFaceStorageWriter` in `torch.distributed.checkpoint`: ordinary safetensors, with the
offsets of each part in its tensor as metadata, so that any number of ranks can read what another number has written.
That writer lays out a whole file in memory, and its reader maps one; here at most `BLOCK_BYTES` are in memory besides
the tensors. Each rank writes its own parts, and need not know those of others.
"""

from __future__ import annotations

import hashlib
import json
import math
import os
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import SafetensorError, safe_open
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.checkpoint.manifest import DamagedCheckpointError, FileEntry

BLOCK_BYTES = 1 << 26
"""Most bytes that are written, or read, at a time."""
SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of the offsets of each part in the metadata of a file."""
_DTYPES = {"F32": torch.float32, "BF16": torch.bfloat16, "F16": torch.float16, "F64": torch.float64, "I64": torch.int64}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a rank holds; `offsets` is the index of its first element in the whole tensor."""

    local: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor) -> Shard:
        """The part that this rank holds of a tensor, distributed or whole."""
        if not isinstance(value, DTensor):
            return cls(value.detach(), (0,) * value.ndim)
        (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return cls(value.to_local().detach(), tuple(chunk.offsets))


def copy_to_host(shards: Mapping[str, Shard], buffers: dict[str, Tensor]) -> dict[str, Shard]:
    """Copy shards as they are now into buffers in memory of the host, which later copies use again."""
    for name, shard in shards.items():
        if name not in buffers:
            buffers[name] = torch.empty_like(shard.local, device="cpu", pin_memory=not shard.local.is_cpu)
        buffers[name].copy_(shard.local, non_blocking=True)
    if any(not shard.local.is_cpu for shard in shards.values()):
        torch.accelerator.synchronize()
    return {name: replace(shard, local=buffers[name]) for name, shard in shards.items()}


def shard_file(part: int) -> str:
    """The name of the file that a rank writes, by its index among those that hold the tensors."""
    return f"shard-{part + 1:05d}-model-00001-of-00001.safetensors"


def write_shards(file: Path, shards: Mapping[str, Shard]) -> FileEntry:
    """Write shards, by the names of their tensors, through to the disk; returns size and checksum of the file."""
    # In this order each tensor begins at a multiple of the size of its elements.
    ordered = sorted(shards.items(), key=lambda item: (-item[1].local.element_size(), item[0]))
    checksum, num_bytes = hashlib.sha256(), 0
    with file.open("wb") as out:
        for block in _blocks_of_file(ordered):
            out.write(block)
            checksum.update(block)
            num_bytes += len(block)
        out.flush()
        os.fsync(out.fileno())
    return FileEntry(num_bytes, checksum.hexdigest())


def _blocks_of_file(shards: list[tuple[str, Shard]]) -> Iterator[bytes | memoryview]:
    """The content of a file: the size of its header, the header, and the tensors."""
    sharding = {name: {OFFSETS: list(shard.offsets)} for name, shard in shards}
    header: dict[str, object] = {"__metadata__": {SHARDING: json.dumps(sharding), "DCP_VERSION": "1.0", "format": "pt"}}
    begin = 0
    for name, shard in shards:
        dtype, end = _NAMES[shard.local.dtype], begin + shard.local.nbytes
        header[name] = {"dtype": dtype, "shape": list(shard.local.shape), "data_offsets": [begin, end]}
        begin = end
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    yield len(text).to_bytes(8, "little") + text
    for _, shard in shards:
        for part in torch.split(shard.local.reshape(-1), BLOCK_BYTES // shard.local.element_size()):
            yield _bytes_of(part.cpu())


def _bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host."""
    view: memoryview = tensor.reshape(-1).view(torch.uint8).numpy().data
    return view


@dataclass(frozen=True)
class _StoredPart:
    """A part of a tensor that begins at a byte of a file; `offsets` as in `Shard`."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]
    offsets: tuple[int, ...]


def read_tensors(folder: Path, state: Mapping[str, Tensor]) -> None:
    """Read tensors by name, or this rank's shards of them, in place; others that are in the folder are left out.

    Raises:
        DamagedCheckpointError: The files cannot be read, or do not hold the tensors.
    """
    try:
        stored = _find_parts(folder)
        for name, value in state.items():
            shard = Shard.of(value)
            if sum(_read_part(part, shard) for part in stored.get(name, ())) != shard.local.numel():
                raise DamagedCheckpointError(f"{folder} does not hold all of {name}")
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{folder} cannot be read: {error}") from error


def _find_parts(folder: Path) -> dict[str, list[_StoredPart]]:
    """The parts in the files of a folder, by the name of the tensor."""
    parts: dict[str, list[_StoredPart]] = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, framework="np"):
            pass  # this refuses a header that does not fit its file
        with file.open("rb") as content:
            size = int.from_bytes(content.read(8), "little")
            header = json.loads(content.read(size))
        metadata = header.pop("__metadata__", {})
        sharding = json.loads(metadata[SHARDING]) if SHARDING in metadata else {}
        for name, entry in header.items():
            shape = tuple(entry["shape"])
            offsets = tuple(sharding[name][OFFSETS]) if sharding else (0,) * len(shape)
            part = _StoredPart(file, 8 + size + entry["data_offsets"][0], _DTYPES[entry["dtype"]], shape, offsets)
            parts.setdefault(name, []).append(part)
    return parts


def _read_part(part: _StoredPart, shard: Shard) -> int:
    """Read the elements that a part and a shard share; returns their number."""
    ranges = [
        (max(begin, wanted), min(begin + length, wanted + size))
        for begin, length, wanted, size in zip(part.offsets, part.shape, shard.offsets, shard.local.shape, strict=True)
    ]
    if any(first >= last for first, last in ranges):
        return 0
    target, source = shard.local, tuple(slice(a - o, b - o) for (a, b), o in zip(ranges, part.offsets, strict=True))
    for dim, ((first, last), wanted) in enumerate(zip(ranges, shard.offsets, strict=True)):
        target = target.narrow(dim, first - wanted, last - first)
    if not ranges:
        target, source, part = target.reshape(1), (slice(0, 1),), replace(part, shape=(1,))
    row_bytes = part.dtype.itemsize * math.prod(part.shape[1:])
    num_rows = max(1, BLOCK_BYTES // row_bytes)
    is_direct = target.is_cpu and target.is_contiguous() and target.dtype == part.dtype
    is_direct = is_direct and target.shape[1:] == part.shape[1:]
    buffer = None if is_direct else torch.empty((min(num_rows, len(target)), *part.shape[1:]), dtype=part.dtype)
    with part.file.open("rb", buffering=0) as content:
        content.seek(part.begin + source[0].start * row_bytes)
        for rows in torch.split(target, num_rows):
            arrived = rows if buffer is None else buffer[: len(rows)]
            _fill(_bytes_of(arrived), content)
            if buffer is not None:
                rows.copy_(arrived[(slice(None), *source[1:])])
    return target.numel()


def _fill(memory: memoryview, content: BinaryIO) -> None:
    """Read until the memory is full."""
    done = 0
    while done < len(memory):
        count = content.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise DamagedCheckpointError(f"{content.name} ends too early")
        done += count
