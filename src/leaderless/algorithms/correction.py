"""Correction for samples that another policy drew than the trainer's: an engine with other arithmetic or older weights.

The weight of a token is the ratio w = p_old / p_rollout of the trainer's probability before this step's updates to the
engine's probability at sampling time. It multiplies the loss; a dropped token has weight 0 and still counts in the
denominator of the mean. Decoupled PPO (AReaL, arXiv 2505.24298) is the clipped loss with such a weight: its proximal
policy is the trainer's before this step's updates.

Log-probabilities, ratios and weights are [total], at least float32 and without gradient; `lengths`, [n] int64, are the
response tokens of each sample; bounds are inclusive and at least 0.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import log_ratio_of, ratio_of, repeat_per_token, segment_mean, segment_sum, widen

if TYPE_CHECKING:
    from torch import Tensor


CorrectionLevel = Literal["token", "sequence", "geometric"]


def importance_ratios(
    old_log_probs: Tensor, rollout_log_probs: Tensor, lengths: Tensor, level: CorrectionLevel
) -> Tensor:
    """How much more likely each token, or its response, is for the trainer than it was for the engine.

    - `token`: p_old / p_rollout of the token; Yao et al., "Your Efficient RL Framework Secretly Brings You Off-Policy
      RL Training", 2025.
    - `sequence`: the product over the response; Yao et al., 2025.
    - `geometric`: the product to the power of 1 / length; Li et al., "When Speed Kills Stability", 2025.

    Source: as named. One deviation: the logarithm of a ratio is cut at +-20.

    At other levels than `token`, all tokens of a sample have the same ratio. Each sample of an episode has its own
    ratio, since its tokens were drawn in a context of their own; so ratios depend on how an episode is divided into
    samples.
    """
    difference = log_ratio_of(old_log_probs, rollout_log_probs).detach()
    match level:
        case "token":
            return ratio_of(difference)
        case "sequence":
            per_sample = segment_sum(difference, lengths)
        case "geometric":
            per_sample = segment_mean(difference, lengths)
    return ratio_of(repeat_per_token(per_sample, lengths, len(difference)))


def truncated_weights(ratios: Tensor, *, highest: float) -> Tensor:
    """Weights cut off at an upper bound.

    Formula: min(w, highest).

    Source: Espeholt et al., arXiv 1802.01561 (V-trace), with the trainer's policy as target.
    """
    return ratios.clamp(max=highest)


def masked_weights(ratios: Tensor, *, lowest: float, highest: float) -> Tensor:
    """Weights that are 0 outside a range.

    Formula: w if lowest <= w <= highest, else 0.

    Source: IcePop, in "Every Step Evolves", arXiv 2510.18855.
    """
    return torch.where(is_within(ratios, lowest, highest), ratios, 0.0)


def is_within(ratios: Tensor, lowest: float, highest: float) -> Tensor:
    """The tokens that rejection keeps, with their weight unchanged.

    Formula: lowest <= w <= highest.

    Source: Li et al., "When Speed Kills Stability", 2025, which rejects whole responses by the geometric level.
    """
    return (ratios >= lowest) & (ratios <= highest)


def interpolated_log_probs(
    log_probs: Tensor, rollout_log_probs: Tensor, versions: Tensor, *, before: int, now: int
) -> Tensor:
    """The log-probabilities before a step's updates, between the sampling engine's and the current ones.

    Formula: log q + a (log p - log q), with a = (before - version) / (now - version), the share of the way from the
    weights that sampled the token, in updates, that lay behind before the step; 1 if nothing has been updated since.

    Source: A-3PO, arXiv 2512.06547, where `before` is the version one update ago.

    Args:
        log_probs: Log-probabilities under the current policy; the result has no gradient.
        rollout_log_probs: Log-probabilities of the engine at sampling time.
        versions: Version of the weights that sampled each token, int: a count of the optimizer updates behind them.
        before: Version at the beginning of the step, at least the version of each token.
        now: Current version.
    """
    new, behavior = widen(log_probs).detach(), widen(rollout_log_probs)
    way = (now - versions).to(new.dtype)
    share = torch.where(way > 0, (before - versions) / way.clamp(min=1), 1.0)
    return torch.lerp(behavior, new, share.to(new.dtype))
