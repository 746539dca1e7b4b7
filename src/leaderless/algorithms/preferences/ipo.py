"""IPO: a squared loss with a target."""

from __future__ import annotations

from typing import Literal

from leaderless.algorithms.preference_loss import PreferenceInputs, PreferenceLoss, PreferenceOutput


class IpoLoss(PreferenceLoss):
    """The difference of log-ratios is led to a finite target, so that certain preferences do not drive it further.

    Formula: (log r_chosen / T_chosen - log r_rejected / T_rejected - 1 / (2 beta))^2, with r the ratio of policy to
    reference and T the number of tokens.

    Source: IPO, arXiv 2310.12036, equation 17, whose tau is beta here. Log-ratios are means over tokens, which its
    equation does not say, as its authors did for their results.
    """

    type: Literal["ipo"] = "ipo"

    def compute(self, inputs: PreferenceInputs) -> PreferenceOutput:
        first, second = inputs.first_ratio / inputs.first_lengths, inputs.second_ratio / inputs.second_lengths
        loss = (first - second - 1 / (2 * self.beta)).square()
        return PreferenceOutput(loss, self.beta * first, self.beta * second)
