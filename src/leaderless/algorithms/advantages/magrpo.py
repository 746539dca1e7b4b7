"""MAGRPO: the joint reward of a team relative to its group."""

from __future__ import annotations

from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.advantages.grpo import grpo_advantages
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.team_plays import team_rewards


class MagrpoAdvantage(Advantage):
    """The joint reward of a play relative to the other plays of its group, the same for all of its agents.

    Formula: (R - mean) / (std + epsilon), or R - mean, with R the sum of the rewards of all agents of a play.

    Source: MAGRPO, arXiv 2508.04652, with one advantage for a whole play in place of one for each of its turns. Every
    play counts once in the statistics, however many agents it has. The standard deviation is for a sample (n - 1),
    as in `grpo`.
    """

    type: Literal["magrpo"] = "magrpo"
    normalize_by_std: bool = True
    """Divide by the group's standard deviation."""
    epsilon: float = Field(default=1e-6, gt=0)
    """Constant added to that standard deviation."""

    compares_siblings: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("joint_ids",)

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        team, is_whole = team_rewards(inputs.rewards, inputs.is_valid, inputs.column("joint_ids"))
        plays, index = torch.unique(inputs.column("joint_ids"), return_inverse=True)
        first = torch.full((len(plays),), len(index)).scatter_reduce(0, index, torch.arange(len(index)), "amin")
        epsilon = self.epsilon if self.normalize_by_std else None
        return AdvantageOutput(grpo_advantages(team[first], is_whole[first], inputs.group_ids[first], epsilon)[index])
