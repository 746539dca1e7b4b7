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
import uuid
from collections.abc import Sequence
from contextlib import suppress
from multiprocessing.connection import Connection
from multiprocessing.context import SpawnProcess

from leaderless.base.leftover_processes import end_marked
from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.protocol import RewardInput, describe, grade, takes_batch
from leaderless.rewards.registry import make_rewards

SHARE_S = 0.25
"""Seconds after which a process begins no further response of a chunk, so that others can take its rest."""
MARK_VARIABLE = "LEADERLESS_REWARD_PROCESS"
"""Environment variable by which a reward process and all processes that it starts are known."""
MAX_PRINTED_BYTES = 2**16
"""Bytes of what rewards print that are passed on in each call of their pool."""
_LEFT_OUT = f"\n[rewards print more than {MAX_PRINTED_BYTES // 1024} KiB: the rest of this step is left out]\n".encode()
_PR_SET_PDEATHSIG = 1
_starting = threading.Lock()


class RewardProcess(SpawnProcess):
    """A spawned process that does not import the worker's main module, and with it torch and the model code."""

    def start(self) -> None:
        """Start the process, which never reacts to Ctrl-C: the worker decides how a run ends."""
        main = vars(sys.modules["__main__"])
        self._mark = uuid.uuid4().hex
        # Sets have the same order in all reward processes, so that rewards do not depend on their number.
        variables = {"PYTHONHASHSEED": "0", MARK_VARIABLE: self._mark}
        with _starting:
            hidden: dict[str, object] = {name: main[name] for name in ("__spec__", "__file__") if name in main}
            before = {name: os.environ.get(name) for name in variables}
            blocked = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
            try:
                # `multiprocessing` finds no file or name by which a child could import the main module again.
                main["__spec__"] = None
                main.pop("__file__", None)
                os.environ.update(variables)
                super().start()
            finally:
                signal.pthread_sigmask(signal.SIG_SETMASK, blocked)
                main.update(hidden)
                for name, value in before.items():
                    if value is None:
                        os.environ.pop(name, None)
                    else:
                        os.environ[name] = value

    def end(self, timeout_s: float) -> None:
        """Kill the process, and what its rewards have started, also in sessions of their own."""
        self.kill()
        self.join(timeout_s)
        end_marked(MARK_VARIABLE, self._mark)


class PrintedText:
    """Passes on what reward processes print to standard error, up to a limit in each call of their pool.

    Attributes:
        writer: End of a pipe for the output of processes.
    """

    def __init__(self) -> None:
        reader, self.writer = multiprocessing.Pipe(duplex=False)
        self._left = MAX_PRINTED_BYTES
        self._thread = threading.Thread(target=self._pass_on, args=(reader,), name="printed", daemon=True)
        self._thread.start()

    def begin(self) -> None:
        """Begin a call."""
        self._left = MAX_PRINTED_BYTES

    def close(self, timeout_s: float) -> None:
        """Pass on the rest, after all processes have ended."""
        self.writer.close()
        self._thread.join(timeout_s)

    def _pass_on(self, reader: Connection) -> None:
        # What is left out is read as well: a full pipe would make rewards wait.
        with reader:
            while text := os.read(reader.fileno(), MAX_PRINTED_BYTES):
                if self._left < 0:
                    continue
                kept = text if len(text) <= self._left else text[: self._left] + _LEFT_OUT
                self._left = self._left - len(text) if kept is text else -1
                with suppress(OSError):
                    os.write(2, kept)


def serve(config: RewardsConfig, worker: Connection, outcomes: Connection, printed: Connection) -> None:
    """Grade what the worker sends, until it closes the connection: the main function of a reward process.

    Args:
        config: The recipe's `reward` section.
        worker: Connection to the worker. It sends the name of a reward and responses to grade, those of each call
            together; it receives the names of batch rewards, as a list in JSON, when the process has loaded the
            rewards, and an empty message after each chunk. A text in JSON says why the rewards cannot be loaded.
        outcomes: A file in memory for the outcomes of a chunk, a line of JSON for each call. A line begins with a space
            as soon as its responses are being graded. The file outlives this process, so that the worker need not wake
            up for each outcome, loses none, and knows what the process was doing when it ended.
        printed: Pipe for what rewards print.
    """
    _settle_in(printed)
    timeouts_s = {name: options.timeout_s for name, options in config.options().items()}
    try:
        rewards = make_rewards(config)
    except BaseException as error:  # noqa: BLE001 - this is the process's boundary: the worker raises it
        worker.send_bytes(json.dumps(describe(error)).encode())
        return
    pid = os.getpid()
    with suppress(EOFError, BrokenPipeError):
        worker.send_bytes(json.dumps([name for name, reward in rewards.items() if takes_batch(reward)]).encode())
        while True:
            chunk: tuple[str, Sequence[Sequence[RewardInput]]] = worker.recv()
            name, calls = chunk
            end = time.monotonic() + SHARE_S
            for samples in calls:
                os.write(outcomes.fileno(), b" ")
                graded = grade(rewards[name], samples, timeouts_s[name])
                if os.getpid() != pid:
                    os._exit(1)  # A copy of this process that a reward has made must not answer.
                os.write(outcomes.fileno(), json.dumps(graded).encode() + b"\n")
                if time.monotonic() >= end:
                    break
            worker.send_bytes(b"")


def _settle_in(printed: Connection) -> None:
    """End this process together with its worker, at once, and print to a pipe, line by line."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, {signal.SIGINT})
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
    worker = multiprocessing.parent_process()
    if worker is not None and os.getppid() != worker.pid:
        os._exit(1)  # The worker ended before the line above could take effect.
    os.dup2(printed.fileno(), 1)
    os.dup2(printed.fileno(), 2)
    printed.close()
    sys.stdout = sys.stderr
