"""Starts the processes of a run's loggers, and ends them with the run. Imports no tracker."""

from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import IO

from leaderless.config.run import LoggerConfig
from leaderless.observability.loggers.registry import names_of

GRACE_S = 2.0
"""Time for a logger to notice that its own time is over."""


@contextmanager
def loggers_running(
    configs: Sequence[LoggerConfig], directory: Path, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Let loggers follow a run while the context lasts; one that hangs is ended. Nothing here raises.

    Args:
        configs: Loggers of the recipe.
        directory: Folder of the run.
        say: Function that shows a line to the user.

    Yields:
        Function that ends them, when all files of the run are complete; the end of the context calls it too.
    """
    running: list[tuple[str, LoggerConfig, subprocess.Popen[bytes]]] = []
    for name, config in zip(names_of(configs), configs, strict=True):
        try:
            running.append((name, config, _start(name, config, directory)))
        except OSError as error:
            say(f"logger '{name}' cannot be started: {error}; training continues without it")

    def end() -> None:
        for _, _, process in running:
            with suppress(OSError):  # it has ended
                # An explicit line, as a process forked in the meantime may keep the pipe open.
                _stdin(process).write(b"end\n")
                _stdin(process).close()
        began = time.monotonic()
        for name, config, process in running:
            try:
                process.wait(max(0.0, began + config.finish_s + GRACE_S - time.monotonic()))
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
                say(
                    f"logger '{name}' did not finish in finish_s={config.finish_s:g} s and was ended; what it has not "
                    f"sent is in {directory}: `leaderless log {directory}` sends it, or raise finish_s"
                )
        running.clear()

    try:
        yield end
    finally:
        end()


def _start(name: str, config: LoggerConfig, directory: Path) -> subprocess.Popen[bytes]:
    process = subprocess.Popen(  # noqa: S603 - our own module
        [sys.executable, "-m", "leaderless.observability.loggers.process", name],
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        start_new_session=True,  # signals of a terminal are for the run
    )
    job = {"name": name, "directory": str(directory.resolve()), "config": config.model_dump(mode="json")}
    pipe = _stdin(process)
    pipe.write(json.dumps(job | {"path": sys.path}).encode() + b"\n")
    pipe.flush()
    return process


def _stdin(process: subprocess.Popen[bytes]) -> IO[bytes]:
    assert process.stdin is not None
    return process.stdin
