"""Clip-Cov: some tokens of high covariance lose their gradient."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.correction import is_within
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.losses.ppo import clipped_policy_loss
from leaderless.algorithms.policy_loss import ChoiceInputs, LossInputs, LossOutput, PolicyLoss, covariances_of

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.settings import AlgorithmConfig


class ClipCovLoss(PolicyLoss):
    """The clipped ratio objective, without the gradient of some tokens of high covariance.

    The covariance of a token is (log p - mean log p) (A - mean A), with the means over the mini-batch on all ranks.

    Formula: -min(ratio A, clip(ratio, 1 - clip_low, 1 + clip_high) A), of which sg[...] at the chosen tokens, with a
    covariance in range and noise < probability.

    Source: Clip-Cov, arXiv 2505.22617. For the other tokens, the paper's formula has the plain surrogate and its code
    the clipped one; this follows the code. There, chosen tokens have loss 0; here they keep their value and lose only
    the gradient, so that losses remain comparable. The paper draws a fixed number of tokens; here each is drawn
    independently, with the probability that gives this number on average, so that ranks only have to agree on a count.
    The published code leaves out tokens whose ratio is already clipped; here they take part, as in the paper, so that
    some of the drawn tokens had no gradient to lose. The draw depends on the id of the sample and the place in it: if
    an episode is divided into other samples, other tokens are drawn.
    """

    type: Literal["clip_cov"] = "clip_cov"
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    """Lower clip range: the ratio is at least 1 - clip_low."""
    clip_high: float = Field(default=0.2, gt=0)
    """Upper clip range: the ratio is at most 1 + clip_high."""
    fraction: float = Field(default=2e-4, gt=0, lt=1)
    """Share of all tokens that lose their gradient."""
    lowest: float = Field(default=1.0, gt=0)
    """Least covariance of such a token."""
    highest: float = Field(default=5.0, gt=0)
    """Largest covariance of such a token."""

    chooses_tokens: ClassVar[bool] = True

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings of the algorithm, or with each other."""
        yield from super().refusals(algorithm)
        if self.lowest > self.highest:
            yield "algorithm.policy_loss.lowest is above highest, so that no token could be chosen: lower it"

    def choose(self, inputs: ChoiceInputs) -> Tensor:
        """Choose the tokens that lose their gradient, among the tokens of all ranks."""
        count, covariance = covariances_of(inputs)
        in_range = is_within(covariance, self.lowest, self.highest)
        num_in_range = float(inputs.sum_over_ranks(in_range.sum().double()))
        probability = self.fraction * count / max(num_in_range, 1.0)
        return in_range & (inputs.noise < probability)

    def compute(self, inputs: LossInputs) -> LossOutput:
        limits, is_chosen = {"clip_low": self.clip_low, "clip_high": self.clip_high}, inputs.is_chosen
        plain = clipped_policy_loss(inputs.log_ratio, inputs.advantages, **limits)
        return LossOutput(torch.where(is_chosen, plain.loss.detach(), plain.loss), plain.is_clipped | is_chosen)
