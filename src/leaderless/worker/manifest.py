"""What a checkpoint consists of, with checksums: one that is half-written or damaged is told from a good one."""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
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
            files = {name: FileEntry(**entry) for name, entry in fields.pop("files").items()}
            return cls(**fields, files=files)
        except (OSError, ValueError, TypeError, KeyError) as error:
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
