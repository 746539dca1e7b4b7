"""Ctrl-C, SIGTERM and the signals of schedulers: the step is finished, then all ranks stop together.

Ctrl-C leaves the step the time that it takes. The other signals come from what ends the process soon: the state before
the step is saved at once, in case it is not finished in time.
"""

from __future__ import annotations

import atexit
import ctypes
import os
import shutil
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from types import FrameType
from typing import Literal, Self

from leaderless.worker.supervision.failure import FAILED, FOLDER_VARIABLE, STEPS_BEGUN, leave_mark

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""Signals that ask to stop; Slurm sends the last two before the end of a job, if configured to."""
LAUNCHER_VARIABLE = "LEADERLESS_LAUNCHER"
"""Process id of the launcher."""
INTERRUPT_GRACE_S = 3.0
"""After a second Ctrl-C, time for an orderly end before the process is ended."""
FAILED_GRACE_S = 3.0
"""Time for a rank to end and to report why, after its launcher ended it because other ranks failed."""
ONE_PRESS_S = 0.3
"""Signals this close to each other count as one: some tools send them to a process and to its process group."""
_PR_SET_PDEATHSIG = 1


class Interrupted(Exception):  # noqa: N818
    """A signal stopped a command before it was done."""

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class Presses:
    """Distinguishes the first signal that asks to stop from a second, which insists."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._time_s = 0.0

    def add(self, number: int) -> Literal["first", "same", "second"]:
        """Count a signal; one that comes too soon after the first counts as the same."""
        if self.first is None:
            self.first, self._time_s = number, time.monotonic()
            return "first"
        return "second" if time.monotonic() - self._time_s > ONE_PRESS_S else "same"


class StopRequest:
    """Receives the signals that ask this rank to stop; the ranks agree at the end of each step.

    Python runs a handler only between two of its own instructions, which a wait for a lost peer may never reach. So a
    thread also receives the signals, and ends a process that does not end by itself.
    """

    def __init__(
        self,
        grace_s: float,
        announce: Callable[[], None],
        preempt: Callable[[], None],
        abandon: Callable[[], None],
        *,
        is_guest: bool = False,
    ) -> None:
        """Prepare to take over the signals.

        Args:
            grace_s: Time, after any signal but Ctrl-C, to finish the step and to write a checkpoint.
            announce: Function that explains the next steps to the person who pressed Ctrl-C.
            preempt: Function that is called, in another thread, when that time begins.
            abandon: Function that reports, in another thread, that the step was not finished in time; then the process
                ends.
            is_guest: Whether the process belongs to a program that continues after the run: only Ctrl-C asks the run to
                stop, and nothing ends the process.
        """
        self._presses = Presses()
        self._grace_s, self._announce, self._is_guest = grace_s, announce, is_guest
        self._preempt, self._abandon = preempt, abandon
        self._restore = ExitStack()
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        is_main = threading.current_thread() is threading.main_thread()
        if is_main and not self._is_guest:
            receiver, sender = socket.socketpair()
            sender.setblocking(False)
            threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()
            self._restore.callback(sender.close)
            before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
            self._restore.callback(signal.set_wakeup_fd, before)
        if is_main:
            for number in (signal.SIGINT,) if self._is_guest else STOP_SIGNALS:
                self._restore.callback(signal.signal, number, signal.signal(number, self._on_signal))
        if is_main and not self._is_guest:
            # What has started this process may have blocked some, as Ray does with Ctrl-C; processes inherit that.
            blocked = signal.pthread_sigmask(signal.SIG_UNBLOCK, STOP_SIGNALS)
            self._restore.callback(signal.pthread_sigmask, signal.SIG_SETMASK, blocked)
        leave_mark(STEPS_BEGUN)
        return self

    def __exit__(self, kind: object, error: object, traceback: object) -> None:
        """Restore the handlers; a process that ends because of an error still has to end in time."""
        self._restore.close()
        for timer in self._timers:
            if error is None or timer.function == self._give_up:
                timer.cancel()

    @property
    def signal(self) -> int | None:
        """The first signal that asked to stop; None when there was none."""
        return self._presses.first

    def ask(self) -> None:
        """Ask to stop from another thread, without a time limit."""
        if self._presses.add(signal.SIGTERM) == "first":
            self._announce()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        press = self._presses.add(number)
        if press == "second" and number == signal.SIGINT:
            raise KeyboardInterrupt
        if press == "first" and not _is_preemption(number):
            self._announce()

    def _watch(self, receiver: socket.socket) -> None:
        presses, is_preempted = Presses(), False
        with receiver:
            while data := receiver.recv(1):
                number, press = data[0], presses.add(data[0])
                if number == signal.SIGINT and press == "second":
                    self._start_timer(INTERRUPT_GRACE_S, os._exit, 128 + number)
                elif number == signal.SIGTERM and _have_others_failed():
                    self._start_timer(FAILED_GRACE_S, os._exit, 128 + number)
                elif _is_preemption(number) and not is_preempted:
                    is_preempted = True
                    self._start_timer(self._grace_s, self._give_up, number)
                    self._preempt()

    def _start_timer(self, seconds: float, end: Callable[[int], None], number: int) -> None:
        timer = threading.Timer(seconds, end, [number])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _give_up(self, number: int) -> None:
        self._abandon()
        os._exit(128 + number)


def follow_launcher(folder: Path) -> None:
    """Let a worker that has nothing to save yet end at once on Ctrl-C, and stop when its launcher is killed.

    A killed launcher has not removed its folder, so the worker does.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT, signal.SIGTERM})  # see `StopRequest`
    signal.signal(signal.SIGHUP, lambda number, _: sys.exit(128 + number))
    atexit.register(lambda: shutil.rmtree(folder, ignore_errors=True) if _is_launcher_gone() else None)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if _is_launcher_gone():
        sys.exit(128 + signal.SIGHUP)  # it ended before the line above could take effect


def _is_preemption(number: int) -> bool:
    """Whether the process is ended soon after a signal, as by `torchrun` also after Ctrl-C."""
    is_by_torchrun = "TORCHELASTIC_RUN_ID" in os.environ and LAUNCHER_VARIABLE not in os.environ
    return number != signal.SIGINT or is_by_torchrun


def _is_launcher_gone() -> bool:
    return os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid())


def _have_others_failed() -> bool:
    """Whether SIGTERM comes from a launcher that ends the remaining ranks."""
    return FOLDER_VARIABLE in os.environ and (Path(os.environ[FOLDER_VARIABLE]) / FAILED).exists()
