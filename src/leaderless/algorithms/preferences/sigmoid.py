"""DPO: the logistic loss."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceOutput, RatioLoss, logistic


class SigmoidLoss(RatioLoss):
    """The likelihood of the preferences, if the policy's rewards make them as Bradley and Terry assume.

    An identical pair has the loss ln 2.

    Formula: -(1 - e) log sigmoid(h) - e log sigmoid(-h), h = beta (log r_chosen - log r_rejected), with r the ratio of
    policy to reference and e the label smoothing.

    Source: DPO, arXiv 2305.18290, equation 7; label smoothing as in its code, conservative DPO. Length normalization as
    in Tulu 3, arXiv 2411.15124, section 5.1.2.
    """

    type: Literal["sigmoid"] = "sigmoid"
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)
    """Share of pairs that are taken to be labeled the wrong way round."""

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        first, second = self.rewards(inputs)
        return PreferenceOutput(logistic(first - second, self.label_smoothing), first, second)
