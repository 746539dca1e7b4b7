"""DPPO: a trust region of divergences instead of ratios."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of, widen
from leaderless.algorithms.policy_loss import BehaviorLoss, LossInputs, LossOutput

Divergence = Literal["total_variation", "kl"]
_LEAST = 1e-12
"""Smallest probability that a logarithm is taken of."""


class DppoLoss(BehaviorLoss):
    """The policy gradient without the tokens that would leave a trust region around the policy that sampled them.

    The region is a divergence of p, the current probability of the sampled token, from q, the engine's when it sampled
    it: all other tokens count as one. A ratio says little about it: rare tokens reach any ratio while hardly anything
    is shifted, and frequent ones shift much at a ratio near 1. Only tokens that are outside, and whose update would
    lead further away, lose their gradient.

    Formula: -m sg[min(r, max_ratio)] A log p, with r = p / q, and m = 0 where D > threshold and A (r - 1) > 0, else 1.
    D is |p - q| (`total_variation`), or q log(q / p) + (1 - q) log((1 - q) / (1 - p)) (`kl`).

    Source: DPPO with binary divergences, arXiv 2602.04879.
    """

    type: Literal["dppo"] = "dppo"
    divergence: Divergence = "total_variation"
    """Divergence that bounds the trust region."""
    threshold: float = Field(default=0.15, gt=0)
    """Largest divergence of a token; about 0.15 for `total_variation`, 0.05 for `kl`."""
    max_ratio: float = Field(default=10.0, ge=1)
    """Largest weight of a token."""

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_probs, rollout_log_probs = inputs.log_probs, inputs.columns["rollout_log_probs"]
        log_ratio = self.log_ratio_to_engine(inputs).detach()
        new, behavior = widen(log_probs).detach().exp(), widen(rollout_log_probs).exp()
        if self.divergence == "total_variation":
            distance = (new - behavior).abs()
        else:
            others = ((1 - behavior).clamp(min=_LEAST) / (1 - new).clamp(min=_LEAST)).log()
            distance = -behavior * log_ratio + (1 - behavior) * others
        is_masked = (distance > self.threshold) & (inputs.advantages * log_ratio > 0)
        weight = torch.where(is_masked, 0.0, ratio_of(log_ratio).clamp(max=self.max_ratio))
        return LossOutput(-weight * inputs.advantages * widen(log_probs), is_masked)
