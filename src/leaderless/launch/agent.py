"""Watches over the workers of one machine, and starts them again. Imports no torch.

Torch elastic's own agent does not know why workers have ended, nor whether the run made progress, and can be taught so
only by its private methods. Of torch elastic there is its rendezvous, by its public interface, for several machines.
"""

from __future__ import annotations

import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from types import FrameType

from leaderless.launch.meeting import Meeting, OneMachine, Seats
from leaderless.launch.restarts import Restarts
from leaderless.supervision.failure import FAILED, STEPS_BEGUN, STOPPED, WorkersFailed
from leaderless.supervision.leftovers import Leftovers
from leaderless.supervision.stop import STOP_SIGNALS, Interrupted, Presses

POLL_S = 0.1
OVERDUE_S = 5.0
"""Workers that have not ended by themselves this long after their time of grace are killed."""
TERMINATE_S = 30.0
"""After SIGTERM, time for workers to end before they are killed."""

Workers = Mapping[int, "subprocess.Popen[bytes]"]
"""Processes by rank."""


class Agent:
    """Starts the workers of a machine, each time with a new folder to meet and to write failures in."""

    def __init__(
        self,
        start: Callable[[Path, Seats], Workers],
        meeting: Meeting,
        folder: Path,
        grace_s: float,
        restarts: Restarts,
    ) -> None:
        """Nothing is started yet.

        Args:
            start: Function that starts the workers, with a new folder for this start.
            meeting: Machines of the run.
            folder: Folder of this launch, on this machine.
            grace_s: Time for workers to finish their step when they are asked to stop.
            restarts: Rules for what follows a failure.
        """
        self._start, self._meeting, self._folder, self._grace_s = start, meeting, folder, grace_s
        self._restarts = restarts
        self._presses = Presses()
        self._pressed_at = 0.0
        self._workers: Workers = {}
        self._num_starts = 0

    def run(self) -> None:
        """Start workers, and start them again, until they are done.

        Raises:
            WorkersFailed: A worker has failed, and the others have been ended; or the machines do not come together.
            Interrupted: A signal has stopped them.
        """
        is_leaving = False
        with self._signals_forwarded(), Leftovers() as leftovers:
            try:
                while self._run_once():
                    leftovers.end()
            except Interrupted:
                is_leaving = not isinstance(self._meeting, OneMachine)
                raise
            finally:
                self._end()
                if not is_leaving:  # machines that stay still need it
                    self._meeting.close()

    @property
    def _round(self) -> Path:
        return self._folder / str(self._num_starts)

    def _run_once(self) -> bool:
        """One start; whether another one has to follow."""
        self._num_starts += 1
        self._round.mkdir()
        self._workers = self._start(self._round, self._meeting.next(self._round))
        has_begun = False
        while True:
            time.sleep(POLL_S)
            if not has_begun and (self._round / STEPS_BEGUN).exists():
                has_begun = True
                self._restarts.begun()
            if self._presses.first is not None and time.monotonic() > self._pressed_at + self._grace_s + OVERDUE_S:
                self._signal(signal.SIGKILL)
            codes = {rank: worker.poll() for rank, worker in self._workers.items()}
            failed = {rank: code for rank, code in codes.items() if code}
            if failed:
                return self._have_failed(failed)
            if None not in codes.values():
                return self._have_ended()
            if self._meeting.is_awaited():
                self._make_room(has_begun=has_begun)
                return True

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
            self._meeting.finish()
            return False
        if self._presses.first is not None or isinstance(self._meeting, OneMachine):
            raise Interrupted(self._presses.first or signal.SIGTERM)
        self._restarts.say("another machine was asked to stop, and leaves: continuing with those that stay")
        return True

    def _make_room(self, *, has_begun: bool) -> None:
        """When machines come or go, let workers finish their step first; the others' launchers do the same."""
        if has_begun:
            self._restarts.say("a machine joins or has been lost: starting anew with those that are there")
            self._signal(signal.SIGINT)
            self._wait(self._grace_s + OVERDUE_S)
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
        is_first = self._presses.first is None
        is_another = self._presses.add(number)
        if is_first:
            self._pressed_at = time.monotonic()
        elif not is_another or number != signal.SIGINT:
            return
        if not self._are_running():
            raise Interrupted(self._presses.first or number)
        self._signal(signal.SIGINT if (self._round / STEPS_BEGUN).exists() else signal.SIGTERM)
