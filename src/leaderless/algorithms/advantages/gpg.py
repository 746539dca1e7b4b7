"""GPG: centered rewards, scaled up for groups without a signal."""

from __future__ import annotations

from typing import ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput


class GpgAdvantage(Advantage):
    """Rewards minus their group's mean, scaled up to make up for groups without a signal.

    A mean over all groups shrinks the gradient by the share of groups with a signal; the scale undoes this.

    Formula: (r - mean) / signal_share.

    Source: GPG, arXiv 2504.02546, with F_norm = 1. The paper counts samples, B / (B - M), which is the same for groups
    of equal size.
    """

    type: Literal["gpg"] = "gpg"

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        groups = inputs.groups()
        return AdvantageOutput(groups.keep_signal(groups.centered() / max(inputs.signal_share(), 1e-12)))
