"""The files of a checkpoint with their checksums, which reveal a half-written or damaged one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path, PurePosixPath
from typing import Self

from leaderless.observability.run_directory import MANIFEST, write_atomically


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
