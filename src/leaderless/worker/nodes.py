"""The code of the nodes that a rank runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib import import_module

from leaderless.data.batch import Batch
from leaderless.planner import Plan
from leaderless.stages.context import StageContext

StageFunction = Callable[[Batch, StageContext], Batch]


def load_stages(plan: Plan, rank: int) -> Mapping[str, StageFunction]:
    """Import the stage functions of a rank's nodes.

    Args:
        plan: Names them.
        rank: Whose nodes are meant.

    Returns:
        By node.
    """
    stages: dict[str, StageFunction] = {}
    for node in plan.nodes:
        if rank in node.layout:
            module, _, name = node.spec.implementation.partition(":")
            stages[node.name] = getattr(import_module(module), name)
    return stages
