"""What goes into and around a policy loss: columns, the correction, and the weight of the KL penalty."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor

from leaderless import algorithms
from leaderless.algorithms import repeat_per_token
from leaderless.config import algorithm as settings
from leaderless.data.batch import Batch, Jagged
from leaderless.stages.context import StageContext

KL_STATE = "kl_coefficient"
"""Name, in the state of a node, of the weight of the KL penalty."""


def token_columns(rows: Batch, names: Sequence[str]) -> dict[str, Tensor]:
    """Columns as a loss gets them, [total, ...] each: the value of a sample stands at each of its response tokens.

    Raises:
        ValueError: A column has neither one value for each sample nor one for each response token.
    """
    lengths, found = rows.jagged("advantages").lengths, {}
    for name in names:
        match rows[name]:
            case Tensor() as values:
                found[name] = repeat_per_token(values, lengths)
            case Jagged(values=values, axis="response_tokens"):
                found[name] = values
            case _:
                raise ValueError(
                    f"column '{name}' has neither one value for each sample nor one for each response token, so a loss "
                    "cannot read it: compute such a column in a stage of the workflow, and read that"
                )
    return found


def correction_weights(config: settings.CorrectionConfig, old: Tensor, rollout: Tensor, lengths: Tensor) -> Tensor:
    """[total]: the weight of each token that corrects for its having been sampled by another policy.

    The log-probabilities, [total], are the trainer's before this step's updates and the engine's at sampling time;
    `lengths`, [n] int64, are the response tokens of each sample.
    """
    if config.type == "none":
        return torch.ones_like(old)
    ratios = algorithms.importance_ratios(old, rollout, lengths, config.level)
    match config.type:
        case "truncate":
            return algorithms.truncated_weights(ratios, highest=config.highest)
        case "mask":
            return algorithms.masked_weights(ratios, lowest=config.lowest, highest=config.highest)
        case "reject":
            return algorithms.is_within(ratios, config.lowest, config.highest).to(ratios.dtype)


def kl_coefficient(context: StageContext) -> float:
    """The weight of the KL penalty in this step, from the state of the node that applies it."""
    return context.state.get(KL_STATE, context.recipe.algorithm.kl.coefficient)


def adapt_kl_coefficient(context: StageContext, total: Tensor, num_tokens: int, num_episodes: int) -> None:
    """Adapt the weight of the KL penalty for the next step, if there is a target and the policy is trained in this one.

    While only the critic is trained, the divergence does not respond to the weight: adapting it would drive it further
    away with each step of the warm-up. `total` is the sum of the divergence over this rank's tokens; both numbers are
    this rank's too.
    """
    algorithm, coefficient = context.recipe.algorithm, kl_coefficient(context)
    config = algorithm.kl
    if config.target is None:
        return
    context.metrics.max("policy/kl_coefficient", coefficient)
    if context.step <= algorithm.critic.warmup_steps:
        return
    divergence, tokens, count = context.sum(torch.tensor([float(total), num_tokens, num_episodes]).double()).tolist()
    if not math.isfinite(divergence):
        return  # guards decide what happens to the step
    context.state[KL_STATE] = algorithms.adapted_coefficient(
        coefficient,
        divergence / max(tokens, 1),
        target=config.target,
        horizon=config.horizon,
        num_episodes=int(count),
    )
