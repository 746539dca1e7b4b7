"""Starts, watches and restarts the workers of one machine. Imports no torch unless there are several machines.

Torch elastic's own agent knows neither why workers ended nor whether the run made progress, and could learn it only
through private methods. Only its rendezvous is used, through its public interface, for several machines.
"""

from __future__ import annotations

import math
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from leaderless.base.devices import threads_of_workers
from leaderless.base.leftover_processes import leftovers_ended
from leaderless.run.launch.rendezvous import ManyMachines, Nodes, RankSlots
from leaderless.run.launch.restarts import Restarts
from leaderless.worker.rank_info import STORE_VARIABLE
from leaderless.worker.supervision.failure import FAILED, FOLDER_VARIABLE, STEPS_BEGUN, STOPPED, WorkersFailed
from leaderless.worker.supervision.stop import (
    INTERRUPT_GRACE_S,
    LAUNCHER_VARIABLE,
    STOP_SIGNALS,
    Interrupted,
    Presses,
)

POLL_S = 0.1
OVERDUE_S = 5.0
"""Time after the grace period before workers that have not ended by themselves are killed."""
TERMINATE_S = 30.0
"""After SIGTERM, time for workers to end before they are killed."""


@dataclass(frozen=True)
class Launch:
    """Job for the workers of this machine."""

    module: str  # module that each worker runs, with the name of a file as its argument
    job: str  # text of that file
    num_workers: int  # number of workers on this machine
    logs: Path  # folder for the output of all workers of this machine but one, which writes to the terminal
    grace_s: float  # time for workers to finish their step when they are asked to stop
    name: str  # name of the run, the same on all machines
    nodes: Nodes | None = None  # machines that train together; None for this machine alone
    shown_rank: int = 0  # worker that writes to the terminal, if it is on this machine; else the first worker here does


