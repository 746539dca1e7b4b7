"""REINFORCE++: whitened returns to go."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.packed import Groups, decayed_sum

if TYPE_CHECKING:
    from leaderless.algorithms.algorithm import CheckedRecipe


class ReinforceAdvantage(Advantage):
    """REINFORCE++: returns to go, whitened over all tokens of the step.

    Formula: A_t = (G_t - mean) / (std + epsilon), with G_t = r_t + discount G_{t+1}.

    Source: REINFORCE++, arXiv 2501.03262, whose discount is 1. Its paper does not say whether its batch consists of
    responses or of tokens; its code normalizes over tokens, as this does, over those that train.
    """

    type: Literal["reinforce_pp"] = "reinforce_pp"
    group_baseline: bool = False
    """Subtract the group's mean reward first: REINFORCE++-baseline."""
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma: how much a reward counts one token earlier."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the standard deviation for whitening."""

    is_per_token: ClassVar[bool] = True

    def check(self, recipe: CheckedRecipe) -> None:
        """Refuse the baseline of a group of one response."""
        if self.group_baseline:
            self.check_siblings(recipe)

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        rewards = inputs.final_rewards
        if self.group_baseline:
            groups = Groups.of(rewards, inputs.is_valid, inputs.group_ids)
            rewards = groups.keep_signal(groups.centered())
        gains = decayed_sum(inputs.token_rewards(rewards), inputs.lengths, self.discount)
        return AdvantageOutput(inputs.whitened(gains, self.epsilon))
