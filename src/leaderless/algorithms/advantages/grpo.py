"""GRPO: rewards relative to their group."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups

if TYPE_CHECKING:
    from torch import Tensor


class GrpoAdvantage(Advantage):
    """Rewards relative to their group: (r - mean) / std.

    Formula: (r - mean) / (std + epsilon), or r - mean.

    Source: DeepSeekMath, arXiv 2402.03300, section 4.1.2 (outcome supervision); Dr. GRPO, arXiv 2503.20783, section
    3.2. GRPO's paper does not say which standard deviation it means; this is the sample's (n - 1), as is common.
    """

    type: Literal["grpo"] = "grpo"
    normalize_by_std: bool = True
    """Divide by the group's standard deviation, as in GRPO; Dr. GRPO does not."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Constant added to that standard deviation."""

    compares_siblings: ClassVar[bool] = True

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        epsilon = self.epsilon if self.normalize_by_std else None
        return AdvantageOutput(grpo_advantages(inputs.rewards, inputs.is_valid, inputs.group_ids, epsilon))


def grpo_advantages(rewards: Tensor, is_valid: Tensor, group_ids: Tensor, epsilon: float | None) -> Tensor:
    """Group-relative advantages, [n] float32; without an `epsilon`, above 0, they are not divided, as in Dr. GRPO."""
    groups = Groups.of(rewards, is_valid, group_ids)
    advantages = groups.centered()
    if epsilon is not None:
        advantages = advantages / (groups.std() + epsilon)[groups.index]
    return groups.keep_signal(advantages)
