"""CPGD: centered rewards, scaled up for groups without a signal, to a limit."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput


class CpgdAdvantage(Advantage):
    """Rewards minus their group's mean, scaled up to make up for groups without a signal, to a limit.

    Formula: min(max_weight, 1 / signal_share) (r - mean).

    Source: CPGD, arXiv 2505.12504, its clip-filter-like weighting. Its two other weightings are 1 (Dr. GRPO) and
    1 / std (GRPO). The paper does not say over what the share is taken; here it is over the groups of the step, on all
    ranks.
    """

    type: Literal["cpgd"] = "cpgd"
    max_weight: float = Field(default=3.0, ge=1)
    """Largest weight."""

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        groups, weight = inputs.groups(), min(self.max_weight, 1 / max(inputs.signal_share(), 1e-12))
        return AdvantageOutput(groups.keep_signal(weight * groups.centered()))
