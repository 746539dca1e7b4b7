"""The policy before a step's updates, estimated from those that are known anyway.

Log-probabilities and versions are [total]. A version counts the optimizer updates behind some weights.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen

if TYPE_CHECKING:
    from torch import Tensor


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
        versions: Version of the weights that sampled each token, int.
        before: Version at the beginning of the step, at least the version of each token.
        now: Current version.
    """
    new, behavior = widen(log_probs).detach(), widen(rollout_log_probs)
    way = (now - versions).to(new.dtype)
    share = torch.where(way > 0, (before - versions) / way.clamp(min=1), 1.0)
    return torch.lerp(behavior, new, share.to(new.dtype))
