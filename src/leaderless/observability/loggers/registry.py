"""Loggers by name, and their processes, which end with the run. Imports no tracker."""

from __future__ import annotations

import inspect
import json
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from importlib.util import find_spec
from pathlib import Path
from typing import IO, cast

from leaderless.base.named_functions import is_function_name, load_callable
from leaderless.config import Problem, RecipeError, nearest
from leaderless.config.packaged_files import how_to_install
from leaderless.config.run import LoggerConfig
from leaderless.observability.loggers.protocol import Logger

BUILT_IN: Mapping[str, str] = {
    "tensorboard": "leaderless.observability.loggers.tensorboard_logger:TensorBoardLogger",
    "wandb": "leaderless.observability.loggers.wandb_logger:WandbLogger",
    "mlflow": "leaderless.observability.loggers.mlflow_logger:MlflowLogger",
    "trackio": "leaderless.observability.loggers.trackio_logger:TrackioLogger",
    "prometheus": "leaderless.observability.loggers.prometheus_logger:PrometheusLogger",
    "opentelemetry": "leaderless.observability.loggers.opentelemetry_logger:OpenTelemetryLogger",
}
"""Loggers that come with the package, each as `module:Class` and with an extra of its name."""
_PACKAGES: Mapping[str, tuple[str, ...]] = {
    "prometheus": ("prometheus_client",),
    "opentelemetry": ("opentelemetry.sdk", "opentelemetry.exporter.otlp.proto.http"),
}
"""Packages of loggers, where they have other names."""
_METHODS = ("open", "rewind", "write", "write_table", "write_file", "close")


def names_of(configs: Sequence[LoggerConfig]) -> list[str]:
    """A name for each logger of a recipe, used in file names: its type, with a number if the type repeats."""
    names: list[str] = []
    for config in configs:
        name = config.type.rpartition(":")[2].lower()
        times = sum(name == known.partition("-")[0] for known in names)
        names.append(f"{name}-{times + 1}" if times else name)
    return names


def find_logger(config: LoggerConfig, key: str) -> Callable[..., Logger]:
    """The class of a logger that a recipe names.

    Raises:
        RecipeError: There is no such logger, its package is missing, or its constructor refuses the options.
    """
    name = config.type
    if name not in BUILT_IN and not is_function_name(name):
        hint = nearest(name, BUILT_IN)
        raise RecipeError.at(f"{key}.type", f"unknown logger '{name}'{hint}; a custom one is 'package.module:Class'")
    if name in BUILT_IN and not all(map(_is_there, _PACKAGES.get(name, (name,)))):
        raise RecipeError.at(f"{key}.type", f"logger '{name}' needs its package: {how_to_install(name)}")
    found = load_callable(BUILT_IN.get(name, name), f"{key}.type", "class")
    missing = [method for method in _METHODS if not callable(getattr(found, method, None))]
    if not isinstance(found, type) or missing:
        what = f"must have the methods {', '.join(missing)}" if isinstance(found, type) else "must be a class"
        raise RecipeError.at(f"{key}.type", f"'{name}' {what}; see leaderless.observability.loggers.protocol.Logger")
    try:
        signature = inspect.signature(found).replace(return_annotation=inspect.Signature.empty)
        signature.bind(**config.options)
    except TypeError as error:
        reason = f"{found.__name__}{signature} does not take them: {error}"
        raise RecipeError.at(f"{key}.options", reason) from error
    return cast("Callable[..., Logger]", found)


def _is_there(package: str) -> bool:
    try:
        return find_spec(package) is not None
    except ModuleNotFoundError:  # a package around it is missing
        return False


def check_loggers(configs: Sequence[LoggerConfig]) -> None:
    """Refuse loggers that cannot be made; all problems are named together in a RecipeError."""
    problems: list[Problem] = []
    for index, config in enumerate(configs):
        try:
            find_logger(config, f"loggers.{index}")
        except RecipeError as error:
            problems += error.problems
    if problems:
        raise RecipeError(problems)


GRACE_S = 2.0
"""Time for a logger to notice that its own time is over."""
MAX_RESTARTS = 3
"""Number of times that the process of a logger is started again in a run."""


class _Following:
    """The process of a logger, which is started again when it is killed: it sends what it has not sent yet."""

    def __init__(self, name: str, config: LoggerConfig, directory: Path, say: Callable[[str], None]) -> None:
        self._name, self._config, self._directory, self._say = name, config, directory, say
        self._lock, self._is_over = threading.Lock(), False
        self._process = _start(name, config, directory)
        threading.Thread(target=self._watch, name=f"logger {name}", daemon=True).start()

    def _watch(self) -> None:
        for number in range(MAX_RESTARTS + 1):
            code = self._process.wait()
            with self._lock:
                if self._is_over:
                    return
                what = f"logger '{self._name}' ended with exit code {code}"
                if number == MAX_RESTARTS:
                    self._say(f"{what}, as {number} times before: it is not started again, and training continues")
                    return
                self._say(f"{what}: it is started again, and nothing is lost")
                self._process = _start(self._name, self._config, self._directory)

    def end(self) -> None:
        """Let it send the rest."""
        with self._lock:
            self._is_over = True
        with suppress(OSError):  # it has ended
            # An explicit line, as a process forked in the meantime may keep the pipe open.
            _stdin(self._process).write(b"end\n")
            _stdin(self._process).close()

    def wait(self, began: float) -> None:
        """Wait until it has sent all, or until its time is over since a moment of the clock."""
        config = self._config
        try:
            if code := self._process.wait(max(0.0, began + config.finish_s + GRACE_S - time.monotonic())):
                self._say_unsent(f"ended with exit code {code}")
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()
            self._say_unsent(f"did not finish in finish_s={config.finish_s:g} s and was ended", "; or raise finish_s")

    def _say_unsent(self, what: str, remedy: str = "") -> None:
        self._say(
            f"logger '{self._name}' {what}; what it has not sent is in {self._directory}: `leaderless log "
            f"{self._directory}` sends it{remedy}"
        )


@contextmanager
def loggers_running(
    configs: Sequence[LoggerConfig], directory: Path, say: Callable[[str], None]
) -> Iterator[Callable[[], None]]:
    """Let loggers follow a run while the context lasts; one that hangs is ended. Nothing here raises.

    It yields a function that ends them, when all files of the run are complete; the end of the context calls it too.
    """
    running: list[_Following] = []
    for name, config in zip(names_of(configs), configs, strict=True):
        try:
            running.append(_Following(name, config, directory, say))
        except OSError as error:
            say(f"logger '{name}' cannot be started: {error}; training continues without it")

    def end() -> None:
        for one in running:
            one.end()
        began = time.monotonic()
        for one in running:
            one.wait(began)
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
