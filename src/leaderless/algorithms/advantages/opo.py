"""OPO: a length-weighted baseline."""

from __future__ import annotations

from typing import ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput


class OpoAdvantage(Advantage):
    """Rewards minus the group's length-weighted mean, the baseline of least variance on policy.

    Formula: r - sum(l r) / sum(l), with l the response's tokens.

    Source: OPO, arXiv 2505.23585, in its practical form: gradients of tokens are taken to be orthogonal and equally
    large.
    """

    type: Literal["opo"] = "opo"

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        groups, lengths = inputs.groups(), inputs.lengths
        baseline = groups.sum(groups.values * lengths) / groups.sum(lengths.double()).clamp(min=1)
        return AdvantageOutput(groups.keep_signal(groups.values - baseline[groups.index]))
