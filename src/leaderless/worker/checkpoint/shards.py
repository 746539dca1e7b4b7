"""The files of a checkpoint: parts of tensors that ranks hold, and a list of all files with their checksums.

The parts are written and read block by block. Checksums reveal a half-written or damaged checkpoint.

Files of parts are as of `HuggingFaceStorageWriter` in `torch.distributed.checkpoint`: ordinary safetensors, with the
offsets of each part in its tensor as metadata, so that any number of ranks can read them. That writer lays out a whole
file in memory, and its reader maps one; here at most `BLOCK_BYTES` are in memory in addition to the tensors. Each rank
writes its own parts, without knowing other ranks' parts.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path, PurePosixPath
from typing import Self

import torch
from safetensors import SafetensorError
from torch import Tensor
from torch.distributed.tensor import DTensor

from leaderless.base.scratch_files import release_pages
from leaderless.distributed.weights.copies import host_memory
from leaderless.distributed.weights.files import DTYPES, StoredTensor, bytes_of, read_block, read_header
from leaderless.observability.run_directory import MANIFEST, write_atomically
from leaderless.planner.memory.limits import READ_BYTES as BLOCK_BYTES


class DamagedCheckpointError(RuntimeError):
    """Files of a checkpoint differ from those written."""


@dataclass(frozen=True)
class FileEntry:
    """Size of a file, and the checksum of its content as `sha256sum` prints it."""

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Self:
        """Read a file and return its size and checksum."""
        with file.open("rb") as content:
            return cls(os.fstat(content.fileno()).st_size, hashlib.file_digest(content, "sha256").hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint except the manifest.

    Attributes:
        step: Step after which the checkpoint was written.
        world_size: Number of ranks that wrote it.
        metrics: Finite metrics of that step.
        files: Entries by path within the checkpoint, with `/` between parts.
    """

    step: int
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]

    def write(self, folder: Path) -> None:
        """Write it to the folder of the checkpoint, synchronized to disk."""
        body = json.dumps(asdict(self), indent=1)
        checksum = hashlib.sha256(body.encode()).hexdigest()
        write_atomically(folder / MANIFEST, json.dumps({"sha256": checksum, "manifest": body}))
        sync_to_disk(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read the manifest in the folder of a checkpoint.

        Raises:
            DamagedCheckpointError: The manifest cannot be read, or is damaged.
        """
        try:
            envelope = json.loads((folder / MANIFEST).read_text(encoding="utf-8"))
            body = str(envelope["manifest"])
            if hashlib.sha256(body.encode()).hexdigest() != envelope["sha256"]:
                raise DamagedCheckpointError(f"{folder / MANIFEST} is not what was written")
            fields = json.loads(body)
            files = {_inside(name): FileEntry(**entry) for name, entry in fields["files"].items()}
            metrics = {name: float(value) for name, value in fields["metrics"].items()}
            return cls(int(fields["step"]), int(fields["world_size"]), metrics, files)
        except (OSError, ValueError, TypeError, KeyError, AttributeError, OverflowError) as error:
            raise DamagedCheckpointError(f"{folder / MANIFEST} cannot be read: {error}") from error

    def check(self, folder: Path, names: Iterable[str]) -> None:
        """Compare some files in the folder of the checkpoint with their checksums.

        Raises:
            DamagedCheckpointError: A file is missing or damaged.
        """
        for name in names:
            try:
                found = FileEntry.of(folder / name)
            except OSError as error:
                raise DamagedCheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
            wanted = self.files[name]
            if found.num_bytes != wanted.num_bytes:
                sizes = f"{found.num_bytes:,} bytes, where {wanted.num_bytes:,} were written"
                raise DamagedCheckpointError(f"{folder / name} has {sizes}")
            if found != wanted:
                raise DamagedCheckpointError(f"{folder / name} is not what was written: its checksum differs")


def _inside(name: str) -> str:
    """The path of a file; a ValueError if it is outside the checkpoint."""
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name


def sync_to_disk(path: Path) -> None:
    """Make the system write a file, or a folder's names, to disk now."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


SHARDING, OFFSETS = "DCP_SHARDING_INFO", "saved_offsets"
"""Keys of the offsets of each part in the metadata of a file."""
_NAMES = {dtype: name for name, dtype in DTYPES.items()}


@dataclass(frozen=True)
class Shard:
    """The part of a tensor that a rank holds; `offsets` is the index of its first element in the whole tensor."""

    local: Tensor
    offsets: tuple[int, ...]

    @classmethod
    def of(cls, value: Tensor) -> Shard:
        """This rank's part of a tensor, distributed or whole."""
        if not isinstance(value, DTensor):
            return cls(value.detach(), (0,) * value.ndim)
        (chunk,) = value.__create_chunk_list__()  # type: ignore[no-untyped-call]
        return cls(value.to_local().detach(), tuple(chunk.offsets))


def copy_to_host(shards: Mapping[str, Shard], buffers: dict[str, Tensor]) -> dict[str, Shard]:
    """Copy the current shards into buffers in host memory, which later copies reuse."""
    new = {name: shard.local for name, shard in shards.items() if name not in buffers}
    kind = next((one.device.type for one in new.values() if not one.is_cpu), "cpu")
    for (name, local), place in zip(new.items(), host_memory([one.nbytes for one in new.values()], kind), strict=True):
        buffers[name] = place.view(local.dtype).view(local.shape)
    for name, shard in shards.items():
        buffers[name].copy_(shard.local, non_blocking=True)
        _release(shard.local)
    if any(not shard.local.is_cpu for shard in shards.values()):
        torch.accelerator.synchronize()
    return {name: replace(shard, local=buffers[name]) for name, shard in shards.items()}


def shard_file(part: int) -> str:
    """The name of a rank's file, by the rank's index among the holders of the tensors."""
    return f"shard-{part + 1:05d}-model-00001-of-00001.safetensors"


def write_shards(file: Path, shards: Mapping[str, Shard]) -> FileEntry:
    """Write shards, by the names of their tensors, synchronized to disk; returns size and checksum of the file."""
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
            yield bytes_of(part.cpu())
        _release(shard.local)


def _release(local: Tensor) -> None:
    """Let the system take back memory that is that of a file, such as an optimizer's states on the disk."""
    if local.is_cpu:
        release_pages(local.data_ptr(), local.nbytes)


@dataclass(frozen=True)
class _StoredPart:
    """A part of a tensor in a file; `offsets` as in `Shard`."""

    stored: StoredTensor
    offsets: tuple[int, ...]


def read_tensors(folder: Path, state: Mapping[str, Tensor], part: int | None = None) -> None:
    """Read tensors by name, or this rank's shards of them, in place; other tensors in the folder are ignored.

    Args:
        folder: Folder with the files.
        state: Tensors to fill, by name.
        part: Index of a file that may hold everything, such as this rank's own; see `shard_file`. If it does, no other
            headers are read: otherwise a thousand ranks would each read a thousand.

    Raises:
        DamagedCheckpointError: The files cannot be read, or lack tensors.
    """
    shards = {name: Shard.of(value) for name, value in state.items()}
    try:
        own = folder / shard_file(part) if part is not None else None
        stored = _find_parts([own]) if own is not None and own.exists() else {}
        wanted = {name: shard for name, shard in shards.items() if shard.local.numel()}
        here = {(name, one.offsets, one.stored.shape) for name, parts in stored.items() for one in parts}
        if not all((name, shard.offsets, tuple(shard.local.shape)) in here for name, shard in wanted.items()):
            stored = _find_parts(sorted(folder.glob("*.safetensors")))
        for name, shard in shards.items():
            if sum(_read_part(one, shard) for one in stored.get(name, ())) != shard.local.numel():
                raise DamagedCheckpointError(f"{folder} does not hold all of {name}")
            _release(shard.local)
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{folder} cannot be read: {error}") from error


def stored_shapes(folder: Path) -> dict[str, tuple[torch.dtype, tuple[int, ...]]]:
    """Type and whole shape of each tensor in the files of a folder, by name.

    Raises:
        DamagedCheckpointError: A file cannot be read.
    """
    try:
        return {
            name: (parts[0].stored.dtype, tuple(max(ends) for ends in zip(*map(_ends, parts), strict=True)))
            for name, parts in _find_parts(sorted(folder.glob("*.safetensors"))).items()
        }
    except (SafetensorError, OSError, ValueError, TypeError, KeyError) as error:
        raise DamagedCheckpointError(f"{folder} cannot be read: {error}") from error


def _find_parts(files: Iterable[Path]) -> dict[str, list[_StoredPart]]:
    """The parts in some files, by the tensor's name."""
    parts: dict[str, list[_StoredPart]] = {}
    for file in files:
        header = read_header(file)
        sharding = json.loads(header.metadata[SHARDING]) if SHARDING in header.metadata else {}
        for name, stored in header.tensors.items():
            offsets = tuple(sharding[name][OFFSETS]) if sharding else (0,) * len(stored.shape)
            parts.setdefault(name, []).append(_StoredPart(stored, offsets))
    return parts


def _ends(part: _StoredPart) -> tuple[int, ...]:
    return tuple(offset + size for offset, size in zip(part.offsets, part.stored.shape, strict=True))


def _read_part(part: _StoredPart, shard: Shard) -> int:
    """Read the elements common to a part and a shard; returns their number."""
    ranges = [
        (max(begin, wanted), min(begin + length, wanted + size))
        for begin, length, wanted, size in zip(
            part.offsets, part.stored.shape, shard.offsets, shard.local.shape, strict=True
        )
    ]
    if any(first >= last for first, last in ranges):
        return 0
    if not ranges:
        read_block(replace(part.stored, shape=(1,)), (0,), shard.local.reshape(1))
        return 1
    target = shard.local
    for dim, ((first, last), wanted) in enumerate(zip(ranges, shard.offsets, strict=True)):
        target = target.narrow(dim, first - wanted, last - first)
    read_block(part.stored, [first - own for (first, _), own in zip(ranges, part.offsets, strict=True)], target)
    return target.numel()
