"""Writes for the launcher why a worker failed: people should see the first cause, not its consequences."""

from __future__ import annotations

import errno
import json
import os
import re
import time
import traceback
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import asdict, dataclass, field
from functools import cache
from pathlib import Path
from types import TracebackType
from typing import Literal, Self

from leaderless.config import RecipeError
from leaderless.distributed.errors import CollectiveError, MemoryExhausted, is_out_of_memory
from leaderless.observability.events import GuardStop
from leaderless.observability.hidden_values import without_secrets
from leaderless.observability.run_directory import write_atomically

FOLDER_VARIABLE = "LEADERLESS_FAILURES"
"""Folder in which the launcher wants each rank to write its failure; without it a worker prints it."""
STEPS_BEGUN = "steps-begun"
"""A file in that folder: from now on Ctrl-C asks workers to stop; before, it ends them."""
FAILED = "failed"
"""A file in that folder: a worker has failed, and the launcher ends the others with SIGTERM."""
STOPPED = "stopped"
"""A file in that folder: workers were asked to stop, and ended with a checkpoint before the last step."""
Kind = Literal[
    "recipe", "storage", "out_of_memory", "guard", "lost_peers", "killed", "interrupt", "stall", "outside", "error"
]
FINAL: frozenset[Kind] = frozenset({"recipe", "guard", "interrupt"})
"""Failures that another start would only repeat, or that the user asked for."""
_FRAME = re.compile(r'  File ".*", line \d+')
_WRONG_PATHS = (FileNotFoundError, FileExistsError, IsADirectoryError, NotADirectoryError, PermissionError)
_STORAGE = {errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EROFS}
_MACHINERY = ("leaderless.__main__", "leaderless.cli.main")


@dataclass(frozen=True)
class WorkerFailure:
    """How one rank failed.

    Attributes:
        rank: Rank that failed.
        kind: `recipe`: the user has to correct it; `storage`: a file could not be written; `out_of_memory`: memory has
            run out, and the next start may do with less; `guard`: numbers have gone bad, and would again; `lost_peers`:
            it waited in vain for other ranks, whose failure is the cause; `killed`: a signal ended the process;
            `interrupt`: Ctrl-C; `stall`: no rank made progress, because of this rank; `outside`: an error of the
            system, the network or a device, which may pass; `error`: any other exception, which would occur again.
        message: Text for people.
        trace: Traceback; empty where there is none.
        time_ns: Time of the failure; when one rank fails, its peers fail soon after.
    """

    rank: int
    kind: Kind
    message: str
    trace: str = ""
    time_ns: int = field(default_factory=time.time_ns)

    @classmethod
    def of(cls, error: BaseException, rank: int) -> Self:
        """Describe an exception that ends a rank."""
        trace = "".join(traceback.format_exception(error.with_traceback(_own_trace(error.__traceback__))))
        # A user's code may quote a token in its error, as part of an address that could not be reached.
        return cls(rank, _kind(error), without_secrets(_message(error)), without_secrets(trace))

    @property
    def place(self) -> str:
        """File, line and function that raised the error; the message where there is no traceback."""
        return next((line for line in reversed(self.trace.splitlines()) if _FRAME.match(line)), self.message)

    def write(self) -> bool:
        """Write it for the launcher; returns whether there is one."""
        folder = os.environ.get(FOLDER_VARIABLE)
        if folder is not None:
            write_atomically(Path(folder) / f"rank-{self.rank}.json", json.dumps(asdict(self)))
        return folder is not None


class WorkersFailed(RuntimeError):  # noqa: N818
    """A run ended because a worker failed; `failure` is the first one."""

    def __init__(self, failure: WorkerFailure) -> None:
        super().__init__(failure.message)
        self.failure = failure


@contextmanager
def reported_failures(rank: int) -> Iterator[None]:
    """Record an error that ends this worker and raise SystemExit; without a launcher, let the error pass."""
    try:
        yield
    except BaseException as error:
        failure = WorkerFailure.of(error, rank)
        if not isinstance(error, SystemExit) and failure.write():
            raise SystemExit(2 if failure.kind == "recipe" else 1) from None
        raise


def leave_mark(name: str) -> None:
    """Make a file of that name in the launcher's folder, if there is a launcher."""
    if FOLDER_VARIABLE in os.environ:
        (Path(os.environ[FOLDER_VARIABLE]) / name).touch()


def note_place(rank: int, step: int, doing: str) -> None:
    """Write what a rank is doing, for the launcher, in case the system kills it; this takes a few microseconds."""
    if FOLDER_VARIABLE in os.environ:
        with suppress(OSError):
            os.pwrite(_place_file(os.environ[FOLDER_VARIABLE], rank), f"{step}\n{doing}"[:200].encode().ljust(800), 0)


@cache
def _place_file(folder: str, rank: int) -> int:
    return os.open(Path(folder) / f"place-{rank}", os.O_WRONLY | os.O_CREAT, 0o600)


def read_place(folder: Path, rank: int) -> tuple[int, str] | None:
    """Last step of a rank and the name of its last work, from the folder of its start; None if it has not begun."""
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
    # Waits inside torch, as in its sharding, raise errors of the backend; gloo has no separate type for them.
    is_backend = type(error).__name__.startswith("Dist") or "/gloo/transport/" in str(error)
    if isinstance(error, CollectiveError) or (isinstance(error, RuntimeError) and is_backend):
        return "lost_peers"
    is_device = type(error).__name__ == "AcceleratorError" or "CUDA error" in str(error)
    if is_device or (isinstance(error, OSError) and not isinstance(error, _WRONG_PATHS)):
        return "outside"
    return "interrupt" if isinstance(error, KeyboardInterrupt) else "error"


def _message(error: BaseException) -> str:
    """An error in few words, with its place in the run."""
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
    """A traceback without the frames that called the command."""
    own = trace
    while own is not None:
        module = own.tb_frame.f_globals.get("__name__", "")
        if module.startswith("leaderless.") and module not in _MACHINERY:
            return own
        own = own.tb_next
    return trace


def first_failure(folder: Path) -> WorkerFailure | None:
    """The failure that caused all others, from the folder of a start; None when no rank could write one."""
    failures = [WorkerFailure(**json.loads(file.read_text(encoding="utf-8"))) for file in folder.glob("rank-*.json")]
    return min(failures, key=lambda failure: (failure.kind == "lost_peers", failure.time_ns), default=None)
