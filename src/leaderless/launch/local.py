"""Starts the workers of one machine with torch elastic."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

import psutil

from leaderless.worker.failure import FOLDER_VARIABLE, Failure, first_failure
from leaderless.worker.join import STORE_VARIABLE


class WorkersFailed(RuntimeError):  # noqa: N818
    """A run ended because a worker failed.

    Attributes:
        failure: The first one; None when the worker was killed before it could say why.
    """

    def __init__(self, message: str, failure: Failure | None) -> None:
        super().__init__(message)
        self.failure = failure


def launch_workers(arguments: Sequence[str], num_workers: int, logs: Path) -> None:
    """Run `leaderless ARGUMENTS` in several processes, and wait for them.

    They meet through a file and talk over the loopback interface; nothing listens to the network. The first worker's
    output goes to the terminal, that of the others into `logs`.

    Args:
        arguments: Of the command line.
        num_workers: On this machine.
        logs: A folder.

    Raises:
        WorkersFailed: One of them failed; the others have been ended.
    """
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig, elastic_launch

    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
        failures = Path(folder) / "failures"
        failures.mkdir()
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_workers,
            run_id=Path(folder).name,
            rdzv_backend="c10d",
            rdzv_endpoint=f"{folder}/rendezvous",
            rdzv_configs={"store_type": "file", "timeout": 60},
            max_restarts=0,
            local_addr="127.0.0.1",
            signals_to_handle="SIGTERM,SIGHUP,SIGQUIT",
            logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, num_workers), Std.ALL)),
        )
        environment = {
            FOLDER_VARIABLE: str(failures),
            STORE_VARIABLE: f"{folder}/store",
            "GLOO_SOCKET_IFNAME": "lo",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // num_workers))),
        }
        with _environment(environment), _interrupts_forwarded():
            try:
                elastic_launch(config, sys.executable)("-m", "leaderless", *arguments)
            except ChildFailedError as error:
                failure = first_failure(failures)
                raise WorkersFailed(_describe(error, failure, logs), failure) from None


def _describe(error: Exception, failure: Failure | None, logs: Path) -> str:
    if failure is not None:
        return f"rank {failure.rank} failed: {failure.message}"
    reason = str(error).strip().splitlines()[-1] if str(error).strip() else type(error).__name__
    return f"a worker ended without saying why ({reason}); its output is in {logs}"


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _environment(variables: dict[str, str]) -> Iterator[None]:
    """Set variables for the processes that are started inside."""
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            if value is None:
                del os.environ[name]
            else:
                os.environ[name] = value


@contextmanager
def _interrupts_forwarded() -> Iterator[None]:
    """Pass Ctrl-C on to the workers, which run in sessions of their own and finish their step first."""

    def forward(signum: int, frame: FrameType | None) -> None:  # noqa: ARG001
        for child in psutil.Process().children():
            child.send_signal(signum)

    before = signal.signal(signal.SIGINT, forward)
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
