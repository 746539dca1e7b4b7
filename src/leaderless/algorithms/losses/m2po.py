"""M2PO: a bound on the second moment of log-ratios."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of
from leaderless.algorithms.policy_loss import BehaviorLoss, ChoiceInputs, LossInputs, LossOutput

if TYPE_CHECKING:
    from torch import Tensor

_THRESHOLDS = 256
_ROUNDS = 8
_BITS_OF_INFINITY = 0x7FF0000000000000


class M2poLoss(BehaviorLoss):
    """The ratio objective, without the tokens of largest log-ratio in a mini-batch.

    Only tokens whose update would lead further away are considered, those with A > 0 and ratio > 1, or A < 0 and
    ratio < 1. As few of them as possible are masked such that the mean squared log-ratio of the others is at most a
    bound. In place of a limit on every token there is one on the mini-batch, so that few tokens are masked although
    samples are old.

    Formula: -m ratio A, with m = 0 for the tokens masked, and else 1.

    Source: M2PO, arXiv 2510.01161, algorithm 1 and its objective. As there, the bound is on the mean over the tokens
    considered, and masked ones count in the mean of the loss. A deviation: of tokens with equal squared log-ratios, all
    are masked or none, so that order and ranks do not matter. The published code differs from the paper: it clips, at
    a bound that it finds in each micro-batch, with a least clip range. Here the mini-batch is that of an update, on all
    ranks.
    """

    type: Literal["m2po"] = "m2po"
    threshold: float = Field(default=0.04, gt=0)
    """Largest mean squared log-ratio of the tokens that would lead further away."""

    metrics: ClassVar[Mapping[str, str]] = {"second_moment": "mean squared log-ratio to the engine that sampled"}
    chooses_tokens: ClassVar[bool] = True

    def choose(self, inputs: ChoiceInputs) -> Tensor:
        """Choose the tokens that are masked, among the tokens of all ranks."""
        log_ratio = self.log_ratio_to_engine(inputs)
        leads_away, squares = inputs.advantages * log_ratio > 0, log_ratio.double().square()
        limit = largest_within(squares[leads_away], self.threshold, inputs.sum_over_ranks)
        return leads_away & (squares > limit)

    def compute(self, inputs: LossInputs) -> LossOutput:
        log_ratio, is_masked = self.log_ratio_to_engine(inputs), inputs.is_chosen
        loss = torch.where(is_masked, 0.0, -ratio_of(log_ratio) * inputs.advantages)
        return LossOutput(loss, is_masked, {"second_moment": log_ratio.detach().square()})


def largest_within(values: Tensor, bound: float, reduce_sum: Callable[[Tensor], Tensor]) -> float:
    """The largest limit such that the values up to it, of all ranks, have a mean of at most a bound.

    The mean of the values up to a limit grows with the limit, so that the limit is found by trying 256 of them at a
    time: ranks exchange counts and sums, not values. Bit patterns of numbers from 0 on are in the order of the numbers,
    so that 8 rounds find it exactly.

    Args:
        values: [n] of this rank, not negative and finite.
        bound: Largest mean, above 0.
        reduce_sum: Function that sums a tensor over all ranks, which call it equally often.

    Returns:
        The limit; infinity if the mean of all values is at most the bound.
    """
    ordered = values.double().sort().values
    sums = torch.cat([ordered.new_zeros(1), ordered.cumsum(0)])
    low, high = 0, _BITS_OF_INFINITY
    for _ in range(_ROUNDS):
        step = max(1, -((low - high) // _THRESHOLDS))
        bits = [min(high, low + step * i) for i in range(_THRESHOLDS + 1)]
        limits = torch.tensor(bits, dtype=torch.int64, device=values.device).view(torch.float64)
        counts = torch.searchsorted(ordered, limits, right=True)
        total, count = reduce_sum(torch.stack([sums[counts], counts.double()]))
        is_within = total <= bound * count
        last = int(is_within.long().cumprod(0).sum()) - 1
        low, high = bits[last], bits[min(last + 1, _THRESHOLDS)]
    return float(torch.tensor(low, dtype=torch.int64).view(torch.float64))
