"""Stages and rewards by which workers fail in every way, for test_failures.py; FAIL says how, and on which rank."""

from __future__ import annotations

import os
import signal
import time

import leaderless

AT_STEP = 2
SECOND_PRESS_S = 0.5
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
    how, _, rank = os.environ.get("FAIL", "").partition("@")
    if how and context.step >= AT_STEP and context.group.rank == int(rank or 0):
        WAYS[how]()
    return batch.with_columns(rewards=batch.dense("rewards"))


def press_twice() -> None:
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(SECOND_PRESS_S)
    os.kill(os.getpid(), signal.SIGINT)
    time.sleep(60)


def raise_error() -> None:
    raise KeyError("the user's own mistake")


WAYS = {
    "error": raise_error,
    "killed": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "interrupt": lambda: os.kill(os.getpid(), signal.SIGINT),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "interrupt twice": press_twice,
}


def hang_sometimes(sample: leaderless.RewardInput) -> float:
    """Hang on some responses and raise on others."""
    if len(sample.response) % 3 == 0:
        time.sleep(600)
    if len(sample.response) % 3 == 1:
        raise ValueError("no such thing")
    return 1.0