class Agent:
    """Runs workers on this machine; each start has a new folder for their meeting and their failures."""

    def __init__(self, launch: Launch, restarts: Restarts) -> None:
        self._launch, self._restarts = launch, restarts
        self._machines: ManyMachines | None = None
        self._presses = Presses()
        self._overdue_at = math.inf
        self._workers: dict[int, subprocess.Popen[bytes]] = {}
        self._num_starts = 0

    def run(self) -> None:
        """Start and restart workers until they are done.

        Raises:
            WorkersFailed: A worker failed, and the rest were ended; or the machines did not meet.
            Interrupted: A signal stopped them.
        """
        launch, is_leaving = self._launch, False
        launch.logs.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory(prefix="leaderless-") as folder:
            self._folder = Path(folder)
            (self._folder / "job.json").write_text(launch.job, encoding="utf-8")
            if launch.nodes is not None:
                self._machines = ManyMachines(launch.nodes, launch.name, launch.num_workers)
            with self._signals_forwarded(), leftovers_ended() as end_leftovers:
                try:
                    while self._run_once():
                        end_leftovers()
                except Interrupted:
                    is_leaving = True
                    raise
                finally:
                    self._end()
                    if self._machines is not None and not is_leaving:  # machines that stay still need it
                        self._machines.close()

    @property
    def _round(self) -> Path:
        return self._folder / str(self._num_starts)

    def _run_once(self) -> bool:
        """One start; returns whether another must follow."""
        self._num_starts += 1
        self._round.mkdir()
        self._start()
        has_begun = False
        while True:
            time.sleep(POLL_S)
            if not has_begun and (self._round / STEPS_BEGUN).exists():
                has_begun = True
                self._restarts.begun()
            if time.monotonic() > self._overdue_at:
                self._signal(signal.SIGKILL)
            codes = {rank: worker.poll() for rank, worker in self._workers.items()}
            failed = {rank: code for rank, code in codes.items() if code}
            if failed:
                return self._have_failed(failed)
            if None not in codes.values():
                return self._have_ended()
            if self._machines is not None and self._machines.is_awaited():
                self._make_room(has_begun=has_begun)
                return True

    def _start(self) -> None:
        """Start the workers of this machine, in sessions of their own."""
        launch = self._launch
        # The workers of one machine meet at a file, and nothing listens to the network.
        alone = {STORE_VARIABLE: str(self._round / "store"), "GLOO_SOCKET_IFNAME": "lo"}
        seats = self._machines.next() if self._machines is not None else RankSlots(0, launch.num_workers, alone)
        # Python warns of shared memory that a killed worker has left behind, though it is cleared up.
        hushed = "ignore::UserWarning:multiprocessing.resource_tracker"
        environment = {
            **os.environ,
            **threads_of_workers(launch.num_workers),
            **seats.variables,
            "PYTHONWARNINGS": ",".join(filter(None, [os.environ.get("PYTHONWARNINGS"), hushed])),
            LAUNCHER_VARIABLE: str(os.getpid()),
            FOLDER_VARIABLE: str(self._round),
            "WORLD_SIZE": str(seats.world_size),
            "LOCAL_WORLD_SIZE": str(launch.num_workers),
        }
        command = [sys.executable, "-m", launch.module, str(self._folder / "job.json")]
        self._workers = {}
        here = range(seats.first_rank, seats.first_rank + launch.num_workers)
        shown = launch.shown_rank if launch.shown_rank in here else here[0]
        for local_rank, rank in enumerate(here):
            ranks = {"RANK": str(rank), "LOCAL_RANK": str(local_rank)}
            with (launch.logs / f"rank-{rank}.log").open("ab") if rank != shown else nullcontext() as log:
                self._workers[rank] = subprocess.Popen(  # noqa: S603 - this package itself
                    command, env=environment | ranks, stdout=log, stderr=log, start_new_session=True
                )

    def _have_failed(self, codes: Mapping[int, int]) -> bool:
        (self._round / FAILED).touch()
        self._end()
        if self._restarts.failed(codes, self._round, is_stopping=self._presses.first is not None):
            return True
        if self._restarts.failure is not None:
            raise WorkersFailed(self._restarts.failure)
        assert self._presses.first is not None, "all other failures are reported"
        raise Interrupted(self._presses.first)

    def _have_ended(self) -> bool:
        if not (self._round / STOPPED).exists():
            if self._machines is not None:
                self._machines.finish()
            return False
        if self._presses.first is not None or self._machines is None:
            raise Interrupted(self._presses.first or signal.SIGTERM)
        self._restarts.say("another machine was asked to stop, and leaves: continuing with those that stay")
        return True

    def _make_room(self, *, has_begun: bool) -> None:
        """When machines come or go, let workers finish their step first; launchers on other machines do the same."""
        if has_begun:
            self._restarts.say("a machine joins or has been lost: starting anew with those that are there")
            self._signal(signal.SIGTERM)
            self._wait(self._launch.grace_s + OVERDUE_S)
        self._end()

    def _end(self) -> None:
        """End workers that are still running."""
        self._signal(signal.SIGTERM)
        self._wait(TERMINATE_S)
        self._signal(signal.SIGKILL)
        for worker in self._workers.values():
            worker.wait()

    def _wait(self, seconds: float) -> None:
        end = time.monotonic() + seconds
        while self._are_running() and time.monotonic() < end:
            time.sleep(POLL_S / 2)

    def _are_running(self) -> bool:
        return any(worker.poll() is None for worker in self._workers.values())

    def _signal(self, number: signal.Signals) -> None:
        for worker in self._workers.values():
            worker.send_signal(number)

    @contextmanager
    def _signals_forwarded(self) -> Iterator[None]:
        """Forward requests to stop to the workers, which run in sessions of their own and finish their step first.

        Workers get Ctrl-C, which has no time limit, or else SIGTERM. Before the first step there is nothing to finish,
        and SIGTERM ends them without the traceback that Ctrl-C would cause during their start.
        """
        before = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        press, is_interrupt = self._presses.add(number), number == signal.SIGINT
        if not is_interrupt and self._overdue_at == math.inf:  # also after Ctrl-C
            self._overdue_at = time.monotonic() + self._launch.grace_s + OVERDUE_S
        elif is_interrupt and press == "second":
            self._overdue_at = min(self._overdue_at, time.monotonic() + INTERRUPT_GRACE_S + OVERDUE_S)
        elif press != "first":
            return
        if not self._are_running():
            raise Interrupted(self._presses.first or number)
        has_begun = (self._round / STEPS_BEGUN).exists()
        self._signal(signal.SIGINT if is_interrupt and has_begun else signal.SIGTERM)
