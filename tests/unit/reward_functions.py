"""Rewards that behave as badly as a user's may, for tests of rewards; imported by reward processes."""

from __future__ import annotations

import ctypes
import itertools
import os
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from random import Random

from leaderless.rewards.protocol import RewardInput, RewardResult, batch_reward

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


def broken(sample: RewardInput) -> float:
    raise LookupError("no such server")


def shout(sample: RewardInput) -> float:
    """Print far more than anybody reads."""
    for _ in range(5000):
        print("x" * 99)
    return 1.0


def leave_session(sample: RewardInput) -> float:
    """Start a process in a session of its own, write its id into the file that the answer names, and crash if asked."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path(str(sample.answer)).write_text(str(child.pid))
    return float(ACTIONS[sample.response]())


@batch_reward
def ranks_of(samples: Sequence[RewardInput]) -> list[float | RewardResult | None]:
    """Places of the responses by length, None for empty ones; with an answer, that is the size of the batch."""
    order = sorted({len(sample.response) for sample in samples})
    values = [float(order.index(len(sample.response))) if sample.response else None for sample in samples]
    return [value if value is None else RewardResult(value, str(len(samples))) for value in values]


@batch_reward
def whole_batch(samples: Sequence[RewardInput]) -> object:
    """Do what the longest response says, for all of them; the row may name a file that counts calls."""
    if isinstance(samples[0].answer, str):
        with Path(samples[0].answer).open("a") as file:
            file.write("called\n")
    return BATCH_ACTIONS[max((sample.response for sample in samples), key=len)](len(samples))


BATCH_ACTIONS = {
    "one": lambda count: [1.0] * count,
    "error": lambda _: _raise(LookupError("no such server")),
    "too few": lambda count: [1.0] * (count - 1),
    "no list": lambda _: 1.0,
    "hang": lambda _: _hang(),
    "exit": lambda _: os._exit(3),
    "some bad": lambda count: [float("nan"), "1.0", *[1.0] * (count - 2)],
}
