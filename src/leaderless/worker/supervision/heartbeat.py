"""A thread in each worker that notices when no rank makes progress, writes all stacks, and names the culprit."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import sysconfig
import threading
import time
import traceback
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import Self, TextIO

from leaderless.distributed.activity import Activity
from leaderless.distributed.transport import Transport
from leaderless.observability.run_directory import RunDirectory
from leaderless.worker.supervision.failure import WorkerFailure

TICKS_PER_TIMEOUT = 30
"""Checks of the thread per timeout; few enough that a thousand ranks do not load the rendezvous store."""
ANSWER_S = 3.0
"""Time to answer a roll call, in addition to two ticks."""
LAST_WORDS_S = 1.0
"""Time for other ranks to write their reports before the first process ends, which ends them too."""
OPENINGS = 10
"""Times that a file is opened in a folder that may be removed."""
POLL_S = 0.1
_LIBRARIES = tuple({sysconfig.get_path(name) for name in ("stdlib", "platstdlib", "purelib", "platlib")})
_PACKAGE = str(Path(__file__).parents[2])
_DEBUGGERS = {"bdb", "pdb", "pydevd", "debugpy", "_pydevd_bundle"}


@dataclass(frozen=True)
class Status:
    """The answer of one rank.

    Attributes:
        place: Index of its current entry in the plan's schedule.
        waiting_for: Exchange in which it waits for other ranks; empty when it does not wait.
        function: Innermost function that belongs neither to Python, nor to a library, nor to this package.
    """

    rank: int
    step: int
    place: int
    doing: str
    idle_s: float
    waiting_for: str
    function: str

    def __str__(self) -> str:
        where = f", in user function {self.function}" if self.function else ""
        wait = f", waiting for {self.waiting_for}" if self.waiting_for else ""
        return (
            f"rank {self.rank} has not moved for {self.idle_s:.0f} s in {self.doing}{where}{wait}, at step {self.step}"
        )


@dataclass(frozen=True)
class Stall:
    """No rank makes progress, because all wait for `rank`; `cause` describes what it was doing."""

    rank: int
    cause: str
    step: int


def find_culprit(statuses: Sequence[Status], silent: Sequence[int]) -> Stall:
    """Find the rank that all wait for: a silent one, else one that does not wait, else the furthest behind."""
    if silent:
        cause = f"rank {silent[0]} does not answer: it is gone, or native code keeps its interpreter from running"
        return Stall(silent[0], cause, max(status.step for status in statuses))
    worst = min(statuses, key=lambda status: (bool(status.waiting_for), status.step, status.place, -status.idle_s))
    return Stall(worst.rank, str(worst), worst.step)


class Watchdog:
    """Watches the activity of all ranks, each in its own process.

    A rank without progress for too long calls the roll in the rendezvous store; all answer with the time of their last
    progress. It is a stall only if no rank made progress in time: a rank may wait long for a busy one.
    """

    def __init__(
        self,
        activity: Activity,
        transport: Transport,
        timeout_s: float,
        stacks: Path,
        on_stall: Callable[[Stall, bool], None],
    ) -> None:
        """Prepare to watch. The main thread makes this object; `activity` is that thread's.

        When no rank has moved for `timeout_s`, each one that answers writes its stacks to the file `stacks`, and calls
        `on_stall` in its watching thread with whether this rank reports for all. The call need not return.
        """
        self._activity, self._transport, self._timeout_s = activity, transport, timeout_s
        self._path, self._on_stall = stacks, on_stall
        self._main, self._ended = threading.get_ident(), threading.Event()
        self._tick_s = timeout_s / TICKS_PER_TIMEOUT
        self._num_calls, self._not_before = 0, 0.0
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)

    def __enter__(self) -> Self:
        # Opened now, as the backstop below writes it without the help of the interpreter.
        self._file = self._opened()
        self._store = self._transport.store()
        self._activity.beat()
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._ended.set()
        self._thread.join(self._tick_s + ANSWER_S)
        faulthandler.cancel_dump_traceback_later()
        self._file.close()
        if not self._path.stat().st_size:
            self._path.unlink()
            with suppress(OSError):  # other ranks may still write there
                self._path.parent.rmdir()

    def _opened(self) -> TextIO:
        """The file, in a folder that a rank which ends removes if it is empty, perhaps just now."""
        num_left = OPENINGS
        while True:
            num_left -= 1
            try:
                self._path.parent.mkdir(parents=True, exist_ok=True)
                return self._path.open("a", encoding="utf-8")
            except (FileExistsError, FileNotFoundError):
                if not num_left:
                    raise

    def status(self) -> Status:
        """Describe what this rank is doing."""
        frame = sys._current_frames().get(self._main)  # noqa: SLF001 - the one way to see it
        frames = [frame for frame, _ in traceback.walk_stack(frame)] if frame is not None else []
        modules = [str(frame.f_globals.get("__name__", "")) for frame in frames]
        seen = self._activity
        waiting_for = seen.waiting_for
        if not waiting_for and any(module.startswith("torch.distributed") for module in modules):
            waiting_for = "a collective of its model"
        is_debugged = any(module.partition(".")[0] in _DEBUGGERS for module in modules)
        idle_s = 0.0 if is_debugged else time.monotonic() - seen.moved_at
        own = (*_LIBRARIES, _PACKAGE, "<")
        named = (
            f"{frame.f_globals.get('__name__', '')}:{frame.f_code.co_qualname}"
            for frame in frames
            if not frame.f_code.co_filename.startswith(own) and frame.f_code.co_name != "<module>"
        )
        function = next(named, "")
        return Status(self._transport.rank, seen.step, seen.place, seen.doing, idle_s, waiting_for, function)

    def _watch(self) -> None:
        while not self._ended.wait(self._tick_s):
            # While native code holds the interpreter, this thread cannot run either; a system timer can.
            faulthandler.dump_traceback_later(self._timeout_s, file=self._file)
            try:
                self._look()
            except RuntimeError:
                return  # the store is gone with the rank that held it, and so is the run

    def _look(self) -> None:
        """Call the roll if this rank made no progress for too long, and answer the roll call of another rank."""
        call, now = f"stall/{self._num_calls}", time.monotonic()
        is_idle = self.status().idle_s >= self._timeout_s and now >= self._not_before
        if not is_idle and not self._store.check([f"{call}/called"]):
            return
        is_caller = self._store.add(f"{call}/called", 1) == 1
        self._store.set(f"{call}/{self._transport.rank}", json.dumps(asdict(self.status())))
        self._num_calls += 1
        if is_caller:
            self._store.set(f"{call}/verdict", self._judge(call))
        elif not self._have_come([f"{call}/verdict"]):
            return
        verdict = json.loads(self._store.get(f"{call}/verdict"))
        self._not_before = time.monotonic() + verdict["wait_s"]
        if verdict["stall"] is not None:
            self._file.write(f"{datetime.now(UTC).isoformat(timespec='seconds')}: {self.status()}\n")
            self._file.flush()
            faulthandler.dump_traceback(self._file, all_threads=True)
            self._on_stall(Stall(**verdict["stall"]), is_caller)

    def _judge(self, call: str) -> str:
        """Name the rank to blame if none makes progress, else the wait before the next call; as JSON."""
        keys = {rank: f"{call}/{rank}" for rank in self._transport.world.ranks}
        self._have_come(list(keys.values()))
        answers = {rank: self._store.get(key) for rank, key in keys.items() if self._store.check([key])}
        statuses = [Status(**json.loads(answer)) for answer in answers.values()]
        wait_s = self._timeout_s - min(status.idle_s for status in statuses)
        if wait_s > 0:
            return json.dumps({"wait_s": wait_s, "stall": None})
        stall = find_culprit(statuses, [rank for rank in keys if rank not in answers])
        return json.dumps({"wait_s": self._timeout_s, "stall": asdict(stall)})

    def _have_come(self, keys: list[str]) -> bool:
        """Wait until keys are in the store; returns whether they came in time."""
        end = time.monotonic() + 2 * self._tick_s + ANSWER_S
        while not self._store.check(keys):
            if time.monotonic() > end:
                return False
            time.sleep(POLL_S)
        return True


def end_stalled(stall: Stall, is_reporter: bool, *, directory: RunDirectory, rank: int) -> None:
    """End a process that waits in vain; the launcher restarts all of them. One rank reports it for all."""
    message = f"{stall.cause}; the stacks of all ranks are in {directory.errors}"
    if is_reporter:
        directory.append_event("stall", {"rank": stall.rank, "cause": stall.cause, "step": stall.step})
    failure = WorkerFailure(stall.rank, "stall", message) if is_reporter else WorkerFailure(rank, "lost_peers", message)
    if not failure.write() and is_reporter:
        print(f"error {message}", file=sys.stderr, flush=True)  # noqa: T201 - nothing else reports it
    time.sleep(LAST_WORDS_S)
    os._exit(1)
