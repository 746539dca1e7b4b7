"""A reward process: small, undisturbed, and ended with its worker. Imports no torch."""

from __future__ import annotations

import ctypes
import json
import multiprocessing
import os
import signal
import sys
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.protocol import RewardInput, describe, grade
from leaderless.rewards.registry import make_rewards

SHARE_S = 0.25
"""Seconds after which a process begins no further response of a chunk, so that others can take its rest."""
_PR_SET_PDEATHSIG = 1
_starting = threading.Lock()


class RewardProcess(SpawnProcess):
    """A spawned process that does not import the worker's main module, and with it torch and the model code."""

    def start(self) -> None:
        """Start the process, which never reacts to Ctrl-C: the worker decides how a run ends."""
        main = vars(sys.modules["__main__"])
        with _starting:
            hidden: dict[str, object] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
            seed = os.environ.get("PYTHONHASHSEED")
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                # `multiprocessing` finds no file or name by which a child could import the main module again.
                main["__spec__"] = None
                main.pop("__file__", None)
                # Sets have the same order in all reward processes, so that rewards do not depend on their number.
                os.environ["PYTHONHASHSEED"] = "0"
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                main.update(hidden)
                if seed is None:
                    del os.environ["PYTHONHASHSEED"]
                else:
                    os.environ["PYTHONHASHSEED"] = seed


def serve(config: RewardsConfig, worker: Connection, outcomes: Connection) -> None:
    """Grade what the worker sends, until it closes the connection: the main function of a reward process.

    Args:
        config: The recipe's `reward` section.
        worker: Connection to the worker. It sends the name of a reward and responses to grade; it receives an empty
            message when the process has loaded the rewards, and after each chunk. Any other message says why the
            rewards cannot be loaded.
        outcomes: A file in memory for the outcomes of a chunk, one line of JSON each. A line begins with a space as
            soon as its response is being graded. The file outlives this process, so that the worker need not wake up
            for each outcome, loses none, and knows what the process was doing when it ended.
    """
    _settle_in()
    timeouts_s = {name: options.timeout_s for name, options in config.options().items()}
    try:
        rewards = make_rewards(config)
    except BaseException as error:  # noqa: BLE001 - this is the process's boundary: the worker raises it
        worker.send_bytes(describe(error).encode())
        return
    pid = os.getpid()
    with suppress(EOFError, BrokenPipeError):
        while True:
            worker.send_bytes(b"")
            chunk: tuple[str, Sequence[RewardInput]] = worker.recv()
            name, samples = chunk
            end = time.monotonic() + SHARE_S
            for sample in samples:
                os.write(outcomes.fileno(), b" ")
                outcome = grade(rewards[name], sample, timeouts_s[name])
                if os.getpid() != pid:
                    os._exit(1)  # A copy of this process that a reward has made must not answer.
                os.write(outcomes.fileno(), json.dumps(outcome).encode() + b"\n")
                if time.monotonic() >= end:
                    break


def _settle_in() -> None:
    """End this process together with its worker, at once.

    Rewards print to standard error, line by line: standard output belongs to the worker.
    """
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = multiprocessing.parent_process()
    if worker is not None and os.getppid() != worker.pid:
        os._exit(1)  # The worker ended before the line above could take effect.
    os.dup2(2, 1)
    sys.stdout = sys.stderr
