"""A Chrome trace of what a rank did when, to be opened in Perfetto or chrome://tracing."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial
from pathlib import Path
from threading import Lock
from typing import TextIO

MayFail = Callable[[Path], AbstractContextManager[object]]


class Tracer:
    """Times spans and, if it has a path, writes them to a file until it is closed.

    What an earlier start of the run wrote to the file is kept. All writing happens in the context `may_fail`.
    """

    def __init__(self, path: Path | None, rank: int, may_fail: MayFail = nullcontext) -> None:
        self.rank = rank
        self.seconds: dict[str, float] = {}
        self._lock = Lock()
        self._file: TextIO | None = None
        if path is not None:
            self._may_fail = partial(may_fail, path)
            with self._may_fail():
                path.parent.mkdir(parents=True, exist_ok=True)
                before = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
                # The format allows the closing bracket to be missing, so a trace is readable however the run ends.
                self._file = path.open("w", encoding="utf-8")
                self._file.write("[\n" + "".join(f"{line}\n" for line in before if line.endswith("},")))

    @contextmanager
    def span(self, name: str, step: int, lane: int = 0) -> Iterator[dict[str, object]]:
        """Time a node or another part of a step; facts that are put into what it yields go into the trace.

        Several threads may do so at once, each in its own lane, a row of the picture; the main thread has lane 0.
        """
        facts: dict[str, object] = {"step": step}
        wall_us = time.time_ns() / 1000
        begin = time.perf_counter()
        try:
            yield facts
        finally:
            seconds = time.perf_counter() - begin
            event = {"name": name, "ph": "X", "ts": wall_us, "dur": seconds * 1e6, "pid": self.rank, "tid": lane}
            with self._lock:
                self.seconds[name] = self.seconds.get(name, 0.0) + seconds
                if self._file is not None:
                    with self._may_fail():
                        self._file.write(json.dumps({**event, "args": facts}) + ",\n")

    def take(self, name: str) -> float:
        """Seconds of one name since the last call."""
        with self._lock:
            return self.seconds.pop(name, 0.0)

    def take_seconds(self) -> dict[str, float]:
        """Seconds by name since the last call."""
        with self._lock:
            seconds, self.seconds = self.seconds, {}
            if self._file is not None:
                with self._may_fail():
                    self._file.flush()  # a process that is killed in a later step leaves this one behind
        return seconds

    def close(self) -> None:
        """End the trace; spans are still timed, but not written."""
        if self._file is not None:
            name = {"name": "process_name", "ph": "M", "pid": self.rank, "args": {"name": f"rank {self.rank}"}}
            file, self._file = self._file, None
            with self._may_fail(), file:
                file.write(json.dumps(name) + "\n]\n")
