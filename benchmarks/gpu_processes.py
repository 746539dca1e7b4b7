"""Processes with time limits, at the same time, none of which outlives the one that has started them.

They share its session, so that whoever ends that session ends them, too. A process that takes too long first prints the
stacks of its threads, as Python does at the signal ABRT if it is asked to, and is then killed with all that it started.
"""

from __future__ import annotations

import ctypes
import os
import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import NoReturn

PR_SET_CHILD_SUBREAPER = 36
STACK_S = 3.0
"""Seconds in which a process prints its stacks before it is killed."""
POLL_S = 0.05


@dataclass(frozen=True)
class Job:
    """A process to start.

    Attributes:
        name: Name of its log.
        command: Program and arguments.
        limit_s: Time limit in seconds.
        folder: Working directory.
        variables: Environment variables besides those of this process.
    """

    name: str
    command: Sequence[str]
    limit_s: float
    folder: Path
    variables: Mapping[str, str] = field(default_factory=dict)


@dataclass(frozen=True)
class Ended:
    """A process that has ended.

    Attributes:
        job: Its description.
        code: Exit code; negative for a signal.
        seconds: Time that it took.
        log: File with its output.
        is_stopped: Whether it had to be stopped, because of its limit or because everything was.
    """

    job: Job
    code: int
    seconds: float
    log: Path
    is_stopped: bool

    @property
    def output(self) -> str:
        return self.log.read_text(encoding="utf-8", errors="replace")

    @property
    def problem(self) -> str:
        """Why it counts as failed; empty if it does not."""
        if self.is_stopped:
            return f"stopped after {self.seconds:.0f} s"
        return f"exit code {self.code}" if self.code else ""


class StoppedError(KeyboardInterrupt):
    """A signal asks this process to end."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.number = number


@contextmanager
def stopped_by_signals() -> Iterator[None]:
    """Raise `StoppedError` at the first signal that asks to end; later ones change nothing, so that results are kept.

    Orphans of what is started within are handed to this process, to be ended by it.
    """
    ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1)
    _, most = resource.getrlimit(resource.RLIMIT_CORE)
    resource.setrlimit(resource.RLIMIT_CORE, (0, most))  # a stopped process would write gigabytes
    numbers = (signal.SIGTERM, signal.SIGINT, signal.SIGHUP)

    def stop(number: int, _: object) -> NoReturn:
        for one in numbers:
            signal.signal(one, signal.SIG_IGN)
        raise StoppedError(number)

    for number in numbers:
        signal.signal(number, stop)
    yield


class _Running:
    def __init__(self, job: Job, log: Path) -> None:
        self.job, self.log, self.begin = job, log, time.monotonic()
        self.stopped_at: float | None = None
        self.started: list[int] = []  # by it, and running when it was stopped
        with log.open("wb") as output:
            self.process = subprocess.Popen(
                job.command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                cwd=job.folder,
                env={**os.environ, **job.variables},
                process_group=0,
            )

    def has_ended(self, now: float) -> bool:
        """Whether it has ended; one that takes too long is asked for its stacks, and later killed."""
        if self.process.poll() is not None:
            return True
        if self.stopped_at is None:
            if now - self.begin >= self.job.limit_s:
                self.stop(now)
        elif now - self.stopped_at >= STACK_S:
            self.kill()
        return False

    def stop(self, now: float) -> None:
        self.stopped_at, self.started = now, descendants(self.process.pid)
        with suppress(ProcessLookupError):
            os.killpg(self.process.pid, signal.SIGABRT)

    def kill(self) -> None:
        """Kill it with all that it started, in other groups and sessions too."""
        kill([*descendants(self.process.pid), *self.started, self.process.pid])

    def ended(self) -> Ended:
        kill(self.started)
        with suppress(ProcessLookupError):  # what it left in its group
            os.killpg(self.process.pid, signal.SIGKILL)
        seconds = round(time.monotonic() - self.begin, 1)
        return Ended(self.job, self.process.wait(), seconds, self.log, self.stopped_at is not None)


def run_together(jobs: Sequence[Job], logs: Path, done: Callable[[Ended], None], at_once: int | None = None) -> None:
    """Run processes at the same time, and wait for all of them.

    Args:
        jobs: Processes, with different names.
        logs: Folder of their logs.
        done: Function that is called as soon as one of them has ended.
        at_once: Most processes at a time, those in front first; all of them if it is not given.

    Raises:
        StoppedError: A signal came; all have been ended, and `done` was called for each.
    """
    running, waiting = list[_Running](), [*jobs]
    try:
        while running or waiting:
            while waiting and len(running) < (at_once or len(jobs)):
                job = waiting.pop(0)
                running.append(_Running(job, logs / f"{job.name}.txt"))
            now = time.monotonic()
            for one in [one for one in running if one.has_ended(now)]:
                running.remove(one)
                done(one.ended())
            time.sleep(POLL_S)
    except StoppedError:
        now = time.monotonic()
        for one in running:
            one.stop(now)
        while time.monotonic() < now + STACK_S and any(one.process.poll() is None for one in running):
            time.sleep(POLL_S)
        for one in running:
            one.kill()
            done(one.ended())
        raise


def end_descendants() -> None:
    """Kill all that this process has started, directly or not."""
    kill(descendants(os.getpid()))


def kill(pids: Sequence[int]) -> None:
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def descendants(pid: int) -> list[int]:
    """Processes that a process has started, and those that they have started."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):  # it has just ended
            fields = stat.read_text(errors="replace").rpartition(")")[2].split()
            children.setdefault(int(fields[1]), []).append(int(stat.parent.name))
    found, left = [], [pid]
    while left:
        own = children.get(left.pop(), [])
        found += own
        left += own
    return found
