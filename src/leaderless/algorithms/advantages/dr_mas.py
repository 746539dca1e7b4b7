"""Dr. MAS: rewards relative to the same agent's rewards."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.advantages.grpo import grpo_advantages
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.team_plays import team_rewards


class DrMasAdvantage(Advantage):
    """Rewards relative to the same agent's in the other plays of the group, without a critic.

    Formula: (r - mean_k) / (std_k + epsilon), or r - mean_k, with the statistics of agent k in its group.

    Source: Dr. MAS, arXiv 2602.08847, which shows that statistics over all agents inflate the gradient's norm. An agent
    counts once for each play in which it has a place, not once for each of its turns. The standard deviation is for
    a sample (n - 1), as in `grpo`.
    """

    type: Literal["dr_mas"] = "dr_mas"
    reward: Literal["team", "own"] = "team"
    """`team` gives each agent the sum of the rewards of all agents of its play, `own` only its own reward."""
    normalize_by_std: bool = True
    """Divide by the standard deviation."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Constant added to that standard deviation."""

    compares_siblings: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("joint_ids", "actor")

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        rewards, is_valid = inputs.rewards, inputs.is_valid
        if self.reward == "team":
            rewards, is_valid = team_rewards(rewards, is_valid, inputs.column("joint_ids"))
        # A number for each agent in each group.
        pairs = torch.stack([inputs.group_ids, inputs.column("actor")], dim=1)
        _, groups = torch.unique(pairs, dim=0, return_inverse=True)
        epsilon = self.epsilon if self.normalize_by_std else None
        return AdvantageOutput(grpo_advantages(rewards, is_valid, groups, epsilon))
