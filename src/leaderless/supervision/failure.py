"""Why a worker failed, written where the launcher finds it: a person should read the first cause, not its echoes."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from leaderless.config import RecipeError
from leaderless.data.errors import CollectiveError, MemoryExhausted, is_out_of_memory
from leaderless.observability.events import GuardStop
from leaderless.observability.run_directory import write_atomically
from leaderless.observability.secrets import without_secrets

FOLDER_VARIABLE = "LEADERLESS_FAILURES"
"""Where the launcher wants each rank to write its failure; without it a worker prints it."""
STEPS_BEGUN = "steps-begun"
"""A file in that folder: from now on Ctrl-C asks workers to stop, where it would have ended them before."""
FAILED = "failed"
"""A file in that folder: a worker has failed, and the launcher ends the others with SIGTERM."""
STOPPED = "stopped"
"""A file in that folder: the workers have ended as somebody asked, with a checkpoint and before the last step."""
Kind = Literal[
    "recipe", "storage", "out_of_memory", "guard", "lost_peers", "killed", "interrupt", "stall", "outside", "error"
]
FINAL: frozenset[Kind] = frozenset({"recipe", "guard", "interrupt"})
"""Failures that another start would only repeat, or that somebody has asked for."""
_FRAME = re.compile(r'  File ".*", line \d+')
_WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_MACHINERY = ("leaderless.__main__", "leaderless.cli.main")


@dataclass(frozen=True)
class Failure:
    """How one rank failed.

    Attributes:
        rank: Rank that failed.
        time_ns: Time of the failure; when one rank fails the others lose it and fail soon after.
        kind: `recipe`: the user has to correct it; `storage`: a file could not be written; `out_of_memory`: memory has
            run out, and the next start may do with less; `guard`: numbers have gone bad, and would again; `lost_peers`:
            it waited in vain for others, whose failure is the cause; `killed`: a signal ended the process;
            `interrupt`: Ctrl-C; `stall`: nothing moved any more, because of this rank; `outside`: an error of the
            system, the network or a device, which may pass; `error`: any other exception, which would come up again.
        message: Text for people.
        trace: Traceback; empty where there is none.
    """

    rank: int
    time_ns: int
    kind: Kind
    message: str
    trace: str

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """Describe an error.

        Args:
            error: Exception that was caught.
            rank: Rank that it ends.
        """
        trace = "".join(traceback.format_exception(error.with_traceback(_own_trace(error.__traceback__))))
        # A user's code may quote a token in its error, as part of an address that could not be reached.
        return cls(rank, time.time_ns(), _kind(error), without_secrets(_message(error)), without_secrets(trace))

    @property
    def place(self) -> str:
        """File, line and function that raised the error; the message where there is no traceback."""
        return next((line for line in reversed(self.trace.splitlines()) if _FRAME.match(line)), self.message)

    def write(self) -> bool:
        """Write it down for the launcher; whether there is one that reads it."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None:
            write_atomically(Path(folder) / f"rank-{self.rank}.json", json.dumps(asdict(self)))
        return folder is not None


class WorkersFailed(RuntimeError):  # noqa: N818
    """A run ended because a worker failed.

    Attributes:
        failure: First failure.
    """

    def __init__(self, failure: Failure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def reported_failures(rank: int) -> Iterator[None]:
    """Write down an error that ends the worker, for the launcher to show; without a launcher, let it pass.

    Args:
        rank: Rank of this worker.

    Raises:
        SystemExit: The error has been written down.
    """
    try:
        yield
    except BaseException as error:
        failure = Failure.of(error, rank)
        if not isinstance(error, SystemExit) and failure.write():
            raise SystemExit(2 if failure.kind == "recipe" else 1) from None
        raise


def tell_launcher(name: str) -> None:
    """Leave a mark for the launcher, if there is one.

    Args:
        name: Name of a file in the launcher's folder.
    """
    if FOLDER_VARIABLE in os.environ:
        (Path(os.environ[FOLDER_VARIABLE]) / name).touch()


def note_place(rank: int, step: int, doing: str) -> None:
    """Leave word of what a rank does, for the launcher, in case that the system kills it; costs a few microseconds.

    Args:
        rank: Rank of this worker.
        step: Step of the run.
        doing: Name of what it does.
    """
    if FOLDER_VARIABLE in os.environ:
        with suppress(OSError):
            os.pwrite(_place_file(os.environ[FOLDER_VARIABLE], rank), f"{step}\n{doing}"[:200].encode().ljust(800), 0)


@cache
def _place_file(folder: str, rank: int) -> int:
    return os.open(Path(folder) / f"place-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)


def read_place(folder: Path, rank: int) -> tuple[int, str] | None:
    """Step and name of what a rank did last; None when it has not begun.

    Args:
        folder: Folder that the ranks wrote into.
        rank: Rank of the worker.
    """
    file = folder / f"place-{rank}"
    step, _, doing = file.read_text(encoding="utf-8").partition("\n") if file.exists() else ("", "", "")
    return (int(step), doing.strip()) if step else None


def _kind(error: BaseException) -> Kind:
    if isinstance(error, RecipeError):
        return "recipe"
    if isinstance(error, OSError) and error.errno in _STORAGE:
        return "storage"
    if isinstance(error, GuardStop):
        return "guard"
    if is_out_of_memory(error):
        return "out_of_memory"
    # What waits inside torch, as its sharding does, raises errors of the backend; gloo has no type of its own for them.
    is_backend = type(error).__name__.startswith("Dist") or "/gloo/transport/" in str(error)
    if isinstance(error, CollectiveError) or (isinstance(error, RuntimeError) and is_backend):
        return "lost_peers"
    is_device = type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
    if is_device or (isinstance(error, OSError) and not isinstance(error, _WRONG_PATHS)):
        return "outside"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "error"


def _message(error: BaseException) -> str:
    """An error in few words, with where in the run it happened."""
    if isinstance(error, RecipeError):
        return str(error)
    places = "".join(f" ({note})" for note in getattr(error, "__notes__", ()))
    remedy = ""
    if _kind(error) == "storage":
        remedy = ": make room, or name another run.directory"
    elif is_out_of_memory(error) and not isinstance(error, MemoryExhausted):
        remedy = ": memory has run out; lower batch.micro_batch_tokens or rollout.max_sequences, or use more ranks"
    return f"{type(error).__name__}{': ' if str(error) else ''}{error}{places}{remedy}"


def _own_trace(trace: TracebackType | None) -> TracebackType | None:
    """A traceback without the machinery that called the command."""
    own = trace
    while own is not None and not _is_own(own.tb_frame.f_globals.get("__name__", "")):
        own = own.tb_next
    return own or trace


def _is_own(module: str) -> bool:
    return module.startswith("leaderless.") and module not in _MACHINERY


def first_failure(folder: Path) -> Failure | None:
    """The failure that caused all others; None when no rank could write one.

    Args:
        folder: Folder that the ranks wrote into.
    """
    failures = [Failure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
    return min(failures, key=lambda failure: (failure.kind == "lost_peers", failure.time_ns), default=None)
