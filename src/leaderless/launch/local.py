"""Starts the workers of one machine, and starts them again when one has failed. Imports no torch on one machine."""

from __future__ import annotations

import os
import subprocess
import sys
import tempfile
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

from leaderless.launch.agent import Agent, Workers
from leaderless.launch.meeting import ManyMachines, OneMachine, Seats
from leaderless.launch.nodes import Nodes
from leaderless.launch.restarts import Restarts
from leaderless.supervision.failure import FOLDER_VARIABLE
from leaderless.supervision.stop import LAUNCHER_VARIABLE


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        module: Module that each worker runs, with the name of a file as its argument.
        job: Text of that file.
        num_workers: Number of workers on this machine.
        logs: Folder for the output of all workers of this machine but the first, which writes to the terminal.
        grace_s: Time for workers to finish their step when they are asked to stop.
        name: Name of the run, the same on all machines.
        nodes: Machines that train together; None for this one alone.
    """

    module: str
    job: str
    num_workers: int
    logs: Path
    grace_s: float
    name: str
    nodes: Nodes | None = None


def launch_workers(launch: Launch, restarts: Restarts) -> None:
    """Run a module in several processes, and wait for them.

    Args:
        launch: What is to be started.
        restarts: Rules for what follows a failure.

    Raises:
        WorkersFailed: One of them failed, and the others have been ended; or the machines do not come together.
        Interrupted: A signal stopped them.
    """
    launch.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
        job = Path(folder) / "job.json"
        job.write_text(launch.job, encoding="utf-8")
        nodes, number = launch.nodes, launch.num_workers
        meeting = ManyMachines(nodes, launch.name, number) if nodes is not None else OneMachine(number)
        Agent(
            lambda start, seats: _start(launch, job, start, seats), meeting, Path(folder), launch.grace_s, restarts
        ).run()


def _start(launch: Launch, job: Path, folder: Path, seats: Seats) -> Workers:
    """Start the workers of this machine, in sessions of their own."""
    workers: dict[int, subprocess.Popen[bytes]] = {}
    command = [sys.executable, "-m", launch.module, str(job)]
    for local_rank in range(launch.num_workers):
        rank = seats.first_rank + local_rank
        ranks = {
            "RANK": str(rank),
            "WORLD_SIZE": str(seats.world_size),
            "LOCAL_RANK": str(local_rank),
            "LOCAL_WORLD_SIZE": str(launch.num_workers),
        }
        environment = os.environ | _variables(launch, folder) | dict(seats.variables) | ranks
        with ExitStack() as stack:
            log = stack.enter_context((launch.logs / f"rank-{rank}.log").open("ab")) if local_rank else None
            workers[rank] = subprocess.Popen(  # noqa: S603 - this package itself
                command, env=environment, stdout=log, stderr=log, start_new_session=True
            )
    return workers


def _variables(launch: Launch, folder: Path) -> dict[str, str]:
    """The environment that all workers of this machine have in common."""
    # What a killed worker has left in shared memory is cleared up; that it is need not be said.
    hushed = "ignore::UserWarning:multiprocessing.resource_tracker"
    num_cores = len(os.sched_getaffinity(0))
    return {
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), hushed])),
        LAUNCHER_VARIABLE: str(os.getpid()),
        FOLDER_VARIABLE: str(folder),
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, num_cores // launch.num_workers))),
    }
