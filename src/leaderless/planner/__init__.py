"""Where a workflow runs: layouts, columns, chains, bytes and memory. Pure Python, no torch."""

from leaderless.planner.layout import Cluster, Layout, format_ranks
from leaderless.planner.make_plan import make_plan
from leaderless.planner.memory import format_bytes
from leaderless.planner.plan import (
    Action,
    Edge,
    Load,
    Loop,
    Plan,
    PlannedNode,
    Reshard,
    RoleInstance,
    RunNode,
    SyncWeights,
    Windowed,
    flat,
)

__all__ = [
    "Action",
    "Cluster",
    "Edge",
    "Layout",
    "Load",
    "Loop",
    "Plan",
    "PlannedNode",
    "Reshard",
    "RoleInstance",
    "RunNode",
    "SyncWeights",
    "Windowed",
    "flat",
    "format_bytes",
    "format_ranks",
    "make_plan",
]
