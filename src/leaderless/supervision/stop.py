"""Ctrl-C, SIGTERM and what schedulers send: the step is finished, then all ranks stop together."""

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
from types import FrameType, TracebackType
from typing import Self

from leaderless.supervision.failure import FAILED, FOLDER_VARIABLE, STEPS_BEGUN, tell_launcher

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGUSR1, signal.SIGUSR2)
"""All ask to stop; the last two are what Slurm is told to send before the end of a job."""
LAUNCHER_VARIABLE = "LEADERLESS_LAUNCHER"
"""Process id of the launcher."""
INTERRUPT_GRACE_S = 3.0
"""After a second Ctrl-C, time to end in an orderly way before the process just ends."""
FAILED_GRACE_S = 3.0
"""Time for a rank to end, and to say why, after its launcher has told it that others have failed."""
ONE_PRESS_S = 0.3
"""Signals this close to each other are one: some tools send them to a process and to its process group."""
_PR_SET_PDEATHSIG = 1


class Interrupted(Exception):  # noqa: N818
    """A command was stopped by a signal before it was done.

    Attributes:
        signal: Signal that stopped it.
    """

    def __init__(self, number: int) -> None:
        super().__init__(signal.Signals(number).name)
        self.signal = signal.Signals(number)


class Presses:
    """Tells the first signal that asks to stop from a second one, which means it."""

    def __init__(self) -> None:
        self.first: int | None = None
        self._time_s = 0.0

    def add(self, number: int) -> bool:
        """Take a signal.

        Args:
            number: Number of the signal.

        Returns:
            Whether it is another one than the first.
        """
        if self.first is None:
            self.first, self._time_s = number, time.monotonic()
            return False
        return time.monotonic() - self._time_s > ONE_PRESS_S


class StopRequest:
    """Whether this rank has been asked to stop; the ranks agree at the end of each step.

    Python runs a handler between two of its own instructions, which a wait for a peer that is gone may never come to;
    so a thread hears of the signals as well, and ends a process that does not end by itself.
    """

    def __init__(
        self, grace_s: float, announce: Callable[[], None], abandon: Callable[[], None], *, is_guest: bool = False
    ) -> None:
        """Nothing is taken over yet.

        Args:
            grace_s: Time to finish the step and to write a checkpoint.
            announce: Function that shows what happens now to the person who pressed Ctrl-C.
            abandon: Function for another thread, which reports that the step could not be finished in time; then the
                process ends.
            is_guest: Whether the process belongs to a program that continues after the run: only Ctrl-C asks the run to
                stop, and nothing ends the process.
        """
        self._presses = Presses()
        self._grace_s, self._announce, self._abandon = grace_s, announce, abandon
        self._is_guest = is_guest
        self._restore = ExitStack()
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        """Take over the signals of the process."""
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
        tell_launcher(STEPS_BEGUN)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give them back; what ends because of an error still has to end in time."""
        self._restore.close()
        for timer in self._timers:
            if error is None or timer.function == self._give_up:
                timer.cancel()

    @property
    def signal(self) -> int | None:
        """The first signal that asked to stop; None when there was none."""
        return self._presses.first

    def _on_signal(self, number: int, frame: FrameType | None) -> None:  # noqa: ARG002
        is_first = self._presses.first is None
        is_another = self._presses.add(number)
        if is_another and number == signal.SIGINT:
            raise KeyboardInterrupt
        if is_first and not _have_others_failed():
            self._announce()

    def _watch(self, receiver: socket.socket) -> None:
        presses = Presses()
        with receiver:
            while data := receiver.recv(1):
                is_first = presses.first is None
                is_another = presses.add(data[0])
                if data[0] == signal.SIGINT and is_another:
                    self._start(threading.Timer(INTERRUPT_GRACE_S, os._exit, [128 + data[0]]))
                elif data[0] == signal.SIGTERM and _have_others_failed():
                    self._start(threading.Timer(FAILED_GRACE_S, os._exit, [128 + data[0]]))
                elif is_first:
                    self._start(threading.Timer(self._grace_s, self._give_up, [data[0]]))

    def _start(self, timer: threading.Timer) -> None:
        timer.daemon = True
        timer.start()
        self._timers.append(timer)

    def _give_up(self, number: int) -> None:
        self._abandon()
        os._exit(128 + number)


def follow_launcher(folder: Path) -> None:
    """Let a worker that has nothing to save yet end at once on Ctrl-C, and stop when its launcher is killed.

    Args:
        folder: Folder of the launcher, which is removed when it was killed.
    """
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    signal.signal(signal.SIGHUP, _leave)
    atexit.register(_clear_up_after_launcher, folder)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGHUP)
    if _is_launcher_gone():
        sys.exit(128 + signal.SIGHUP)  # it ended before the line above could take effect


def _leave(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    sys.exit(128 + number)


def _is_launcher_gone() -> bool:
    return os.environ.get(LAUNCHER_VARIABLE) != str(os.getppid())


def _clear_up_after_launcher(folder: Path) -> None:
    """A launcher that was killed has not removed its folder."""
    if _is_launcher_gone():
        shutil.rmtree(folder, ignore_errors=True)


def _have_others_failed() -> bool:
    """Whether SIGTERM comes from a launcher that ends what is left of a process group."""
    return FOLDER_VARIABLE in os.environ and (Path(os.environ[FOLDER_VARIABLE]) / FAILED).exists()
