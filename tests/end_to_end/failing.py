"""Stages and rewards by which workers fail in every way, for test_failures.py and test_restarts.py.

FAIL says how, and on which rank, as `killed@1`. FAIL_ONCE names a folder, and FAIL is then a list with steps, as
`killed@1@3 hang@0@4`, of which each comes true once however often the workers are started. PACE_S is the least time of
a step, for runs that only have to be there while something else happens.
"""

from __future__ import annotations

import os
import signal
import subprocess
import time
from pathlib import Path

import leaderless

AT_STEP = int(os.environ.get("FAIL_AT", "2"))
SECOND_PRESS_S = 0.5
PAUSE_S = 5.0
LEFT_BEHIND: list[subprocess.Popen[bytes]] = []
WORKFLOW = """
name: failing
nodes:
  rollout:   {run: rollout, role: policy}
  reward:    {run: reward, after: rollout}
  fail:      {run: "tests.end_to_end.failing:fail", after: reward}
  old:       {run: log_probs, role: policy, after: rollout}
  advantage: {run: advantage, after: fail}
  policy:    {run: update, role: policy, after: [advantage, old]}
"""


@leaderless.stage(reads=["rewards"], writes=["rewards"])
def fail(batch: leaderless.Batch, context: leaderless.StageContext) -> leaderless.Batch:
    time.sleep(float(os.environ.get("PACE_S", "0")))
    if "FAIL_ONCE" in os.environ:
        fail_once(context)
        return batch.with_columns(rewards=batch.dense("rewards"))
    how, _, rank = os.environ.get("FAIL", "").partition("@")
    if how and context.step >= AT_STEP and context.process_group.rank == int(rank or 0):
        WAYS[how]()
    return batch.with_columns(rewards=batch.dense("rewards"))


def fail_once(context: leaderless.StageContext) -> None:
    for failure in os.environ["FAIL"].split():
        how, rank, step = failure.split("@")
        done = Path(os.environ["FAIL_ONCE"]) / failure
        if context.step == int(step) and context.process_group.rank == int(rank) and not done.exists():
            done.touch()
            WAYS[how]()


def hang() -> None:
    time.sleep(600)


def pause() -> None:
    time.sleep(PAUSE_S)


def press_twice() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECOND_PRESS_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def raise_error() -> None:
    raise KeyError("the user's own mistake")


WAYS = {
    "hang": hang,
    "pause": pause,
    "error": raise_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt twice": press_twice,
}


def leave_behind(sample: leaderless.RewardInput) -> float:
    """Start a process and leave it running, once in each reward process of a disturbed run."""
    if "FAIL_ONCE" in os.environ and not LEFT_BEHIND:
        LEFT_BEHIND.append(subprocess.Popen(["sleep", "600"]))
    return float(len(sample.response) % 2)


def hang_sometimes(sample: leaderless.RewardInput) -> float:
    """Hang on some responses and raise on others."""
    if len(sample.response) % 3 == 0:
        time.sleep(600)
    if len(sample.response) % 3 == 1:
        raise ValueError("no such thing")
    return 1.0
