"""SLiC: the hinge loss."""

from __future__ import annotations

from typing import Literal

from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceOutput, RatioLoss


class HingeLoss(RatioLoss):
    """Pairs whose rewards differ by more than 1 have no gradient.

    Formula: max(0, 1 - beta (log r_chosen - log r_rejected)), with r the ratio of policy to reference.

    Source: SLiC-HF, arXiv 2305.10425, equation 2, with the ratios of DPO in place of log-probabilities, as RSO, arXiv
    2309.06657, equation 10; `sft_coefficient` is its regularization.
    """

    type: Literal["hinge"] = "hinge"

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        first, second = self.rewards(inputs)
        return PreferenceOutput((1 - (first - second)).relu(), first, second)
