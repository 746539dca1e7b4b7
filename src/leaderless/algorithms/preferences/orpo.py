"""ORPO: imitation and a ratio of odds, without a reference."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import widen
from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceLoss, PreferenceOutput, logistic

if TYPE_CHECKING:
    from torch import Tensor

_HIGHEST = -1e-6
"""Mean log-probability beyond which odds stay as they are: at probability 1 they are infinite."""


class OrpoLoss(PreferenceLoss):
    """Imitation of the chosen response, and odds that are to be larger than the rejected one's.

    Formula: -beta log sigmoid(log odds(P_chosen) - log odds(P_rejected)) + sft_coefficient NLL_chosen, with P the
    geometric mean of the probabilities of a response's tokens and odds(P) = P / (1 - P).

    Source: ORPO, arXiv 2403.07691, equations 6 and 7, whose lambda is beta here. The likelihood is a mean over the
    tokens of all chosen responses of the mini-batch, where the paper has the mean of each response first; prompts are
    not imitated.
    """

    type: Literal["orpo"] = "orpo"
    uses_reference: ClassVar[bool] = False
    beta: float = Field(default=0.1, gt=0)
    """Weight of the ratio of odds."""
    sft_coefficient: float = Field(default=1.0, ge=0)
    """Weight of imitation."""

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        """Compute the loss of each pair, without imitation."""
        first = widen(inputs.first) / inputs.first_lengths
        second = widen(inputs.second) / inputs.second_lengths
        loss = self.beta * logistic(_log_odds(first) - _log_odds(second), 0.0)
        return PreferenceOutput(loss, self.beta * first, self.beta * second)


def _log_odds(log_probs: Tensor) -> Tensor:
    """[n] logarithm of p / (1 - p)."""
    log_probs = log_probs.clamp(max=_HIGHEST)
    return log_probs - torch.log(-torch.expm1(log_probs))
