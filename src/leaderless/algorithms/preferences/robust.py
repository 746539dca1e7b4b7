"""Robust DPO: an unbiased loss where some labels are wrong."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceOutput, RatioLoss, logistic


class RobustLoss(RatioLoss):
    """The logistic loss, corrected for labels that are the wrong way round: clean labels have the same expectation.

    It has no lower bound, and an identical pair has the loss ln 2.

    Formula: (-(1 - e) log sigmoid(h) + e log sigmoid(-h)) / (1 - 2 e), h = beta (log r_chosen - log r_rejected), with r
    the ratio of policy to reference and e the share of wrong labels.

    Source: robust DPO, arXiv 2403.00409, equation 11.
    """

    type: Literal["robust"] = "robust"
    label_smoothing: float = Field(default=0.1, gt=0, lt=0.5)
    """Share of pairs that are labeled the wrong way round."""

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        first, second = self.rewards(inputs)
        share, margin = self.label_smoothing, first - second
        loss = ((1 - share) * logistic(margin, 0.0) - share * logistic(-margin, 0.0)) / (1 - 2 * share)
        return PreferenceOutput(loss, first, second)
