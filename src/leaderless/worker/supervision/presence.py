"""A thread in each worker that writes its rank's activity to the run's folder, and checks for requests to stop."""

from __future__ import annotations

import json
import os
import socket
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import suppress
from typing import Self

import psutil

from leaderless.base.devices import DeviceUse
from leaderless.base.values import Json
from leaderless.distributed.activity import Activity
from leaderless.observability.run_directory import RunDirectory, write_atomically

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
