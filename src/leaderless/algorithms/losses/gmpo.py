"""GMPO: the geometric mean of clipped ratios."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of, repeat_per_token, segment_mean
from leaderless.algorithms.policy_loss import LossInputs, LossOutput, ResponseLoss

if TYPE_CHECKING:
    from leaderless.algorithms.settings import AlgorithmConfig


class GmpoLoss(ResponseLoss):
    """The geometric mean of the tokens' clipped ratios; all tokens of a response have the same advantage and loss.

    Formula: -A exp(mean of c), with c the log-ratio, at most clip_high if A > 0 and at least -clip_low if A < 0.

    Source: GMPO, arXiv 2507.20673: the clipped product of its objective. For A < 0 its published code cuts at the other
    bound, which has the same value in all its experiments; this follows the paper. The bounds apply to the
    log-ratio: the paper's range (e^-0.4, e^0.4) is 0.4 and 0.4.
    """

    type: Literal["gmpo"] = "gmpo"
    clip_low: float = Field(default=0.4, gt=0)
    """Lower clip range: the log-ratio is at least -clip_low."""
    clip_high: float = Field(default=0.4, gt=0)
    """Upper clip range: the log-ratio is at most clip_high."""

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings of the algorithm."""
        yield from super().refusals(algorithm)
        if algorithm.advantage.is_per_token:
            yield (
                f"algorithm.policy_loss.type={self.type} needs one advantage for all tokens of a response, and "
                f"advantage.type={algorithm.advantage.type} gives each token its own: use ppo, or another advantage"
            )

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_ratio, advantages, lengths = inputs.log_ratio, inputs.advantages, inputs.lengths
        low, high = log_ratio.clamp(min=-self.clip_low), log_ratio.clamp(max=self.clip_high)
        clipped = torch.where(advantages > 0, high, low)
        mean = repeat_per_token(segment_mean(clipped, lengths), lengths, len(clipped))
        return LossOutput(-ratio_of(mean) * advantages, (clipped != log_ratio) & (advantages != 0))
