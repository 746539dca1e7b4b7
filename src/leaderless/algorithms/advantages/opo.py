"""OPO: a length-weighted baseline."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups

if TYPE_CHECKING:
    from torch import Tensor


class OpoAdvantage(Advantage):
    """Rewards minus the group's length-weighted mean, the baseline of least variance on policy.

    Formula: r - sum(l r) / sum(l), with l the response's tokens.

    Source: OPO, arXiv 2505.23585, in its practical form: gradients of tokens are taken to be orthogonal and equally
    large.
    """

    type: Literal["opo"] = "opo"

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses."""
        return AdvantageOutput(opo_advantages(inputs.rewards, inputs.is_valid, inputs.lengths, inputs.group_ids))


def opo_advantages(rewards: Tensor, is_valid: Tensor, lengths: Tensor, group_ids: Tensor) -> Tensor:
    """Advantages over a length-weighted baseline, [n] float32; `lengths`, [n] int64, are response tokens."""
    groups = Groups.of(rewards, is_valid, group_ids)
    baseline = groups.sum(groups.values * lengths) / groups.sum(lengths.double()).clamp(min=1)
    return groups.keep_signal(groups.values - baseline[groups.index])
