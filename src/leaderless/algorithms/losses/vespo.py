"""VESPO: a smooth kernel of the ratio of whole responses."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import MAX_LOG_RATIO, repeat_per_token, segment_sum, widen
from leaderless.algorithms.policy_loss import BehaviorLoss, LossInputs, LossOutput


class VespoLoss(BehaviorLoss):
    """The policy gradient, weighted by a smooth kernel of the ratio of the whole response.

    The kernel is 1 at ratio 1, largest at power / rate, and falls to 0 on both sides. No token counts as clipped.

    Formula: -sg[k(w)] A log p, with k(w) = w^power e^(rate (1 - w)), and w the product of the response's ratios; one
    power and rate for A >= 0, others for A < 0.

    Source: VESPO, arXiv 2602.10693, the kernel of its code, with its defaults. There a ratio to an engine that differs
    from the trainer is a factor of w, as here. Two deviations: only log w is cut at +-20, not the log-ratio of each
    token too, and each sample of an episode is judged by itself.
    """

    type: Literal["vespo"] = "vespo"
    power_positive: float = Field(default=2.0, gt=0)
    """How fast the kernel falls towards ratio 0, for tokens with A >= 0."""
    rate_positive: float = Field(default=3.0, gt=0)
    """How fast the kernel falls towards large ratios, for tokens with A >= 0."""
    power_negative: float = Field(default=3.0, gt=0)
    """How fast the kernel falls towards ratio 0, for all others."""
    rate_negative: float = Field(default=2.0, gt=0)
    """How fast the kernel falls towards large ratios, for all others."""

    metrics: ClassVar[Mapping[str, str]] = {"kernel": "mean kernel of a token's response"}

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_ratio, lengths = self.log_ratio_to_engine(inputs).detach(), inputs.lengths
        log_w = segment_sum(log_ratio, lengths).clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO)
        log_w = repeat_per_token(log_w, lengths, len(log_ratio))
        of_good, of_bad = (
            power * log_w + rate * (1 - log_w.exp())
            for power, rate in (
                (self.power_positive, self.rate_positive),
                (self.power_negative, self.rate_negative),
            )
        )
        weight = torch.where(inputs.advantages >= 0, of_good, of_bad).exp()
        return LossOutput.without_clipping(-weight * inputs.advantages * widen(inputs.log_probs), {"kernel": weight})
