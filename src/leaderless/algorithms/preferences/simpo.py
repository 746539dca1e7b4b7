"""SimPO: mean log-probabilities as rewards, without a reference."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.packed import widen
from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceLoss, PreferenceOutput, logistic


class SimpoLoss(PreferenceLoss):
    """The reward of a response is what generation goes by: the mean log-probability of its tokens.

    Formula: -(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta (log p_chosen / T_chosen - log p_rejected /
    T_rejected) - gamma, with p the probability under the policy, T the number of tokens and e the label smoothing.

    Source: SimPO, arXiv 2405.14734, equation 6; label smoothing as in its code.
    """

    type: Literal["simpo"] = "simpo"
    uses_reference: ClassVar[bool] = False
    beta: float = Field(default=2.0, gt=0)
    """Scale of log-probabilities."""
    gamma: float = Field(default=1.0, ge=0)
    """Margin by which the chosen reward is to be larger; the paper's best values are half of beta and more."""
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be labeled the wrong way round."""

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        first = self.beta * widen(inputs.first) / inputs.first_lengths
        second = self.beta * widen(inputs.second) / inputs.second_lengths
        return PreferenceOutput(logistic(first - second - self.gamma, self.label_smoothing), first, second)
