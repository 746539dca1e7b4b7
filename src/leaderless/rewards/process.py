"""A reward process: small, undisturbed, and never longer-lived than its worker. Imports no torch."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.grading import describe, grade_in_turn
from leaderless.rewards.protocol import RewardInput
from leaderless.rewards.registry import make_rewards

SHARE_S = 0.25
"""Seconds after which a process begins no further response of a chunk, so that others can take its rest."""
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


def serve(config: RewardsConfig, worker: Connection) -> None:
    """Grade what the worker sends, until it closes the connection; what a reward process runs.

    The worker receives lines of JSON: first `true`, or a text that says why the rewards cannot be loaded. Then for each
    chunk an `Outcome` as a list as soon as a response is graded, and `null` when no further one of it will be.

    Args:
        config: The recipe's `reward` section.
        worker: Connection to the worker, which sends the name of a reward and the responses to grade.
    """
    _settle_in()
    try:
        rewards = make_rewards(config)
    except BaseException as error:  # noqa: BLE001 - this is the process's boundary: the worker raises it
        _send(worker, describe(error))
        return
    _send(worker, message=True)
    pid = os.getpid()
    with suppress(EOFError, BrokenPipeError):
        while True:
            chunk: tuple[str, Sequence[RewardInput]] = worker.recv()
            end = time.monotonic() + SHARE_S
            for outcome in grade_in_turn(rewards[chunk[0]], chunk[1]):
                if os.getpid() != pid:
                    os._exit(1)  # A copy of this process that a reward has made must not answer.
                _send(worker, outcome)
                if time.monotonic() >= end:
                    break
            _send(worker, None)


def _send(worker: Connection, message: object) -> None:
    # Without the framing of `Connection`, the worker can read many lines at once, and never waits for the rest of one.
    line = json.dumps(message).encode() + b"\n"
    while line:
        line = line[os.write(worker.fileno(), line) :]


def _settle_in() -> None:
    """Make this process one that ends at once when it is to, and with the worker.

    What rewards print goes to standard error, line by line: standard output belongs to the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    if sys.platform == "linux":
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = multiprocessing.parent_process()
    if worker is not None and os.getppid() != worker.pid:
        os._exit(1)  # The worker ended before the line above could take effect.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
