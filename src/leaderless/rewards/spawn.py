"""How a reward process comes to life: small, undisturbed, and never longer-lived than its worker. Imports no torch."""

from __future__ import annotations

import ctypes
import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from multiprocessing.context import SpawnContext, SpawnProcess

_PR_SET_PDEATHSIG = 1
_starting = threading.Lock()


class RewardProcess(SpawnProcess):
    """A spawned process that does not import the worker's main module, and with it torch and the model code."""

    def start(self) -> None:
        """Start it, deaf to Ctrl-C from its first moment on: the worker decides how a run ends."""
        with _starting, _main_hidden(), _hash_seed_fixed():
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)


class RewardContext(SpawnContext):
    """The `multiprocessing` context that makes reward processes."""

    Process = RewardProcess


@contextmanager
def _main_hidden() -> Iterator[None]:
    """Let `multiprocessing` find no file or name by which a child could import the main module again."""
    main = sys.modules["__main__"].__dict__
    hidden: dict[str, object] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
    main["__spec__"] = None
    main.pop("__file__", None)
    try:
        yield
    finally:
        main.update(hidden)


@contextmanager
def _hash_seed_fixed() -> Iterator[None]:
    """The order of sets is the same in all reward processes, so that it cannot make a reward depend on their number."""
    previous = os.environ.get("PYTHONHASHSEED")
    os.environ["PYTHONHASHSEED"] = "0"
    try:
        yield
    finally:
        if previous is None:
            del os.environ["PYTHONHASHSEED"]
        else:
            os.environ["PYTHONHASHSEED"] = previous


def settle_in() -> None:
    """Make the process that calls this one that ends at once when told to, and with the worker's end.

    What rewards print goes to standard error, line by line: standard output belongs to the worker.
    """
    # The pool's own handler is Python, and would wait for a reward that hangs in C to return.
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = multiprocessing.parent_process()
    if worker is not None and os.getppid() != worker.pid:
        os._exit(1)  # The worker ended before the line above could take effect.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
