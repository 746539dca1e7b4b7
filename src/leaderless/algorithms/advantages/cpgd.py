"""CPGD: centered rewards, scaled up for groups without a signal, to a limit."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups

if TYPE_CHECKING:
    from torch import Tensor


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
        """Compute the advantages of this rank's responses."""
        options = {"signal_share": inputs.signal_share(), "max_weight": self.max_weight}
        return AdvantageOutput(cpgd_advantages(inputs.rewards, inputs.is_valid, inputs.group_ids, **options))


def cpgd_advantages(
    rewards: Tensor, is_valid: Tensor, group_ids: Tensor, *, signal_share: float, max_weight: float
) -> Tensor:
    """Centered and scaled rewards, [n] float32.

    `signal_share` is the share of groups with a signal, on all ranks; `max_weight` is at least 1.
    """
    groups = Groups.of(rewards, is_valid, group_ids)
    weight = min(max_weight, 1 / max(signal_share, 1e-12))
    return groups.keep_signal(weight * groups.centered())
