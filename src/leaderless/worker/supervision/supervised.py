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
from leaderless.worker.checkpoint.preemption import PreemptionSaver
from leaderless.worker.supervision.heartbeat import Stall, Watchdog, end_stalled
from leaderless.worker.supervision.stop import StopRequest


@contextmanager
def supervised(
    parts: Parts, progress: Progress, preemption: Callable[[], PreemptionSaver], *, is_guest: bool
) -> Iterator[StopRequest]:
    """Watch over the steps of a rank; yields the request to stop, which signals and the run's folder can make.

    Another plan may take the place of that of `parts` meanwhile, with another `preemption`. Nothing may end a guest in
    another program.
    """
    run, directory, transport, say = parts.recipe.run, parts.directory, parts.transport, parts.display.say

    def stalled(stall: Stall, is_reporter: bool) -> None:
        if is_reporter:
            where = escape(str(directory.errors))
            say(f"[bold red]no progress[/]: {escape(stall.cause)}; the stacks are in {where}")

    def stopping() -> None:
        say("stopping after this step, with a checkpoint; press Ctrl-C again to stop at once without one")

    def preempted() -> None:
        say(
            f"stopping after this step, with a checkpoint; if it takes longer than run.grace_s={run.grace_s:g} s, the "
            "state before it is what remains"
        )
        preemption().save()

    def look() -> None:
        if directory.stop.exists():
            stop.ask()
        if preemption().is_begun():
            preemption().save()

    def abandoned() -> None:
        done = directory.last_step()
        resume = f"continues from step {done}" if done else "begins anew"
        say(f"step {progress.step} is abandoned after run.grace_s={run.grace_s:g} s; the same command {resume}")
        if parts.desk is not None:
            parts.desk.close()  # so that those who wait for an answer get an error

    stop = StopRequest(run.grace_s, stopping, preempted, abandoned, is_guest=is_guest)
    # A wait for a peer must not time out before the peer's stall is seen.
    timeout_s = min(run.stall_timeout_s, run.timeout_s / 2)
    stacks = directory.errors / f"stacks-rank-{transport.rank}.txt"
    end = stalled if is_guest else partial(end_stalled, directory=directory, rank=transport.rank)
    watchdog = Watchdog(transport.activity, transport, timeout_s, stacks, end)
    place, use = (transport.rank, transport.world.size), partial(device_use, parts.turns.device)
    with watchdog, Presence(directory, place, transport.activity, run.status_every_s, use, look), stop:
        yield stop


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
        look: Callable[[], None],
    ) -> None:
        """Prepare to write, as the rank and the number of ranks in `place`.

        Two writes are `every_s` seconds apart, with many ranks more, and there are none with 0. `look` is called each
        time: it looks in the folder for what others ask of this rank.
        """
        self._directory, (self._rank, self._world_size) = directory, place
        self._activity, self._device_use, self._look = activity, device_use, look
        self._every_s = max(every_s, self._world_size / RANKS_PER_S) if every_s else 0.0
        self._path = directory.live / f"rank-{self._rank}.json"
        self._process, self._ended = psutil.Process(), threading.Event()
        self._thread = threading.Thread(target=self._run, name="presence", daemon=True)

    def __enter__(self) -> Self:
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
        while not self._ended.is_set():
            # A full disk or a slow share is no reason for a run to fail, nor to miss a request to stop.
            with suppress(OSError):
                write_atomically(self._path, json.dumps(self.status()))
            with suppress(OSError):
                self._look()
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
