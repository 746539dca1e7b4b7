"""The weight of the KL penalty, which may change from step to step."""

from __future__ import annotations

import math

from torch import Tensor, tensor

from leaderless.algorithms import adapted_coefficient
from leaderless.stages.context import StageContext

STATE = "kl_coefficient"


def coefficient_of(context: StageContext) -> float:
    """The weight in this step, from the state of the node that applies the penalty."""
    return context.state.get(STATE, context.recipe.algorithm.kl.coefficient)


def adapt_coefficient(context: StageContext, total: Tensor, num_tokens: int, num_samples: int) -> None:
    """Adapt the weight for the next step, if there is a target and the policy is trained in this step.

    While only the critic is trained, the divergence does not respond to the weight: adapting it would drive it further
    away with each step of the warm-up.

    Args:
        context: Context of the node that applies the penalty.
        total: Sum of the divergence over this rank's tokens.
        num_tokens: Number of these tokens.
        num_samples: Number of this rank's samples.
    """
    algorithm, coefficient = context.recipe.algorithm, coefficient_of(context)
    config = algorithm.kl
    if config.target is None:
        return
    context.metrics.max("policy/kl_coefficient", coefficient)
    if context.step <= algorithm.critic.warmup_steps:
        return
    divergence, tokens, samples = context.sum(tensor([float(total), num_tokens, num_samples]).double()).tolist()
    if not math.isfinite(divergence):
        return  # guards decide what happens to the step
    context.state[STATE] = adapted_coefficient(
        coefficient,
        divergence / max(tokens, 1.0),
        target=config.target,
        horizon=config.horizon,
        num_samples=int(samples),
    )
