"""Starts the workers of one machine with torch elastic."""

from __future__ import annotations

import logging
import os
import signal
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import replace
from pathlib import Path
from types import FrameType

import psutil

from leaderless.worker.failure import FOLDER_VARIABLE, STEPS_BEGUN, Failure, WorkersFailed, first_failure
from leaderless.worker.join import STORE_VARIABLE
from leaderless.worker.stop import Interrupted, Presses


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
        Interrupted: A signal stopped them.
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
            signals_to_handle="SIGQUIT",
            logs_specs=DefaultLogsSpecs(log_dir=str(logs), redirects=dict.fromkeys(range(1, num_workers), Std.ALL)),
        )
        environment = {
            FOLDER_VARIABLE: str(failures),
            STORE_VARIABLE: f"{folder}/store",
            "GLOO_SOCKET_IFNAME": "lo",
            # Else the agent opens a store that listens on every interface, though workers meet through a file.
            "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
            "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // num_workers))),
        }
        with _environment(environment), _signals_forwarded(failures / STEPS_BEGUN) as presses:
            try:
                elastic_launch(config, sys.executable)("-m", "leaderless", *arguments)
            except ChildFailedError as error:
                failure = first_failure(failures)
                if presses.first is None or (failure is not None and failure.kind not in {"interrupt", "lost_peers"}):
                    codes = {rank: lost.exitcode for rank, lost in error.failures.items()}
                    raise WorkersFailed(_first_cause(codes, failure, logs)) from None
            if presses.first is not None:
                raise Interrupted(presses.first)


def _first_cause(codes: Mapping[int, int], failure: Failure | None, logs: Path) -> Failure:
    """Why workers failed: what one of them wrote down, or how it ended.

    Args:
        codes: Exit codes by rank of those that ended first; negative where a signal ended it.
        failure: The first that was written down.
        logs: Where their output is.
    """
    if failure is not None and failure.kind == "recipe":
        return failure
    killed = next((rank for rank, code in codes.items() if code < 0), None)
    if killed is not None and (failure is None or failure.kind == "lost_peers"):
        name = signal.Signals(-codes[killed]).name
        hint = ", as the system does when memory runs out" if name == "SIGKILL" else ""
        message = f"rank {killed} was ended by {name}{hint}"
    elif failure is not None:
        return replace(failure, message=f"rank {failure.rank} failed: {failure.message}")
    else:
        message = ", ".join(f"rank {rank} ended with exit code {code}" for rank, code in codes.items())
    message += f"; the output of all ranks but the first is in {logs}"
    return Failure(rank=killed or 0, time_ns=time.time_ns(), kind="lost_peers", message=message, trace="")


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
def _signals_forwarded(steps_begun: Path) -> Iterator[Presses]:
    """Pass what asks to stop on to the workers, which run in sessions of their own and finish their step first.

    SIGTERM reaches them as Ctrl-C does: from torch elastic it means that others have failed. Before the first step
    there is nothing to finish, and SIGTERM ends them without the traceback that Ctrl-C would cause while they start.

    Args:
        steps_begun: A file that is there when workers would finish their step.

    Yields:
        What has been pressed.
    """
    presses = Presses()

    def forward(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
        is_first = presses.first is None
        if not presses.add(number) and not is_first:
            return
        workers = psutil.Process().children()
        if not workers:
            raise KeyboardInterrupt
        for worker in workers:
            with suppress(psutil.NoSuchProcess):
                worker.send_signal(signal.SIGINT if steps_begun.exists() else signal.SIGTERM)

    before = {number: signal.signal(number, forward) for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)}
    try:
        yield presses
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
