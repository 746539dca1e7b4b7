"""Rewards that behave as badly as a user's may, for tests of rewards; imported by reward processes."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from random import Random

from leaderless.rewards.protocol import RewardInput, RewardResult

HEAVY_MODULES = ("torch", "transformers", "numpy", "leaderless.config.recipe")


def length(sample: RewardInput) -> int:
    return len(sample.response)


def one(sample: RewardInput) -> bool:
    return True


def large(sample: RewardInput) -> float:
    return 1e308


def echo(sample: RewardInput) -> RewardResult:
    return RewardResult(1.0, f"{sample.prompt}|{sample.response}|{sample.answer}|{sample.row}|{sample.is_truncated}")


def what_is_said(sample: RewardInput) -> object:
    """Do what the response says: raise, return or end in the way it names."""
    return ACTIONS[sample.response]()


def hash_order(sample: RewardInput) -> RewardResult:
    return RewardResult(float(hash(sample.response) % 1000), ",".join({sample.response, "a", "b", "c", "d", "e"}))


def process_id(sample: RewardInput) -> float:
    time.sleep(0.01)
    return float(os.getpid())


def loaded_modules(sample: RewardInput) -> RewardResult:
    main = sys.modules["__main__"]
    return RewardResult(0.0, ",".join([*(m for m in HEAVY_MODULES if m in sys.modules), str(vars(main).get("MARK"))]))


def chatter(sample: RewardInput) -> float:
    print("said by a reward")
    os.write(1, b"said by a library\n")
    return 1.0


def leave_thread(sample: RewardInput) -> float:
    threading.Thread(target=time.sleep, args=(600,), daemon=False).start()
    return 1.0


def sleep_as_told(sample: RewardInput) -> float:
    time.sleep(float(sample.response))
    return 1.0


def crash_once(sample: RewardInput) -> float:
    """End the process the first time, as something left behind by another response might."""
    mark = Path(str(sample.answer))
    if not mark.exists():
        mark.touch()
        os._exit(9)
    return 1.0


def mark_and_do(sample: RewardInput) -> object:
    """Write a line into the file that the answer names, then do what the response says."""
    with Path(str(sample.answer)).open("a") as file:
        file.write("graded\n")
    return ACTIONS[sample.response]()


def two_arguments(sample: RewardInput, other: object) -> float:
    return 0.0


async def coroutine(sample: RewardInput) -> float:
    return 0.0


def generator(sample: RewardInput) -> Iterator[float]:
    yield 0.0


class UnspeakableError(Exception):
    def __str__(self) -> str:
        raise RuntimeError("no words")


class Unpicklable(float):
    def __reduce__(self) -> str:
        raise TypeError("stays here")


def _raise(error: BaseException) -> None:
    raise error


def _hang() -> None:
    while True:
        pass


def _hang_in_c() -> None:
    """Hold the interpreter lock forever, so that no Python signal handler can run."""
    sum(itertools.repeat(0))


def _segfault() -> None:
    ctypes.string_at(0)


def _ignore_the_end() -> None:
    signal.signal(signal.SIGTERM, signal.SIG_IGN)
    _hang()


def _fork() -> float:
    """Leave a copy of the process behind that also returns, as a careless `os.fork` does."""
    os.fork()
    return 1.0


ACTIONS = {
    "fork": _fork,
    "one": lambda: 1.0,
    "error": lambda: {}["missing"],
    "error in a library": lambda: re.compile("("),
    "system exit": lambda: sys.exit(0),
    "interrupt": lambda: _raise(KeyboardInterrupt()),
    "huge error": lambda: _raise(ValueError("x" * 1_000_000)),
    "unspeakable error": lambda: _raise(UnspeakableError()),
    "surrogate": lambda: RewardResult(1.0, "\ud800"),
    "nan": lambda: float("nan"),
    "inf": lambda: RewardResult(float("inf"), "x"),
    "none": lambda: None,
    "text": lambda: "1.0",
    "huge integer": lambda: 10**400,
    "number as answer": lambda: RewardResult(1.0, 5),
    "lambda": lambda: lambda: 0,
    "unpicklable number": lambda: Unpicklable(1.0),
    "hang": _hang,
    "hang in c": _hang_in_c,
    "ignore the end": _ignore_the_end,
    "exit": lambda: os._exit(3),
    "quiet exit": lambda: os._exit(0),
    "segfault": _segfault,
}


def slowly(sample: RewardInput) -> float:
    """Take a time that nobody can foretell."""
    time.sleep(0.05 * Random().random())
    return float(len(sample.response) > 2)
