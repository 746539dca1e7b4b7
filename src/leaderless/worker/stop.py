"""Ctrl-C and SIGTERM: the step is finished, then all ranks stop together."""

from __future__ import annotations

import os
import signal
import threading
from types import FrameType

SIGTERM_GRACE_S = 10.0
"""A rank that got SIGTERM and cannot finish, as its peers are gone, exits after this time."""


class StopRequest:
    """Whether this rank has been asked to stop; the ranks agree at the end of each step."""

    def __init__(self) -> None:
        """Take over the signals of the process."""
        self.is_requested = False
        if threading.current_thread() is threading.main_thread():
            signal.signal(signal.SIGINT, self._on_interrupt)
            signal.signal(signal.SIGTERM, self._on_terminate)

    def _on_interrupt(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        """The first one asks, the second one breaks off."""
        if self.is_requested:
            raise KeyboardInterrupt
        self.is_requested = True

    def _on_terminate(self, signum: int, frame: FrameType | None) -> None:  # noqa: ARG002
        self.is_requested = True
        timer = threading.Timer(SIGTERM_GRACE_S, os._exit, args=[128 + signum])
        timer.daemon = True
        timer.start()
