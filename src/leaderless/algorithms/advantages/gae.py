"""Generalized advantage estimation."""

from __future__ import annotations

from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import decayed_sum, widen

if TYPE_CHECKING:
    from torch import Tensor


class GaeAdvantage(Advantage):
    """Generalized advantage estimation, with a critic.

    It also gives the critic its targets, the returns A_t + V_t, with V_t the critic's value before token t.

    Formula: A_t = d_t + discount decay A_{t+1}, with d_t = r_t + discount V_{t+1} - V_t.

    Source: Schulman et al., arXiv 1506.02438, equations 11 and 16. The state after the last token has value 0.
    """

    type: Literal["gae"] = "gae"
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma: how much a reward counts one token earlier."""
    decay: float = Field(default=1.0, ge=0, le=1)
    """Lambda: 1 relies on rewards alone, 0 on the critic's next value."""
    whiten: bool = True
    """Normalize advantages to mean 0 and deviation 1 over all tokens of the step."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the standard deviation for whitening."""

    is_per_token: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("values",)
    writes: ClassVar[tuple[str, ...]] = ("returns",)

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        options = {"discount": self.discount, "decay": self.decay}
        gains, returns = gae_advantages(inputs.token_rewards(), inputs.column("values"), inputs.lengths, **options)
        advantages = inputs.whitened(gains, self.epsilon) if self.whiten else gains
        return AdvantageOutput(advantages, {"returns": returns})


def gae_advantages(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float, decay: float
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [total] each.

    `values`, [total], are the critic's before each token; gamma (`discount`) and lambda (`decay`) are between 0 and 1.
    """
    token_rewards, values = widen(token_rewards), widen(values)
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    has_tokens = lengths > 0
    following[lengths.cumsum(0)[has_tokens] - 1] = 0.0
    surprises = token_rewards + discount * following - values
    advantages = decayed_sum(surprises, lengths, discount * decay)
    return advantages, advantages + values
