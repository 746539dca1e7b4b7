"""APO-zero: chosen responses become likelier, rejected ones less likely."""

from __future__ import annotations

from typing import Literal

from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceOutput, RatioLoss


class ApoZeroLoss(RatioLoss):
    """Both sides have an anchor of their own, the reference: for chosen responses that are better than the model's.

    Formula: 1 - sigmoid(beta log r_chosen) + sigmoid(beta log r_rejected), with r the ratio of policy to reference.

    Source: APO, arXiv 2408.06266, equation 7.
    """

    type: Literal["apo_zero"] = "apo_zero"

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        first, second = self.rewards(inputs)
        return PreferenceOutput((-first).sigmoid() + second.sigmoid(), first, second)
