"""What a checkpoint consists of, with checksums: one that is half-written or damaged is told from a good one."""

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
    """Files of a checkpoint are not what was written."""


@dataclass(frozen=True)
class FileEntry:
    """One file.

    Attributes:
        num_bytes: Its size.
        sha256: Of its content, as `sha256sum` prints it.
    """

    num_bytes: int
    sha256: str

    @classmethod
    def of(cls, file: Path) -> Self:
        """Look at a file.

        Args:
            file: All of it is read.
        """
        with file.open("rb") as content:
            return cls(os.fstat(content.fileno()).st_size, hashlib.file_digest(content, "sha256").hexdigest())


@dataclass(frozen=True)
class Manifest:
    """All files of a checkpoint but this one.

    Attributes:
        step: That it was written after.
        world_size: Ranks that wrote it.
        metrics: The finite numbers of that step.
        files: By path within the checkpoint, with `/` between parts.
    """

    step: int
    world_size: int
    metrics: Mapping[str, float]
    files: Mapping[str, FileEntry]

    def write(self, folder: Path) -> None:
        """Write it beside the files.

        Args:
            folder: Of the checkpoint.
        """
        body = json.dumps(asdict(self), indent=1)
        checksum = hashlib.sha256(body.encode()).hexdigest()
        write_atomically(folder / MANIFEST, json.dumps({"sha256": checksum, "manifest": body}))
        sync_to_disk(folder / MANIFEST)

    @classmethod
    def read(cls, folder: Path) -> Self:
        """Read what a checkpoint consists of.

        Args:
            folder: Of the checkpoint.

        Raises:
            DamagedCheckpointError: The manifest cannot be read, or is not what was written.
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
        """Compare files with what was written.

        Args:
            folder: Of the checkpoint.
            names: Of the files to read.

        Raises:
            DamagedCheckpointError: One is missing, or is not what was written.
        """
        for name in names:
            try:
                found = FileEntry.of(folder / name)
            except OSError as error:
                raise DamagedCheckpointError(f"{folder / name} cannot be read: {error.strerror}") from error
            wanted = self.files[name]
            if found.num_bytes != wanted.num_bytes:
                raise DamagedCheckpointError(
                    f"{folder / name} has {found.num_bytes:,} bytes, where {wanted.num_bytes:,} were written"
                )
            if found != wanted:
                raise DamagedCheckpointError(f"{folder / name} is not what was written: its checksum differs")


def _inside(name: str) -> str:
    """The path of a file, which must not lead out of the checkpoint.

    Raises:
        ValueError: It does.
    """
    path = PurePosixPath(name)
    if path.is_absolute() or not path.parts or ".." in path.parts or "\0" in name:
        raise ValueError(f"{name!r} is no file of a checkpoint")
    return name


def sync_to_disk(path: Path) -> None:
    """Have the system write a file, or the names in a folder, to the disk now.

    Args:
        path: Of the file or folder.
    """
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)
