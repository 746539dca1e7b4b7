"""Covariances of log-probability and advantage; tokens of a large one lower the entropy most.

They are taken with respect to the means over the mini-batch on all ranks, so that they depend on neither micro-batches
nor ranks.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.policy_loss import ChoiceInputs


def covariances(log_probs: Tensor, advantages: Tensor, *, mean_log_prob: float, mean_advantage: float) -> Tensor:
    """The contribution, without gradient, of each token to the covariance of log-probability and advantage.

    Formula: (log p - mean log p) (A - mean A).

    Source: "The Entropy Mechanism of Reinforcement Learning for Reasoning Language Models", arXiv 2505.22617, the
    definition of token-wise covariance before Clip-Cov.
    """
    return (widen(log_probs.detach()) - mean_log_prob) * (widen(advantages) - mean_advantage)


def covariances_of(inputs: ChoiceInputs) -> tuple[float, Tensor]:
    """Number of tokens of the mini-batch on all ranks, and the covariance of each of this rank's, [total]."""
    log_probs, advantages = inputs.log_probs, inputs.advantages
    sums = torch.tensor([float(len(log_probs)), float(log_probs.double().sum()), float(advantages.double().sum())])
    count, total, gain = inputs.sum_over_ranks(sums.double()).tolist()
    means = {"mean_log_prob": total / max(count, 1.0), "mean_advantage": gain / max(count, 1.0)}
    return count, covariances(log_probs, advantages, **means)
