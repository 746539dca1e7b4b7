"""Numbers that ranks have computed about data together, kept on disk for the next start and for other runs."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from pathlib import Path
from uuid import uuid4

import numpy as np
import torch
from numpy.typing import NDArray

from leaderless.base.values import Json
from leaderless.distributed.transport import ProcessGroup

Arrays = Mapping[str, NDArray[np.int64] | NDArray[np.float64]]


class DataCache:
    """Arrays of numbers in files named by their origin. All ranks of the group call the methods together."""

    def __init__(self, process_group: ProcessGroup | None = None, folder: Path | None = None) -> None:
        """Take a folder, which is made when something is stored; without a process group this process is alone."""
        self.process_group = process_group or ProcessGroup((0,), 0)
        self.folder = folder

    @property
    def is_first(self) -> bool:
        """Whether this rank writes the common results."""
        return self.process_group.rank == self.process_group.ranks[0]

    def path(self, kind: str, origin: Json, suffix: str) -> Path | None:
        """The path for a kind of data and its origin, as seen by the first rank; None if nothing is stored."""
        if self.folder is None:
            return None
        digest = hashlib.sha256(json.dumps(origin, sort_keys=True).encode()).hexdigest()[:16]
        # File times may differ between machines, and so would the names.
        return self.folder / self.process_group.broadcast_text(
            f"{kind}-{digest}{suffix}", self.process_group.ranks[0], kind
        )

    def kept(self, kind: str, origin: Json, find_out: Callable[[], Arrays]) -> Arrays:
        """Arrays stored by an earlier start, if all ranks can read them, or else computed now by all.

        The file's name contains the kind of the arrays, and a digest of their origin: everything that determines them.
        """
        path = self.path(kind, origin, ".npz")
        if path is None:
            return find_out()
        try:
            with np.load(path, allow_pickle=False) as file:
                arrays: Arrays | None = dict(file)
        except Exception:  # noqa: BLE001  (not there, or damaged, for which archives have errors of every kind)
            arrays = None
        if self.all_agree(is_true=arrays is not None):
            assert arrays is not None
            return arrays
        arrays = find_out()
        if self.is_first:
            # If nothing can be written, the next start computes it again.
            with suppress(OSError), whole_file(path) as temporary, temporary.open("wb") as file:
                np.savez(file, **dict(arrays))  # type: ignore[arg-type]
        return arrays

    def all_agree(self, *, is_true: bool) -> bool:
        """Whether something is true on all ranks, the same result on each."""
        return int(self.process_group.max(torch.tensor([int(not is_true)]), "what is known of the data")) == 0

    def share(self, count: int) -> range:
        """This rank's part of a number of items divided among all ranks."""
        place = self.process_group.ranks.index(self.process_group.rank)
        return range(count * place // self.process_group.size, count * (place + 1) // self.process_group.size)


@contextmanager
def whole_file(path: Path) -> Iterator[Path]:
    """A path to write to, which becomes the file when all is written: the file exists whole or not at all."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f".{path.name}.{uuid4().hex}")  # several machines may write it
    try:
        yield temporary
        temporary.replace(path)
    finally:
        temporary.unlink(missing_ok=True)
