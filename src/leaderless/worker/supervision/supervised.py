"""Supervision of a rank during its steps: a watchdog, signs of presence, and requests to stop."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from functools import partial
from typing import Self

import psutil
from rich.markup import escape

from leaderless.base.devices import DeviceUse, device_use
from leaderless.base.values import Json
from leaderless.distributed.activity import Activity
from leaderless.observability.run_directory import RunDirectory, write_atomically
from leaderless.worker.build.parts import Parts, Progress
from leaderless.worker.supervision.heartbeat import Stall, Watchdog, end_stalled
from leaderless.worker.supervision.stop import StopRequest


@contextmanager
def supervised(parts: Parts, progress: Progress, *, is_guest: bool) -> Iterator[StopRequest]:
    """Watch over the steps of a rank; yields the request to stop, which signals and the run's folder can make.

    Args:
        parts: Parts of the worker; another plan may take the place of theirs meanwhile.
        progress: Position of its loop.
        is_guest: Whether the process belongs to a program that continues after the run, so that nothing may end it.
    """
    messages = _Messages(parts, progress)
    stop = StopRequest(parts.recipe.run.grace_s, messages.stopping, messages.abandoned, is_guest=is_guest)
    with _watchdog(parts, messages, is_guest=is_guest), _presence(parts, stop), stop:
        yield stop


def _watchdog(parts: Parts, messages: _Messages, *, is_guest: bool) -> Watchdog:
    run, directory, transport = parts.recipe.run, parts.directory, parts.transport
    # A wait for a peer must not time out before the peer's stall is seen.
    timeout_s = min(run.stall_timeout_s, run.timeout_s / 2)
    end = partial(end_stalled, directory=directory, rank=transport.rank)
    stacks = directory.errors / f"stacks-rank-{transport.rank}.txt"
    return Watchdog(transport.activity, transport, timeout_s, stacks, messages.stalled if is_guest else end)


def _presence(parts: Parts, stop: StopRequest) -> Presence:
    transport, every_s = parts.transport, parts.recipe.run.status_every_s
    place, use = (transport.rank, transport.world.size), partial(device_use, parts.turns.device)
    return Presence(parts.directory, place, transport.activity, every_s, use, stop.ask)


class _Messages:
    """Messages for the console when a run stalls or stops."""

    def __init__(self, parts: Parts, progress: Progress) -> None:
        self._parts, self._progress = parts, progress

    def stalled(self, stall: Stall, is_reporter: bool) -> None:
        if is_reporter:
            where = escape(str(self._parts.directory.errors))
            self._parts.display.say(f"[bold red]no progress[/]: {escape(stall.cause)}; the stacks are in {where}")

    def stopping(self) -> None:
        self._parts.display.say(
            "stopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one"
        )

    def abandoned(self) -> None:
        done = self._parts.directory.last_step()
        resume = f"; the same command continues from step {done}" if done else ""
        grace = f"run.grace_s={self._parts.recipe.run.grace_s:g} s"
        self._parts.display.say(f"step {self._progress.step} is abandoned after {grace}{resume}")
        if self._parts.desk is not None:
            self._parts.desk.close()  # so that those who wait for an answer get an error


RANKS_PER_S = 64
"""Most files that all ranks of a run write in a second, on average."""


class Presence:
    """Writes `live/rank-N.json` every few seconds while the rank runs; pages read it.

    The run does not depend on a reader, nor on whether the file can be written.
    """

    def __init__(
        self,
        directory: RunDirectory,
        place: tuple[int, int],
        activity: Activity,
        every_s: float,
        device_use: Callable[[], DeviceUse | None],
        on_stop: Callable[[], None],
    ) -> None:
        """Prepare to write.

        Args:
            directory: Folder of the run.
            place: Rank and number of ranks.
            activity: Activity of the main thread.
            every_s: Seconds between two writes; 0 for none. With many ranks the interval is longer.
            device_use: Function that measures the use of the accelerator; None without one.
            on_stop: Function to call, once, when the file `stop` exists.
        """
        self._directory, (self._rank, self._world_size) = directory, place
        self._activity, self._device_use, self._on_stop = activity, device_use, on_stop
        self._every_s = max(every_s, self._world_size / RANKS_PER_S) if every_s else 0.0
        self._path = directory.live / f"rank-{self._rank}.json"
        self._process, self._ended = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def __enter__(self) -> Self:
        """Begin."""
        if self._every_s:
            self._process.cpu_percent()  # counts from here
            self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        """Stop, and remove the file."""
        self._ended.set()
        if self._thread.is_alive():
            self._thread.join(2.0)
        with suppress(OSError):
            self._path.unlink(missing_ok=True)
            self._directory.live.rmdir()  # by the last rank

    def _run(self) -> None:
        has_stopped = False
        while not self._ended.is_set():
            # A full disk or a slow share is no reason for a run to fail, nor to miss a request to stop.
            with suppress(OSError):
                write_atomically(self._path, json.dumps(self.status()))
            with suppress(OSError):
                if not has_stopped and self._directory.stop.exists():
                    has_stopped = True
                    self._on_stop()
            self._ended.wait(self._every_s)

    def status(self) -> Mapping[str, Json]:
        """The rank's activity, and the resources it uses."""
        seen, use = self._activity, self._device_use()
        return {
            "rank": self._rank,
            "world_size": self._world_size,
            "host": socket.gethostname(),
            "time": round(time.time(), 3),
            "every_s": self._every_s,
            "step": seen.step,
            "doing": seen.doing,
            "waiting_for": seen.waiting_for,
            "idle_s": round(time.monotonic() - seen.moved_at, 3),
            "host_bytes": self._process.memory_info().rss,
            "cpu_percent": self._process.cpu_percent(),
            "cpus": os.cpu_count(),
            "device_bytes": use.used_bytes if use else None,
            "device_total_bytes": use.total_bytes if use else None,
            "device_percent": use.percent if use else None,
        }
