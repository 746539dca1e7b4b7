"""The process of one logger: `python -m leaderless.observability.loggers.process NAME`, with its job on standard input.

It follows the folder of the run until the line `end` arrives, or until the run is gone, and then sends the rest.
"""

from __future__ import annotations

import fcntl
import json
import logging
import os
import signal
import sys
import threading
import time
import traceback
from collections.abc import Callable
from pathlib import Path

from typing_extensions import override

from leaderless.config.run import LoggerConfig
from leaderless.observability.hidden_values import without_secrets
from leaderless.observability.loggers.follower import Follower, SentJournal
from leaderless.observability.loggers.protocol import LoggedRun, Logger
from leaderless.observability.loggers.registry import find_logger
from leaderless.observability.run_directory import RunDirectory

POLL_S = 1.0
"""Time between looks at the folder of the run."""
LAST_ATTEMPTS, LAST_PAUSE_S = 4, 1.0
"""Number of attempts after the end of the run, and time between them."""
RETRY_S = (1.0, 2.0, 5.0, 10.0, 30.0)
"""Times between attempts; the last one repeats."""


class LoggerProcess:
    """Opens a logger, lets it follow a run, and retries failures."""

    def __init__(self, name: str, config: LoggerConfig, directory: RunDirectory, say: Callable[[str], None]) -> None:
        self._name, self._config, self._directory, self._say = name, config, directory, say
        self._over = threading.Event()
        self._failures = 0
        self._said: set[str] = set()
        self._follower: Follower | None = None
        self._logger: Logger | None = None

    def end(self) -> None:
        """Record, from another thread, that the run has ended."""
        self._over.set()

    def run(self) -> None:
        """Follow the run to its end; then send the rest, unless that fails repeatedly."""
        while not self._over.is_set():
            self._attempt(is_over=False)
            self._over.wait(RETRY_S[min(self._failures, len(RETRY_S)) - 1] if self._failures else POLL_S)
        for _ in range(LAST_ATTEMPTS):
            if self._attempt(is_over=True):
                return
            time.sleep(LAST_PAUSE_S)

    def _step(self, *, is_over: bool) -> None:
        if self._logger is None and self._directory.config.exists():  # else the run has not begun, or never did
            self._open()
        if self._follower is not None and self._logger is not None:
            self._follower.follow(is_over=is_over)
            if is_over:
                self._follower.finish(self._directory.path / "report.html")
                self._logger.close()

    def _open(self) -> None:
        import yaml

        config, sent = self._config, SentJournal(self._directory.loggers / f"{self._name}.jsonl")
        recipe = yaml.safe_load(self._directory.config.read_text(encoding="utf-8")) or {}
        run = LoggedRun(str(recipe.get("name", self._directory.path.name)), self._directory.path, recipe)
        logger = find_logger(config, "loggers")(**config.options)
        sent.begin(logger.open(run, sent.identity))
        if notice := getattr(logger, "notice", ""):
            self._say(notice)
        self._logger, self._follower = logger, Follower(run, logger, sent, config.tables_every_steps)

    def _attempt(self, *, is_over: bool) -> bool:
        """Send new data, and report the first failure of each kind; return whether there was none."""
        try:
            self._step(is_over=is_over)
        except Exception as error:  # noqa: BLE001 - the border to a tracker, which may raise anything; it is reported
            self._failures += 1
            self._report(f"{type(error).__name__}: {error}".splitlines()[0])
            return False
        self._failures = 0
        return True

    def _report(self, reason: str) -> None:
        kind, reason = reason[:60], without_secrets(reason)
        if kind in self._said:
            return
        self._said.add(kind)
        sys.stderr.write(without_secrets(traceback.format_exc()))
        sys.stderr.flush()  # the process ends without closing its files
        remedy = getattr(self._logger, "remedy", "") or _REMEDIES.get(self._config.type, "")
        log = self._directory.logs / f"logger-{self._name}.txt"
        self._say(
            f"logger '{self._name}' fails: {reason}. Training continues, and it is tried again{remedy}; details are in "
            f"{log}"
        )
        self._directory.append_event("logger", {"logger": self._name, "error": reason})


_REMEDIES = {
    "wandb": "; if the login is missing, run `wandb login`, set WANDB_API_KEY, or set the option `mode: offline`",
    "mlflow": "; see that its server runs, and that the option `uri` or MLFLOW_TRACKING_URI names it",
    "opentelemetry": "; see that the collector runs, that the option `endpoint` or OTEL_EXPORTER_OTLP_ENDPOINT names "
    "it, and that it takes metrics and traces, or set the option `signals`",
    "trackio": "; without the option `space`, it writes to ~/.cache/huggingface/trackio, or to TRACKIO_DIR",
}


class _WithoutSecrets(logging.Formatter):
    """Keeps secrets out of what the library of a tracker logs, such as the reply of a server."""

    @override
    def format(self, record: logging.LogRecord) -> str:
        return without_secrets(super().format(record))


def main() -> None:
    """Follow the run that standard input names."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the run, which says when it has ended
    job = json.loads(sys.stdin.readline())
    sys.path[:] = job["path"]
    directory = RunDirectory(Path(job["directory"]))
    name = str(job["name"])
    shown = os.dup(2)
    directory.logs.mkdir(parents=True, exist_ok=True)
    with (directory.logs / f"logger-{name}.txt").open("a", encoding="utf-8") as log:
        os.dup2(log.fileno(), 1)
        os.dup2(log.fileno(), 2)

    warnings = logging.StreamHandler()
    warnings.setFormatter(_WithoutSecrets("%(levelname)s %(name)s: %(message)s"))
    logging.basicConfig(handlers=[warnings])

    def say(text: str) -> None:
        os.write(shown, f"{text}\n".encode(errors="replace"))

    process = LoggerProcess(name, LoggerConfig(**job["config"]), directory, say)

    def wait_for_end() -> None:
        sys.stdin.readline()  # the line `end`, or nothing when the run was killed
        process.end()

    threading.Thread(target=wait_for_end, daemon=True).start()
    directory.loggers.mkdir(parents=True, exist_ok=True)
    with (directory.loggers / f".{name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)  # the logger of an earlier start may still be sending
        process.run()
    os._exit(0)  # a tracker may have threads that wait for a server, and the run waits for this process


if __name__ == "__main__":
    main()
