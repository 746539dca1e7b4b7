"""Starts the workers of one machine with torch elastic, and starts them again when one has failed."""

from __future__ import annotations

import ctypes
import logging
import os
import sys
import tempfile
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from torch.distributed.elastic.agent.server.api import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.elastic.rendezvous import (
    RendezvousClosedError,
    RendezvousConnectionError,
    RendezvousHandler,
    RendezvousParameters,
    RendezvousTimeoutError,
)
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler

from leaderless.launch.agent import MANY_RESTARTS, Agent
from leaderless.launch.nodes import Nodes
from leaderless.launch.restarts import Restarts
from leaderless.supervision.failure import FOLDER_VARIABLE, Failure, WorkersFailed
from leaderless.supervision.stop import LAUNCHER_VARIABLE, Interrupted
from leaderless.worker.place import STORE_VARIABLE

KEEP_ALIVE_S = 2
LOST_AFTER = 3
"""Signs of life that a machine may miss before the others go on without it."""
LAST_CALL_S = 5
"""How long machines wait for more of them, once there are enough; one that comes later joins all the same."""
JOIN_S = 600
"""How long they wait until there are enough."""
_PR_SET_CHILD_SUBREAPER = 36


@dataclass(frozen=True)
class Launch:
    """What is to be started.

    Attributes:
        module: Module that each worker runs, with the name of a file as its argument.
        job: Text of that file.
        num_workers: On this machine.
        logs: A folder; the first worker's output goes to the terminal, that of the others there.
        grace_s: Time for workers to finish their step when they are asked to stop.
        name: Of the run; the same on all machines.
        nodes: The machines, if there may be several.
    """

    module: str
    job: str
    num_workers: int
    logs: Path
    grace_s: float
    name: str
    nodes: Nodes | None = None


def launch_workers(launch: Launch, restarts: Restarts) -> None:
    """Run a command in several processes, and wait for them.

    On one machine they meet through a file and talk over the loopback interface; nothing listens to the network.

    Args:
        launch: What is to be started.
        restarts: Says whether it is started again after a failure.

    Raises:
        WorkersFailed: One of them failed, and the others have been ended; or the machines do not come together.
        Interrupted: A signal stopped them.
    """
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    launch.logs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="leaderless-") as name, _environment(_variables(launch)), _reaping():
        folder, nodes = Path(name), launch.nodes
        job = folder / "job.json"
        job.write_text(launch.job, encoding="utf-8")
        with _explained(nodes):
            meeting = _meet(launch, folder)
            agent = Agent(
                _spec(launch, meeting, job),
                DefaultLogsSpecs(str(launch.logs), redirects=dict.fromkeys(range(1, launch.num_workers), Std.ALL)),
                folder,
                launch.grace_s,
                restarts,
                has_store_file=nodes is None,
            )
            is_leaving = False
            try:
                with agent.signals_forwarded():
                    result = agent.run()
            except Interrupted:
                is_leaving = nodes is not None
                raise
            finally:
                agent.end_orphans()
                if not is_leaving:  # machines that stay still need it
                    meeting.shutdown()
        if restarts.failure is not None:
            raise WorkersFailed(restarts.failure)
        if result is None or result.is_failed():
            assert agent.presses.first is not None, "all other failures are told"
            raise Interrupted(agent.presses.first)


def _meet(launch: Launch, folder: Path) -> RendezvousHandler:
    """Where this machine meets the others; alone, at a file."""
    nodes = launch.nodes
    if nodes is None:
        parameters = RendezvousParameters(
            "c10d", f"{folder}/rendezvous", folder.name, 1, 1, local_addr="127.0.0.1", store_type="file"
        )
    else:
        parameters = RendezvousParameters(
            "c10d",
            nodes.rendezvous,
            launch.name,
            nodes.smallest,
            nodes.largest,
            local_addr="127.0.0.1" if nodes.is_loopback else None,
            keep_alive_interval=KEEP_ALIVE_S,
            keep_alive_max_attempt=LOST_AFTER,
            last_call_timeout=LAST_CALL_S,
            join_timeout=JOIN_S,
        )
    return get_rendezvous_handler(parameters)


def _spec(launch: Launch, meeting: RendezvousHandler, job: Path) -> WorkerSpec:
    return WorkerSpec(
        role="worker",
        local_world_size=launch.num_workers,
        rdzv_handler=meeting,
        entrypoint=sys.executable,
        args=("-m", launch.module, str(job)),
        max_restarts=MANY_RESTARTS,
        local_addr="127.0.0.1" if launch.nodes is None or launch.nodes.is_loopback else None,
    )


def _variables(launch: Launch) -> dict[str, str | None]:
    """The environment of workers; those that the agent sets are restored as well."""
    is_loopback = launch.nodes is None or launch.nodes.is_loopback
    # What a killed worker has left in shared memory is cleared up; that it is need not be said.
    hushed = "ignore::UserWarning:multiprocessing.resource_tracker"
    return {
        "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), hushed])),
        LAUNCHER_VARIABLE: str(os.getpid()),
        FOLDER_VARIABLE: None,
        STORE_VARIABLE: None,
        # Workers meet at a file, or at a store that is new after each restart; the agent need not open one.
        "TORCH_DISABLE_SHARE_RDZV_TCP_STORE": "1",
        "TORCHELASTIC_SIGNALS_TO_HANDLE": "SIGQUIT",
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", str(max(1, _cores() // launch.num_workers))),
        **({"GLOO_SOCKET_IFNAME": "lo"} if is_loopback else {}),
    }


def _cores() -> int:
    return len(os.sched_getaffinity(0))


@contextmanager
def _environment(variables: dict[str, str | None]) -> Iterator[None]:
    """Set variables for the processes that are started inside, and unset those that are None."""
    before = {name: os.environ.get(name) for name in variables}
    _set(variables)
    try:
        yield
    finally:
        _set(before)


def _set(variables: dict[str, str | None]) -> None:
    for name, value in variables.items():
        if value is None:
            os.environ.pop(name, None)
        else:
            os.environ[name] = value


@contextmanager
def _reaping() -> Iterator[None]:
    """Become the parent of processes whose parent, a worker or one of its helpers, has ended without them."""
    is_linux = sys.platform == "linux"
    if is_linux:
        ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 1)
    try:
        yield
    finally:
        if is_linux:
            ctypes.CDLL(None).prctl(_PR_SET_CHILD_SUBREAPER, 0)


@contextmanager
def _explained(nodes: Nodes | None) -> Iterator[None]:
    """Say what it means when machines do not meet."""
    try:
        yield
    except RendezvousClosedError:
        message = "another machine has ended the run; its terminal says why"
    except RendezvousTimeoutError:
        message = (
            f"fewer than {nodes.smallest if nodes else 1} machines have come together within {JOIN_S} s: give the same "
            "--nodes, --rendezvous and run name on all of them, or lower the first number of --nodes"
        )
    except RendezvousConnectionError:
        message = (
            f"the store at {nodes.rendezvous if nodes else 'the file of this machine'} cannot be reached: the machine "
            "that holds it is lost, or does not let others connect"
        )
    else:
        return
    raise WorkersFailed(Failure(0, time.time_ns(), "lost_peers", message, trace=""))
