"""Torch elastic's agent of one machine, made to tell apart why workers have ended."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from types import FrameType

import psutil
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs

from leaderless.launch.restarts import Restarts
from leaderless.supervision.failure import FAILED, FOLDER_VARIABLE, STEPS_BEGUN, STOPPED
from leaderless.supervision.stop import STOP_SIGNALS, Interrupted, Presses
from leaderless.worker.place import STORE_VARIABLE

MANY_RESTARTS = 1_000_000
"""Torch elastic's own count, which does not know of progress, must not end a run."""
LAST_S = 1.0
"""Time for what workers have left behind to end by itself."""
OVERDUE_S = 5.0
"""Workers that have not ended by themselves so long after their time of grace are killed."""


class Agent(LocalElasticAgent):
    """Starts the workers of a machine, each time with a folder of their own to meet and to write failures in.

    Attributes:
        presses: What has asked this machine to stop.
    """

    def __init__(
        self,
        spec: WorkerSpec,
        logs_specs: LogsSpecs,
        folder: Path,
        grace_s: float,
        restarts: Restarts,
        *,
        has_store_file: bool,
    ) -> None:
        """Nothing is started yet.

        Args:
            spec: Of the workers.
            logs_specs: Where their output goes.
            folder: For this launch, on this machine.
            grace_s: Time for workers to stop.
            restarts: Decides after a failure.
            has_store_file: All workers are on this machine, and meet at a file.
        """
        super().__init__(spec, logs_specs)
        self.presses = Presses()
        self._folder, self._grace_s, self._has_store_file = folder, grace_s, has_store_file
        self._restarts = restarts
        self._others = set(psutil.Process().children(recursive=True))
        self._start = 0
        self._have_steps_begun = False
        self._pressed_at = 0.0

    @property
    def _round(self) -> Path:
        return self._folder / str(self._start)

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, int]:
        self.end_orphans()
        self._start += 1
        self._have_steps_begun = False
        self._round.mkdir()
        os.environ[FOLDER_VARIABLE] = str(self._round)
        if self._has_store_file:
            os.environ[STORE_VARIABLE] = str(self._round / "store")
        workers: dict[int, int] = super()._start_workers(worker_group)
        return workers

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        if not self._have_steps_begun and (self._round / STEPS_BEGUN).exists():
            self._have_steps_begun = True
            self._restarts.begun()
        if self.presses.first is not None and time.monotonic() > self._pressed_at + self._grace_s + OVERDUE_S:
            self._signal(signal.SIGKILL)
        if any(map(_has_failed, self._worker_ids())):
            (self._round / FAILED).touch()
        result: RunResult = super()._monitor_workers(worker_group)
        if result.state == WorkerState.FAILED:
            codes = {rank: failure.exitcode for rank, failure in result.failures.items()}
            if not self._restarts.failed(codes, self._round, is_stopping=self.presses.first is not None):
                self._remaining_restarts = 0
        elif result.state == WorkerState.SUCCEEDED and (self._round / STOPPED).exists():
            if self.presses.first is not None or self._has_store_file:
                raise Interrupted(self.presses.first or signal.SIGTERM)
            self._restarts.say("another machine was asked to stop, and leaves: going on with those that stay")
            self._restart_workers(worker_group)
            return RunResult(state=WorkerState.HEALTHY)
        return result

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        """When machines come or go, let workers finish their step first; the others' agents do the same."""
        if worker_group.state == WorkerState.HEALTHY and (self._round / STEPS_BEGUN).exists():
            self._restarts.say("a machine joins or has been lost: starting anew with those that are there")
            self._signal(signal.SIGINT)
            end = time.monotonic() + self._grace_s + OVERDUE_S
            while time.monotonic() < end and any(map(_is_running, self._worker_ids())):
                time.sleep(worker_group.spec.monitor_interval)
        super()._stop_workers(worker_group)

    def _worker_ids(self) -> list[int]:
        return list(self._pcontext.pids().values()) if self._pcontext is not None else []

    def _signal(self, number: signal.Signals) -> None:
        for process in filter(_is_running, self._worker_ids()):
            with suppress(ProcessLookupError):
                os.kill(process, number)

    def end_orphans(self) -> None:
        """End what workers that are gone have left behind, such as processes that a reward has started."""
        orphans = set(psutil.Process().children(recursive=True)) - self._others
        # Python has a helper that removes shared memory when those who used it are gone.
        _, alive = psutil.wait_procs(orphans, timeout=LAST_S)
        for orphan in alive:
            with suppress(psutil.NoSuchProcess):
                orphan.kill()
        psutil.wait_procs(alive, timeout=OVERDUE_S)

    @contextmanager
    def signals_forwarded(self) -> Iterator[None]:
        """Pass what asks to stop on to the workers, which run in sessions of their own and finish their step first.

        It reaches them as Ctrl-C does. Before the first step there is nothing to finish, and SIGTERM ends them without
        the traceback that Ctrl-C would cause while they start.
        """
        before = {number: signal.signal(number, self._forward) for number in STOP_SIGNALS}
        try:
            yield
        finally:
            for number, handler in before.items():
                signal.signal(number, handler)

    def _forward(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        is_first = self.presses.first is None
        is_another = self.presses.add(number)
        if is_first:
            self._pressed_at = time.monotonic()
        elif not is_another or number != signal.SIGINT:
            return
        if not any(map(_is_running, self._worker_ids())):
            raise Interrupted(self.presses.first or number)
        self._signal(signal.SIGINT if (self._round / STEPS_BEGUN).exists() else signal.SIGTERM)


def _has_failed(process: int) -> bool:
    """Whether a worker has ended badly; that is left for torch elastic to hear as well."""
    try:
        status = os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT)
    except ChildProcessError:  # it has heard
        return False
    return status is not None and (status.si_code != os.CLD_EXITED or status.si_status != 0)


def _is_running(process: int) -> bool:
    try:
        return os.waitid(os.P_PID, process, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
    except ChildProcessError:
        return False
