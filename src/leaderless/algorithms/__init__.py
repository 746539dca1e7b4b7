"""The mathematics: pure functions of tensors, in packed form. Nothing here knows of ranks, models or recipes."""

from leaderless.algorithms.advantages import count_groups_without_signal, grpo_advantages
from leaderless.algorithms.aggregation import Aggregation, Denominators, token_weights
from leaderless.algorithms.policy_loss import PolicyLoss, clipped_policy_loss, k3_penalty
from leaderless.algorithms.scores import majority_is_correct, pass_at_k
from leaderless.algorithms.segments import repeat_per_token, segment_sum

__all__ = [
    "Aggregation",
    "Denominators",
    "PolicyLoss",
    "clipped_policy_loss",
    "count_groups_without_signal",
    "grpo_advantages",
    "k3_penalty",
    "majority_is_correct",
    "pass_at_k",
    "repeat_per_token",
    "segment_sum",
    "token_weights",
]
