"""Where a workflow runs: layouts, columns, chains, bytes and memory. Pure Python, no torch."""

from leaderless.planner.layout import Cluster, Layout, format_ranks
from leaderless.planner.make_plan import make_plan
from leaderless.planner.plan import Action, Edge, Load, Plan, PlannedNode, Reshard, RoleInstance, Run, SyncWeights

__all__ = [
    "Action",
    "Cluster",
    "Edge",
    "Layout",
    "Load",
    "Plan",
    "PlannedNode",
    "Reshard",
    "RoleInstance",
    "Run",
    "SyncWeights",
    "format_ranks",
    "make_plan",
]
