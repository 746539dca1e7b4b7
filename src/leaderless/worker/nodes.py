"""The code of the nodes that a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from importlib import import_module

from leaderless.data.batch import Batch
from leaderless.planner import Plan
from leaderless.stages.context import StageContext

StageFunction = Callable[[Batch, StageContext], Batch]
FAILED_REWARDS = "reward/failed_share"
"""Share of a step's responses whose reward failed, whichever stage reports it."""


def load_stages(plan: Plan, rank: int) -> Mapping[str, StageFunction]:
    """Import the stage functions of a rank's nodes.

    Args:
        plan: Plan of the run.
        rank: Rank of this worker.

    Returns:
        By node.
    """
    stages: dict[str, StageFunction] = {}
    for node in plan.nodes:
        if rank in node.layout:
            module, _, name = node.spec.implementation.partition(":")
            stage: StageFunction = getattr(import_module(module), name)
            stages[node.name] = partial(_count_failures, stage) if "reward_valid" in node.writes else stage
    return stages


def _count_failures(stage: StageFunction, batch: Batch, context: StageContext) -> Batch:
    """Run a stage that writes which rewards are valid, and report how many are not."""
    made = stage(batch, context)
    is_valid = made.dense("reward_valid")
    context.metrics.mean(FAILED_REWARDS, (~is_valid).sum(), len(is_valid))
    return made
