"""Tensors in safetensors files, of which any block can be read without the rest.

Only the header of a file is read to know what is in it. A block is read straight into its place if it lies there as in
the file, and else through a small buffer; bytes between its rows stay unread where that saves whole pages of a disk.
"""

from __future__ import annotations

import ctypes
import json
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import BinaryIO

import torch
from safetensors import safe_open
from torch import Tensor

from leaderless.planner.memory.limits import READ_BYTES as BLOCK_BYTES

RUN_BYTES = 1 << 12
"""Shortest run of bytes that is read alone; rows with a shorter one are read whole."""
DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "F8_E4M3": torch.float8_e4m3fn,
    "F8_E5M2": torch.float8_e5m2,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
"""Types of tensors, by their names in files."""


@dataclass(frozen=True)
class StoredTensor:
    """A tensor in a file, with the byte of the file at which it begins."""

    file: Path
    begin: int
    dtype: torch.dtype
    shape: tuple[int, ...]


@dataclass(frozen=True)
class Header:
    """Contents of a file: the tensors in it, by name, and further texts."""

    tensors: Mapping[str, StoredTensor]
    metadata: Mapping[str, str]


def read_header(file: Path) -> Header:
    """Read the header of a file.

    Raises:
        OSError: It cannot be read.
        SafetensorError: It does not fit the file, as where the end of the file is missing.
        ValueError: It has a tensor of a type that is not known here.
    """
    with safe_open(file, framework="np", backend="pread"):
        pass  # this refuses a header that does not fit its file
    with file.open("rb") as content:
        size = int.from_bytes(content.read(8), "little")
        header = json.loads(content.read(size))
    metadata = header.pop("__metadata__", {})
    tensors: dict[str, StoredTensor] = {}
    for name, entry in header.items():
        if entry["dtype"] not in DTYPES:
            raise ValueError(f"{name} is of type {entry['dtype']}, which is none of {', '.join(DTYPES)}")
        begin = 8 + size + entry["data_offsets"][0]
        tensors[name] = StoredTensor(file, begin, DTYPES[entry["dtype"]], tuple(entry["shape"]))
    return Header(tensors, metadata)


def read_block(stored: StoredTensor, offsets: Sequence[int], target: Tensor) -> int:
    """Read a block of a tensor, from an offset in each dimension; returns the bytes that were read.

    `target` has the shape of the block, any type, and is on any device.

    Raises:
        OSError: The file cannot be read, or ends too early.
    """
    if not stored.shape:  # a single number
        stored, offsets, target = replace(stored, shape=(1,)), (0,), target.view(1)
    with stored.file.open("rb", buffering=0) as content:
        return sum(_read_run(content, run, first, part) for run, first, part in _runs(stored, tuple(offsets), target))


def _runs(
    stored: StoredTensor, offsets: tuple[int, ...], target: Tensor
) -> Iterator[tuple[StoredTensor, tuple[int, ...], Tensor]]:
    """Divide a block into parts whose rows, seen as matrices, are to be read from one matrix."""
    if not target.numel():
        return
    if target.shape[2:] == stored.shape[2:]:
        yield stored, offsets, target
        return
    step = stored.dtype.itemsize * math.prod(stored.shape[1:])
    for index, part in enumerate(target):
        begin = stored.begin + (offsets[0] + index) * step
        yield from _runs(replace(stored, begin=begin, shape=stored.shape[1:]), offsets[1:], part)


def _read_run(content: BinaryIO, stored: StoredTensor, offsets: tuple[int, ...], target: Tensor) -> int:
    """Read some rows, or some columns of them, where all further dimensions are whole."""
    row_bytes = stored.dtype.itemsize * math.prod(stored.shape[1:])
    first, width = 0, row_bytes  # bytes of a row that are read
    is_whole = target.shape[1:] == stored.shape[1:]
    columns = slice(None)
    if not is_whole:
        cell = stored.dtype.itemsize * math.prod(stored.shape[2:])
        columns = slice(offsets[1], offsets[1] + target.shape[1])
        if cell * target.shape[1] >= RUN_BYTES:
            first, width, columns = cell * offsets[1], cell * target.shape[1], slice(None)
    shape = (target.shape if width < row_bytes else (len(target), *stored.shape[1:]))[1:]
    is_direct = target.is_cpu and target.is_contiguous() and target.dtype == stored.dtype and shape == target.shape[1:]
    num_rows = max(1, BLOCK_BYTES // width)
    buffer = None if is_direct else torch.empty((min(num_rows, len(target)), *shape), dtype=stored.dtype)
    place = stored.begin + offsets[0] * row_bytes + first
    for rows in torch.split(target, num_rows):
        arrived = rows if buffer is None else buffer[: len(rows)]
        memory = bytes_of(arrived)
        if width == row_bytes:
            _fill(memory, content, place)
        else:
            for number in range(len(rows)):
                _fill(memory[number * width : (number + 1) * width], content, place + number * row_bytes)
        place += len(rows) * row_bytes
        if buffer is not None:
            rows.copy_(arrived[:, columns] if arrived.ndim > 1 else arrived)
    return len(target) * width


def bytes_of(tensor: Tensor) -> memoryview:
    """The memory of a contiguous tensor of the host; the tensor stays as long as the view.

    Torch never empties a storage again that numpy has seen, as weights that sleep need it.
    """
    flat = tensor.detach().reshape(-1)
    if not flat.nbytes:
        return memoryview(bytearray())
    memory = (ctypes.c_ubyte * flat.nbytes).from_address(flat.data_ptr())
    memory.tensor = flat  # type: ignore[attr-defined]
    return memoryview(memory).cast("B")


def _fill(memory: memoryview, content: BinaryIO, place: int) -> None:
    """Read from a byte of a file on until the memory is full."""
    content.seek(place)
    done = 0
    while done < len(memory):
        count = content.readinto(memory[done:])  # type: ignore[attr-defined]
        if not count:
            raise OSError(f"{content.name} ends too early")
        done += count
