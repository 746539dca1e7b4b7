"""RLOO: a leave-one-out baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput


class RlooAdvantage(Advantage):
    """Rewards minus the mean of the group's other rewards.

    Formula: n / (n - 1) (r - mean).

    Source: RLOO, Ahmadian et al., arXiv 2402.14740; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free",
    2019. n counts the rewards that did not fail.
    """

    type: Literal["rloo"] = "rloo"

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        groups = inputs.groups()
        scale = groups.count / (groups.count - 1).clamp(min=1)
        return AdvantageOutput(groups.keep_signal(groups.centered() * scale[groups.index]))
