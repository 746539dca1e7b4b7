"""Prometheus: a page of the newest numbers of a run, which a Prometheus server reads at its own times."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any
from wsgiref.simple_server import WSGIServer

from prometheus_client import CollectorRegistry, make_wsgi_app, start_http_server
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, InfoMetricFamily
from typing_extensions import override

from leaderless.base.versions import VERSION
from leaderless.observability.loggers.follower import log_of, numbers_of
from leaderless.observability.loggers.protocol import LoggedRun, Logger, Numbers
from leaderless.observability.loggers.running_values import RunningValue, RunningValues, run_labels, words_of
from leaderless.observability.run_directory import RunDirectory, read_lines, write_atomically

if TYPE_CHECKING:
    from wsgiref.types import StartResponse

    from prometheus_client import Metric

TARGETS = "prometheus.json"
"""File in the folder `loggers` of a run, from which Prometheus learns the address; gone when the run has ended."""
MAX_PORT = 65535
READS_WITHIN_S = 10.0
"""Time after which a reader that does not say its own is taken to have given up: Prometheus's default."""


class PrometheusLogger(Logger):
    """Serves the newest numbers of a run at `/metrics`, while the run lasts.

    Args:
        host: Address to listen at. The default can be reached from this machine alone; `0.0.0.0` from all others, too.
        port: Port; 0 picks a free one.
        linger_s: Longest time to wait at the end for Prometheus to read the last numbers, if it has read any.
    """

    _server: WSGIServer

    def __init__(self, host: str = "127.0.0.1", port: int = 9464, linger_s: float = 30.0) -> None:
        if not 0 <= port <= MAX_PORT:
            raise ValueError(f"option port={port} of the logger prometheus must be from 0 to {MAX_PORT}")
        self._host, self._port, self._linger_s = host, port, linger_s
        self._lock, self._read = threading.Lock(), threading.Event()
        self._values, self._times = RunningValues(), dict[str, float]()
        self._writes, self._was_read = 0, False
        self._run = LoggedRun("", Path(), {})
        self.notice = ""

    @override
    def open(self, run: LoggedRun, identity: str) -> str:
        """Begin to serve, with the numbers that an earlier start has seen."""
        self._run = run
        if identity:
            self._recall()
        registry = CollectorRegistry()
        registry.register(self)
        try:
            self._server, _ = start_http_server(self._port, self._host, registry)
        except OSError as error:
            raise OSError(
                f"{self._host}:{self._port} cannot be listened at ({error.strerror}): set the option `port` to a free "
                "port, or to 0, which picks one"
            ) from error
        port = self._server.server_port
        host = socket.gethostname() if self._host in {"", "0.0.0.0", "::"} else self._host  # noqa: S104 - compared
        self._server.set_app(partial(self._answer, make_wsgi_app(registry)))
        target = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        self.notice = f"metrics for Prometheus are at http://{target}/metrics"
        # With the run as its instance, a run that continues has the same series, whatever port is picked.
        found = {"targets": [target], "labels": {"instance": run.name}}
        write_atomically(self._targets, json.dumps([found]) + "\n")
        return "prometheus"

    @override
    def rewind(self, log: str, step: int) -> bool:
        """Serve the new numbers of repeated steps, which replace the earlier ones."""
        return True

    @override
    def write(self, numbers: Sequence[Numbers]) -> None:
        with self._lock:
            for one in numbers:
                self._values.add(one)
                self._note_time(one.log)
            self._writes += 1
            self._read.clear()

    @override
    def close(self) -> None:
        if self._was_read:
            self._read.wait(self._linger_s)
        self._targets.unlink(missing_ok=True)
        self._server.shutdown()
        self._server.server_close()

    def collect(self) -> Iterator[Metric]:
        """The families of all values, each with its help text; called when the page is read."""
        with self._lock:
            values, times = list(self._values), dict(self._times)
        run = self._run.name
        facts = {"run": run, "version": VERSION, **run_labels(self._run.recipe, self._run.tags)}
        yield InfoMetricFamily("leaderless_run", "Run that is served here.", facts)
        families: dict[tuple[str, bool], list[RunningValue]] = {}
        for value in values:
            name = "_".join(["leaderless", *words_of(value.name)])
            families.setdefault((name, value.is_total), []).append(value)
        for (name, _), members in families.items():
            yield _family(name, run, members)
        written = GaugeMetricFamily(
            "leaderless_last_step_timestamp_seconds", "Time of the last step, since 1970.", labels=["run", "log"]
        )
        for log, at in times.items():
            written.add_metric([run, log], at)
        yield written

    @property
    def _targets(self) -> Path:
        return RunDirectory(self._run.directory).loggers / TARGETS

    def _answer(self, page: Callable[..., list[bytes]], request: dict[str, Any], begin: StartResponse) -> _Answer:
        """Answer with the page, and note when it has been read: sent as a whole before the reader has given up."""
        began, writes = time.monotonic(), self._writes
        within_s = float(request.get("HTTP_X_PROMETHEUS_SCRAPE_TIMEOUT_SECONDS", READS_WITHIN_S))

        def note() -> None:
            with self._lock:
                if time.monotonic() - began < within_s / 2:  # the rest is for the way, and for the reader's own work
                    self._was_read = True
                    if writes == self._writes:
                        self._read.set()

        return _Answer(page(request, begin), note)

    def _recall(self) -> None:
        """Take the newest numbers from the files of the run; totals begin at 0, as counters of a new process do."""
        for path in sorted(self._run.directory.glob("metrics*.jsonl")):
            log = log_of(path)
            for record in read_lines(path, "step"):
                self._values.add(numbers_of(log, int(str(record["step"])), record))
            self._note_time(log)
        self._values.forget_totals()

    def _note_time(self, log: str) -> None:
        path = RunDirectory(self._run.directory).metrics_of(log)
        self._times[log] = path.stat().st_mtime if path.exists() else time.time()


class _Answer:
    """Pieces of an answer, and what is called when the last has been sent."""

    def __init__(self, pieces: list[bytes], sent: Callable[[], None]) -> None:
        self._pieces, self._sent = pieces, sent

    def __len__(self) -> int:
        return len(self._pieces)  # with one piece, the server states the length of the answer

    def __iter__(self) -> Iterator[bytes]:
        yield from self._pieces
        self._sent()


def _family(name: str, run: str, members: Sequence[RunningValue]) -> Metric:
    """Values of one name for Prometheus; the label `metric` has the run's own name, as two may become the same here."""
    kind = CounterMetricFamily if members[0].is_total else GaugeMetricFamily
    labels = list(dict.fromkeys(label for one in members for label, _ in one.labels))
    family = kind(name, members[0].meaning, labels=["run", "metric", *labels])
    for one in members:
        known = dict(one.labels)
        family.add_metric([run, one.name, *(known.get(label, "") for label in labels)], one.value)
    return family
