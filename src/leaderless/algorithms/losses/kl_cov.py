"""KL-Cov: tokens of the highest covariance are penalized."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of
from leaderless.algorithms.policy_loss import ChoiceInputs, LossInputs, LossOutput, PolicyLoss, covariances_of

if TYPE_CHECKING:
    from torch import Tensor

_THRESHOLDS = 64
_ROUNDS = 8


class KlCovLoss(PolicyLoss):
    """The ratio objective with a penalty at the tokens of highest covariance.

    The covariance of a token is (log p - mean log p) (A - mean A), with the means over the mini-batch on all ranks.

    Formula: -ratio A, plus coefficient |log-ratio| at the chosen tokens, which count as clipped.

    Source: KL-Cov, arXiv 2505.22617. The paper's formula has the divergence to the old policy, its code the absolute
    log-ratio; this follows the code.
    """

    type: Literal["kl_cov"] = "kl_cov"
    fraction: float = Field(default=2e-3, gt=0, lt=1)
    """Share of all tokens that are penalized; at least one token is."""
    coefficient: float = Field(default=1.0, gt=0)
    """Weight of the penalty."""

    chooses_tokens: ClassVar[bool] = True

    def choose(self, inputs: ChoiceInputs) -> Tensor:
        """Choose the tokens of largest covariance, among the tokens of all ranks."""
        count, covariance = covariances_of(inputs)
        highest = inputs.sum_over_ranks(covariance.double().abs().sum())
        num_chosen = max(1, int(self.fraction * count))
        return covariance >= threshold_of_top(covariance, num_chosen, inputs.sum_over_ranks, float(highest))

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_ratio, is_chosen = inputs.log_ratio, inputs.is_chosen
        penalty = torch.where(is_chosen, self.coefficient * log_ratio.abs(), 0.0)
        return LossOutput(-ratio_of(log_ratio) * inputs.advantages + penalty, is_chosen)


def threshold_of_top(values: Tensor, count: int, reduce_sum: Callable[[Tensor], Tensor], highest: float) -> float:
    """A threshold that `count` values of all ranks reach, or fewer if values are equal, but never more.

    Values that differ by less than highest / 2^46 count as equal, and equal values either all reach the threshold or
    none does. It is found by counting values above 64 thresholds at a time: ranks exchange counts, not values.
    Values are [total] and finite, and `highest` bounds their magnitude on every rank; all ranks call `reduce_sum`
    equally often.
    """
    low, high = -highest, highest * (1 + 1e-9) + 1e-30
    for _ in range(_ROUNDS):
        thresholds = torch.linspace(low, high, _THRESHOLDS + 1, dtype=torch.float64, device=values.device)
        above = reduce_sum((values.double()[None, :] >= thresholds[:, None]).sum(dim=1).double())
        first = int((above <= count).double().argmax())
        low, high = float(thresholds[max(0, first - 1)]), float(thresholds[first])
    # Rounded up to the type of the values, because a comparison converts it to that type.
    rounded = torch.tensor(high, dtype=values.dtype)
    if rounded.double() < high:
        rounded = torch.nextafter(rounded, torch.tensor(torch.inf, dtype=values.dtype))
    return float(rounded)
