"""RAE: rewards relative to what the role has got before."""

from __future__ import annotations

from collections.abc import Mapping
from typing import ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.team_plays import MAX_AGENTS, agent_sums, team_rewards


class RoleBaselineAdvantage(Advantage):
    """Rewards relative to a moving average of the same agent's rewards, without a critic and without groups.

    Formula: A = r - b_k; after the step b_k becomes momentum b_k + (1 - momentum) mean_k, with mean_k the mean reward
    of agent k in the step.

    Source: role-conditioned advantage estimation, SPIRAL, arXiv 2506.24119, section 3. The paper moves the baseline
    with each play; here it moves once in a step, by the mean over all ranks, so that no advantage depends on the order
    of plays or contains its own reward. An agent's first baseline is the mean reward of the step in which it first
    plays, not 0. One baseline serves the whole dataset: SPIRAL has one for each game.
    """

    type: Literal["rae"] = "rae"
    reward: Literal["own", "team"] = "own"
    """`own` compares each agent's own reward, `team` the sum of the rewards of all agents of its play."""
    momentum: float = Field(default=0.95, ge=0, lt=1)
    """Share of the baseline that a step keeps."""

    reads: ClassVar[tuple[str, ...]] = ("joint_ids", "actor")
    metrics: ClassVar[Mapping[str, str]] = {"agents/baseline": "mean baseline of the agents' rewards"}

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages of this rank's responses, and move the baselines."""
        rewards, is_valid, actor = inputs.rewards, inputs.is_valid, inputs.column("actor")
        if self.reward == "team":
            rewards, is_valid = team_rewards(rewards, is_valid, inputs.column("joint_ids"))
        sums = agent_sums(rewards, is_valid, actor, inputs.sum_over_ranks).tolist()
        baselines = torch.zeros(MAX_AGENTS, dtype=torch.float64)
        for agent, (count, total) in enumerate(sums):
            if not count:
                continue
            mean, name = total / count, f"baseline/{agent}"
            baselines[agent] = before = inputs.state.get(name, mean)
            inputs.state[name] = self.momentum * before + (1 - self.momentum) * mean
        baseline = baselines[actor]
        advantages = torch.where(is_valid, rewards.double() - baseline, 0.0).float()
        return AdvantageOutput(advantages, {}, {"agents/baseline": baseline.float()})
