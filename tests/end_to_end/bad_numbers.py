"""Custom stages that make numbers go bad for the prompts in BAD_PROMPTS, for test_guards.py."""

from __future__ import annotations

import os

import torch

import leaderless
from leaderless.data.batch import Batch, Jagged

GRPO = """
name: bad
base: BASE
nodes:
  poison: {run: "tests.end_to_end.bad_numbers:poison_advantages", after: advantage}
  policy: {run: update, role: policy, after: poison}
"""
PPO = """
name: bad
base: ppo
nodes:
  poison: {run: "tests.end_to_end.bad_numbers:poison_returns", after: advantage}
  critic: {run: update_critic, role: critic, after: poison}
"""


@leaderless.stage(reads=["advantages"], writes=["advantages"])
def poison_advantages(batch: Batch, context: leaderless.StageContext) -> Batch:
    return _poisoned(batch, "advantages")


@leaderless.stage(reads=["returns"], writes=["returns"])
def poison_returns(batch: Batch, context: leaderless.StageContext) -> Batch:
    return _poisoned(batch, "returns")


def _poisoned(batch: Batch, name: str) -> Batch:
    first, last = (int(number) for number in os.environ["BAD_PROMPTS"].split("-"))
    column = batch.jagged(name)
    is_bad = torch.repeat_interleave((batch.group_ids >= first) & (batch.group_ids <= last), column.lengths)
    values = torch.where(is_bad, float("nan"), column.values)
    return batch.with_columns({name: Jagged(values, column.lengths, column.axis)})
