"""The mathematics: pure functions of tensors, in packed form. Nothing here knows of ranks, models or recipes."""

from leaderless.algorithms.advantages import (
    count_groups_without_signal,
    cpgd_advantages,
    distillation_advantages,
    gpg_advantages,
    grpo_advantages,
    opo_advantages,
    pass_at_k_advantages,
    rejection_advantages,
    remax_advantages,
    rloo_advantages,
)
from leaderless.algorithms.aggregation import Aggregation, Denominators, token_weights
from leaderless.algorithms.correction import (
    CorrectionLevel,
    importance_ratios,
    is_within,
    masked_weights,
    truncated_weights,
)
from leaderless.algorithms.covariance import (
    choose_for_clip_cov,
    clip_cov_loss,
    covariances,
    kl_cov_loss,
    threshold_of_top,
)
from leaderless.algorithms.groups import Groups, count_groups
from leaderless.algorithms.kl import KlEstimator, adapted_coefficient, kl_penalty
from leaderless.algorithms.moments import Moments, whiten
from leaderless.algorithms.padded import pack, unpack
from leaderless.algorithms.policy_loss import (
    PolicyLoss,
    cispo_loss,
    clipped_policy_loss,
    cpgd_loss,
    reinforce_loss,
    sapo_loss,
)
from leaderless.algorithms.returns import gae_advantages, reinforce_advantages, token_level_rewards
from leaderless.algorithms.scores import majority_is_correct, pass_at_k
from leaderless.algorithms.segments import add_to_last, decayed_sum, repeat_per_token, segment_mean, segment_sum
from leaderless.algorithms.sequence_loss import gmpo_loss, gspo_loss
from leaderless.algorithms.shaping import overlong_penalty
from leaderless.algorithms.value_loss import clipped_value_loss

__all__ = [
    "Aggregation",
    "CorrectionLevel",
    "Denominators",
    "Groups",
    "KlEstimator",
    "Moments",
    "PolicyLoss",
    "adapted_coefficient",
    "add_to_last",
    "choose_for_clip_cov",
    "cispo_loss",
    "clip_cov_loss",
    "clipped_policy_loss",
    "clipped_value_loss",
    "count_groups",
    "count_groups_without_signal",
    "covariances",
    "cpgd_advantages",
    "cpgd_loss",
    "decayed_sum",
    "distillation_advantages",
    "gae_advantages",
    "gmpo_loss",
    "gpg_advantages",
    "grpo_advantages",
    "gspo_loss",
    "importance_ratios",
    "is_within",
    "kl_cov_loss",
    "kl_penalty",
    "majority_is_correct",
    "masked_weights",
    "opo_advantages",
    "overlong_penalty",
    "pack",
    "pass_at_k",
    "pass_at_k_advantages",
    "reinforce_advantages",
    "reinforce_loss",
    "rejection_advantages",
    "remax_advantages",
    "repeat_per_token",
    "rloo_advantages",
    "sapo_loss",
    "segment_mean",
    "segment_sum",
    "threshold_of_top",
    "token_level_rewards",
    "token_weights",
    "truncated_weights",
    "unpack",
    "whiten",
]
