"""Ctrl-C, SIGTERM and SIGHUP: the step is finished, then all ranks stop together."""

from __future__ import annotations

import ctypes
import os
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

from leaderless.worker.failure import FOLDER_VARIABLE, STEPS_BEGUN

INTERRUPT_GRACE_S = 3.0
"""After a second Ctrl-C, time to end in an orderly way before the process just ends."""
SIGTERM_GRACE_S = 10.0
"""A rank that got SIGTERM and cannot finish, as its peers are gone, exits after this time."""
ONE_PRESS_S = 0.3
"""Signals this close to each other are one: some tools send them to a process and to its group."""
_PR_SET_PDEATHSIG = 1


class Interrupted(Exception):  # noqa: N818
    """A command was stopped by a signal before it was done.

    Attributes:
        signal: Which one.
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
            number: Of the signal.

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

    def __init__(self, announce: Callable[[], None], *, has_peers: bool) -> None:
        """Nothing is taken over yet.

        Args:
            announce: Tells the person who pressed Ctrl-C what happens now.
            has_peers: SIGTERM may mean that others have ended, so that no step will ever be finished.
        """
        self._presses = Presses()
        self._announce, self._has_peers = announce, has_peers
        self._restore = ExitStack()
        self._timers: list[threading.Timer] = []

    def __enter__(self) -> Self:
        """Take over the signals of the process."""
        if threading.current_thread() is threading.main_thread():
            receiver, sender = socket.socketpair()
            sender.setblocking(False)
            threading.Thread(target=self._watch, args=(receiver,), daemon=True).start()
            self._restore.callback(sender.close)
            before = signal.set_wakeup_fd(sender.fileno(), warn_on_full_buffer=False)
            self._restore.callback(signal.set_wakeup_fd, before)
            for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):
                self._restore.callback(signal.signal, number, signal.signal(number, self._on_signal))
        if FOLDER_VARIABLE in os.environ:
            (Path(os.environ[FOLDER_VARIABLE]) / STEPS_BEGUN).touch()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        """Give them back; what ends because of an error still has to end in time."""
        self._restore.close()
        if error is None:
            for timer in self._timers:
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
        if is_first:
            self._announce()

    def _watch(self, receiver: socket.socket) -> None:
        presses = Presses()
        with receiver:
            while data := receiver.recv(1):
                is_another = presses.add(data[0])
                if data[0] == signal.SIGINT and is_another:
                    self._end_after(INTERRUPT_GRACE_S, data[0])
                elif data[0] == signal.SIGTERM and self._has_peers:
                    self._end_after(SIGTERM_GRACE_S, data[0])

    def _end_after(self, seconds: float, number: int) -> None:
        timer = threading.Timer(seconds, os._exit, args=[128 + number])
        timer.daemon = True
        timer.start()
        self._timers.append(timer)


def follow_launcher() -> None:
    """Let a worker that has nothing to save yet end at once on Ctrl-C, and stop when its launcher is killed."""
    signal.signal(signal.SIGINT, signal.SIG_DFL)
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
