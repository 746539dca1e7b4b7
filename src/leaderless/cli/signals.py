"""Signals to commands that run until they are stopped."""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType

from leaderless.observability.console import print_line
from leaderless.worker.supervision.stop import Interrupted


@contextmanager
def ended_by_signals() -> Iterator[None]:
    """Let Ctrl-C and SIGTERM end what runs inside cleanly, by an `Interrupted`."""
    before = {number: signal.signal(number, _end) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield
    except Interrupted:
        print_line("stopped")
        raise
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _end(number: int, frame: FrameType | None) -> None:  # noqa: ARG001
    raise Interrupted(number)
