"""The journal of episodes in the folder of a run: one compressed file for each step and rank, written in a thread."""

from __future__ import annotations

import gzip
import json
import re
import zlib
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Literal, NamedTuple

from leaderless.base.values import Json
from leaderless.observability.run_directory import RunDirectory

Kind = Literal["step", "evaluation"]
"""Episodes of a training step, or of the evaluation after it."""
What = Literal["asked", "played", "graded", "deferred"]
"""Kinds of lines: requests to an engine with continuous generation, results of the rollout, rewards, and failures of
rewards that wait to be graded again."""
_FOLDER = re.compile(r"(step|evaluation)-(\d+)")
_FILE = re.compile(r"(asked|played|graded|deferred)\.rank-(\d+)\.jsonl\.gz")
_REGRADED = "regraded-*.jsonl.gz"
"""Files of episodes that were graded again, by any process, in a numbered file for each time."""
_INCOMPLETE = ".incomplete"


class EpisodeFile(NamedTuple):
    """A file of the journal."""

    kind: str
    step: int
    what: str
    rank: int
    path: Path


class EpisodeJournal:
    """Writes the episodes of a rank in the background."""

    def __init__(self, directory: RunDirectory, rank: int, kept_steps: int) -> None:
        """Keep the files of the steps that `kept` returns; with 0 steps there is no journal."""
        self._directory, self._rank, self._kept_steps = directory, rank, kept_steps
        self._thread: ThreadPoolExecutor | None = None
        self._writing: Future[None] | None = None

    def write(self, kind: Kind, step: int, what: What, make: Callable[[], Iterable[str]]) -> None:
        """Add lines, which a function makes in the thread, to the rank's file of a step, after earlier lines.

        An error of the function for earlier lines is raised.
        """
        if not self._kept_steps:
            return
        self.flush()
        if self._thread is None:
            self._thread = ThreadPoolExecutor(1, "episode journal")
        self._writing = self._thread.submit(self._write, kind, step, what, make)

    def forget(self, step: int, evaluated: int, is_own: Callable[[int], bool]) -> None:
        """Drop what ranks, for which a function says that it is due, have written of later steps and evaluations."""
        self.flush()
        last = {"step": step, "evaluation": evaluated}
        for file in episode_files(self._directory.episodes):
            if file.step > last[file.kind] and is_own(file.rank):
                file.path.unlink(missing_ok=True)
                for path in file.path.parent.glob(_REGRADED):  # what it graded is about to be played again
                    path.unlink(missing_ok=True)
                _remove(file.path.parent)

    def close(self) -> None:
        """Write the remaining lines."""
        self.flush()
        if self._thread is not None:
            self._thread.shutdown()

    def flush(self) -> None:
        """Wait until all lines are in the files."""
        if self._writing is not None:
            writing, self._writing = self._writing, None
            writing.result()

    def _write(self, kind: Kind, step: int, what: What, make: Callable[[], Iterable[str]]) -> None:
        lines = "".join(f"{line}\n" for line in make())
        folder = self._directory.episodes
        path = folder / f"{kind}-{step:06d}" / f"{what}.rank-{self._rank}.jsonl.gz"
        with self._directory.may_fail(folder):
            # A step may have several rounds, and several nodes that play; parts of a compressed file follow each other.
            _append(path, gzip.compress(lines.encode("ascii"), 1, mtime=0))
            self._thin(kind, step)

    def _thin(self, kind: Kind, step: int) -> None:
        """Remove the rank's files of steps that are no longer kept."""
        steps = {found: path for name, found, path in _folders(self._directory.episodes) if name == kind}
        for dropped in steps.keys() - kept(kind, steps, self._kept_steps, step):
            if _waits(steps[dropped]):
                continue
            for path in steps[dropped].glob(f"*.rank-{self._rank}.jsonl.gz"):
                path.unlink(missing_ok=True)
            _remove(steps[dropped])


def kept(kind: Kind, steps: Iterable[int], num_newest: int, last: int) -> set[int]:
    """The steps whose episodes are kept once the last step's have been written.

    Of training, they are the newest, and about as many of the steps before, evenly spread from the first; of
    evaluations, twice as many of the newest. A step with episodes that wait to be graded again is kept besides.
    """
    if kind == "evaluation":
        return set(sorted(steps)[-2 * num_newest :])
    stride = 1
    while last // stride > num_newest:
        stride *= 2
    return {step for step in steps if step > last - num_newest or step % stride == min(1, stride - 1)}


def episode_files(folder: Path) -> list[EpisodeFile]:
    """The files of a journal, by kind, step and rank; files of rewards come before files of episodes."""
    found: list[EpisodeFile] = []
    for kind, step, path in _folders(folder):
        for file in path.iterdir():
            match = _FILE.fullmatch(file.name)
            if match:
                found.append(EpisodeFile(kind, step, match[1], int(match[2]), file))
    return sorted(found)


def write_regraded(folder: Path, lines: Iterable[str], *, is_complete: bool) -> Path:
    """Write new grades of a step's episodes next to those of the run, and return the file.

    No file is overwritten. What is not complete lacks episodes, or has some that could not be graded.
    """
    number = 1 + max((int(path.name.split("-")[1].split(".")[0]) for path in folder.glob(_REGRADED)), default=0)
    path = folder / _REGRADED.replace("*", f"{number}{'' if is_complete else _INCOMPLETE}")
    with path.open("xb") as file:
        file.write(gzip.compress("".join(f"{line}\n" for line in lines).encode(), 1, mtime=0))
    return path


def read_episode_file(path: Path) -> Iterator[dict[str, Json]]:
    """The lines of a file, which may be compressed; a ValueError if the file is damaged."""
    try:
        with gzip.open(path) if path.suffix == ".gz" else path.open("rb") as lines:
            for line in lines:
                yield json.loads(line)
    except (OSError, EOFError, zlib.error, ValueError) as error:
        raise ValueError(f"{path} is no file of episodes, or is damaged: {error}") from error


def _folders(folder: Path) -> Iterator[tuple[str, int, Path]]:
    for path in folder.iterdir() if folder.is_dir() else ():
        match = _FOLDER.fullmatch(path.name)
        if match and path.is_dir():
            yield match[1], int(match[2]), path


def _waits(folder: Path) -> bool:
    """Whether episodes of a step wait to be graded again."""
    graded = (path for path in folder.glob(_REGRADED) if _INCOMPLETE not in path.name)
    return any(folder.glob("deferred.*")) and not any(graded)


def _append(path: Path, content: bytes) -> None:
    """Append all bytes to a file, or none."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab", buffering=0) as file:
        end, left = file.tell(), memoryview(content)
        try:
            while left:
                left = left[file.write(left) :]
        except OSError:
            file.truncate(end)
            raise


def _remove(folder: Path) -> None:
    with suppress(OSError):  # another rank has removed it, or has just written into it
        folder.rmdir()
