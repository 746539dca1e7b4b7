"""RLOO: a leave-one-out baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups

if TYPE_CHECKING:
    from torch import Tensor


class RlooAdvantage(Advantage):
    """Rewards minus the mean of the group's other rewards.

    Formula: n / (n - 1) (r - mean).

    Source: RLOO, Ahmadian et al., arXiv 2402.14740; Kool et al., "Buy 4 REINFORCE samples, get a baseline for free",
    2019. n counts the rewards that did not fail.
    """

    type: Literal["rloo"] = "rloo"

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses."""
        return AdvantageOutput(rloo_advantages(inputs.rewards, inputs.is_valid, inputs.group_ids))


def rloo_advantages(rewards: Tensor, is_valid: Tensor, group_ids: Tensor) -> Tensor:
    """Leave-one-out advantages, [n] float32: each reward minus the mean of the others in its group."""
    groups = Groups.of(rewards, is_valid, group_ids)
    scale = groups.count / (groups.count - 1).clamp(min=1)
    return groups.keep_signal(groups.centered() * scale[groups.index])
