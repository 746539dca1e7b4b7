"""Decisions of a body, each of several steps: what rewards and advantages they have, as pure functions.

A policy decides on k steps at once. Three choices are independent of each other:

- what has a reward and a value: the whole decision (`chunk`), or each of its steps (`action`);
- what has a log-probability: each number of an action (`token`), each action, or the whole decision (`chunk`);
- how units are weighted in the loss: each alike (`token_mean`), or each episode (`sequence_mean_token_mean`).

Values of units are [total]; see `segments`.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from leaderless.algorithms.lazy_torch import torch

if TYPE_CHECKING:
    from torch import Tensor

RewardGrain = Literal["chunk", "action"]
"""Unit with its own reward and value."""


@dataclass(frozen=True)
class Decisions:
    """Which units belong to which of D decisions, and how many steps these have.

    Attributes:
        which: [total] int64, decision of each unit.
        owner: [D] int64, episode of each decision.
        last: [D] int64, last unit of each.
        num_steps: [D] int64, executed steps of each.
        within: [total] int64, steps of its decision before the unit's own step; 0 if it is the only unit.
        is_first: [D] bool, whether it is the first decision of its episode.
    """

    which: Tensor
    owner: Tensor
    last: Tensor
    num_steps: Tensor
    within: Tensor
    is_first: Tensor

    @classmethod
    def of(cls, turns: Tensor, steps: Tensor, lengths: Tensor, grain: RewardGrain = "chunk") -> Decisions:
        """Find decisions.

        Args:
            turns: [total] int64, decision of each unit, counted in its episode.
            steps: [total] int64, step of the environment that each is for, or the last one, counted in its episode.
            lengths: [n] int64, units of each episode.
            grain: Whether decisions are taken as they are, or each step as a decision of its own.
        """
        turns = turns if grain == "chunk" else steps
        episodes = torch.arange(len(lengths)).repeat_interleave(lengths)
        keys = episodes * (int(turns.max()) + 1 if len(turns) else 1) + turns
        _, which, counts = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
        last = counts.cumsum(0) - 1
        owner = episodes[last]
        is_first = torch.ones_like(owner, dtype=torch.bool)
        is_first[1:] = owner[1:] != owner[:-1]
        before = torch.where(is_first, -1, steps[last].roll(1)) if len(last) else steps[last]
        # Of a whole chunk, the one unit has the number of its last step.
        within = torch.where(counts[which] == 1, 0, steps - before[which] - 1)
        return cls(which, owner, last, steps[last] - before, within, is_first)

    def gained(self, rewards: Tensor, discount: float) -> Tensor:
        """[D]: sum_i discount^i r_i over the units of each decision, with i the number of its steps before a unit's."""
        return rewards.new_zeros(len(self.last)).index_add_(0, self.which, rewards * discount**self.within)

    def gained_by_step(self, rewards: Tensor, discount: float) -> Tensor:
        """[D]: the same of rewards [steps] of all steps of all decisions, one after the other."""
        first = (self.num_steps.cumsum(0) - self.num_steps).repeat_interleave(self.num_steps)
        within = torch.arange(len(rewards)) - first
        decisions = torch.arange(len(self.last)).repeat_interleave(self.num_steps)
        return rewards.new_zeros(len(self.last)).index_add_(0, decisions, rewards * discount**within)

    def advantages(self, gained: Tensor, values: Tensor, after: Tensor, *, discount: float, decay: float) -> Tensor:
        """Generalized advantage estimates of decisions, [D].

        A decision of k steps is one step of a process whose discount is discount^k (Sutton, Precup and Singh 1999):
        A_t = d_t + discount^k decay A_{t+1}, d_t = gained_t + discount^k V_{t+1} - V_t.

        Args:
            gained: [D], discounted rewards of each.
            values: [D], the critic's values of what was seen before each.
            after: [n], value of what comes after each episode.
            discount: Gamma, of a step of the environment.
            decay: Lambda, of a decision.
        """
        is_last = torch.ones_like(self.is_first)
        is_last[:-1] = self.is_first[1:]
        following = torch.where(is_last, after[self.owner], values.roll(-1)) if len(values) else values
        shrink = discount ** self.num_steps.to(gained.dtype)
        gains = gained + shrink * following - values
        starts = torch.arange(len(self.owner))[self.is_first]
        sizes = torch.diff(torch.cat([starts, torch.tensor([len(self.owner)])]))
        order = torch.arange(len(self.owner)) - starts.repeat_interleave(sizes)
        for number in range(int(order.max()) - 1 if len(order) else -1, -1, -1):
            now = ((order == number) & ~is_last).nonzero()[:, 0]
            gains[now] += shrink[now] * decay * gains[now + 1]
        return gains
