"""Generalized advantage estimation over the decisions of a body."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy import torch
from leaderless.algorithms.segments import widen

if TYPE_CHECKING:
    from torch import Tensor


class BodyGaeAdvantage(Advantage):
    """Generalized advantage estimation over the decisions of a body, each of several steps, with a critic.

    All that belongs to a decision has its advantage, and the critic's target A_t + V_t. A truncated episode goes on
    with the critic's value of what was seen last; one that has come to its end is worth nothing afterwards. With
    `body.log_prob: chunk` the rewards within a decision are added up without a discount.

    Formula: A_t = d_t + discount^k decay A_{t+1}, with d_t = sum_{i<k} discount^i r_{t,i} + discount^k V_{t+1} - V_t,
    for a decision of k steps.

    Source: Schulman et al., arXiv 1506.02438, equation 16, for options of several steps as in Sutton, Precup and Singh,
    Artificial Intelligence 112 (1999), equation 8; with truncation as in Pardo et al., arXiv 1712.00378, equation 6.
    """

    type: Literal["body_gae"] = "body_gae"
    discount: float = Field(default=0.99, gt=0, le=1)
    """Gamma: how much a reward counts one step of the environment earlier."""
    decay: float = Field(default=0.95, ge=0, le=1)
    """Lambda: 1 relies on rewards alone, 0 on the critic's next value."""
    whiten: bool = True
    """Normalize advantages to mean 0 and deviation 1 over all that was decided in the step."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the standard deviation for whitening."""

    is_per_token: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("values", "final_values", "truncated", "turns", "env_steps")
    writes: ClassVar[tuple[str, ...]] = ("returns",)

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        """Compute the advantages and returns of this rank's decisions."""
        values, final = (widen(inputs.column(name)) for name in ("values", "final_values"))
        after = torch.where(inputs.column("truncated"), final, torch.zeros_like(final))
        turns, steps = inputs.column("turns").long(), inputs.column("env_steps").long()
        options = {"discount": self.discount, "decay": self.decay}
        rewards = widen(inputs.token_rewards())
        gains = decision_advantages(rewards, values, after, turns, steps, inputs.lengths, **options)
        advantages = inputs.whitened(gains, self.epsilon) if self.whiten else gains
        return AdvantageOutput(advantages, {"returns": gains + values})


def decision_advantages(
    rewards: Tensor,
    values: Tensor,
    after: Tensor,
    turns: Tensor,
    steps: Tensor,
    lengths: Tensor,
    *,
    discount: float,
    decay: float,
) -> Tensor:
    """Advantages of units, [total]: those of one decision have the same.

    `rewards`, `values`, `turns` (the decision) and `steps` (of the environment) are [total], `after`, [n], the value of
    what comes after each episode; gamma (`discount`) and lambda (`decay`) are between 0 and 1.
    """
    episodes = torch.arange(len(lengths)).repeat_interleave(lengths)
    keys = episodes * (int(turns.max()) + 1 if len(turns) else 1) + turns
    _, which, counts = torch.unique_consecutive(keys, return_inverse=True, return_counts=True)
    last = counts.cumsum(0) - 1
    owner = episodes[last]
    is_first = torch.ones_like(owner, dtype=torch.bool)
    is_first[1:] = owner[1:] != owner[:-1]
    before = torch.where(is_first, -1, steps[last].roll(1)) if len(last) else steps[last]
    num_steps = steps[last] - before
    # Of a whole chunk, the one unit has the number of its last step, and the rewards of all.
    within = torch.where(counts[which] == 1, 0, steps - before[which] - 1)
    gained = rewards.new_zeros(len(last)).index_add_(0, which, rewards * discount**within)
    value = values[last]
    is_last = torch.ones_like(is_first)
    is_last[:-1] = is_first[1:]
    following = torch.where(is_last, after[owner], value.roll(-1)) if len(last) else value
    shrink = discount ** num_steps.to(rewards.dtype)
    surprises = gained + shrink * following - value
    gains = surprises.clone()
    firsts = torch.arange(len(owner))[is_first].repeat_interleave(torch.diff(_borders(is_first)))
    order = torch.arange(len(owner)) - firsts
    for number in range(int(order.max()) - 1 if len(order) else -1, -1, -1):
        now = ((order == number) & ~is_last).nonzero()[:, 0]
        gains[now] += shrink[now] * decay * gains[now + 1]
    return gains[which]


def _borders(is_first: Tensor) -> Tensor:
    """Where runs begin whose first members, [n] bool, are given, and their end."""
    return torch.cat([is_first.nonzero()[:, 0], torch.tensor([len(is_first)])])
