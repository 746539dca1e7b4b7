"""The loads of experts in the updates of a model that has them."""

from __future__ import annotations

import math

from leaderless.data.batch import Batch
from leaderless.stages.context import StageContext
from leaderless.training.engine import Trainable
from leaderless.training.routed import RoutedEngine


def balance(engine: Trainable, rows: Batch, context: StageContext) -> None:
    """Pull the loads of experts together in the next update, as far as `algorithm.expert_balance` asks."""
    coefficient = context.recipe.algorithm.expert_balance
    if coefficient and isinstance(engine, RoutedEngine):
        engine.balance_experts(rows, coefficient)


def report_loads(engine: Trainable, context: StageContext) -> None:
    """Report how even the loads of an update were, whose gradient has been added up."""
    loads = engine.expert_loads() if isinstance(engine, RoutedEngine) else None
    if loads is None or not bool(loads[0].any()):
        return
    shares, probabilities = (one / one.sum(1, keepdim=True) for one in loads.double())
    num_experts = shares.shape[1]
    entropy = -(shares * shares.clamp(min=1e-30).log()).sum(1) / math.log(max(2, num_experts))
    numbers = {
        "expert_entropy": entropy.mean(),
        "expert_peak": shares.amax(1).mean() * num_experts,
        "expert_balance": (shares * probabilities).sum(1).mean() * num_experts,
    }
    for name, value in numbers.items():
        context.metrics.mean(f"{context.node.node.role}/{name}", value, 1)
