"""Generalized advantage estimation."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import decayed_sum, repeat_per_token, widen

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.settings import AlgorithmConfig


class GaeAdvantage(Advantage):
    """Generalized advantage estimation, with a critic.

    It also gives the critic its targets, the returns A_t + V_t, with V_t the critic's value before token t.

    Formula: A_t = d_t + discount decay A_{t+1}, with d_t = r_t + discount V_{t+1} - V_t.

    Source: Schulman et al., arXiv 1506.02438, equations 11 and 16. The state after the last token has value 0.
    `critic_decay` 1 is the decoupled estimate of VC-PPO, arXiv 2503.01491; `length_alpha` 0.05 with it is that of VAPO,
    arXiv 2504.05118, where lambda is 1 - 1 / (length_alpha l) for a response of l tokens. Below 1 / length_alpha tokens
    this is negative, and here 0. VAPO's loss of correct responses is not included.
    """

    type: Literal["gae"] = "gae"
    discount: float = Field(default=1.0, gt=0, le=1)
    """Gamma: how much a reward counts one token earlier."""
    decay: float = Field(default=1.0, ge=0, le=1)
    """Lambda: 1 relies on rewards alone, 0 on the critic's next value."""
    length_alpha: float | None = Field(default=None, gt=0)
    """Alpha of a lambda that grows with a response's length l, 1 - 1 / (alpha l), in place of `decay`."""
    critic_decay: float | None = Field(default=None, ge=0, le=1)
    """Lambda of the critic's targets; that of the advantages by default."""
    whiten: bool = True
    """Normalize advantages to mean 0 and deviation 1 over all tokens of the step."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the standard deviation for whitening."""

    is_per_token: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("values",)
    writes: ClassVar[tuple[str, ...]] = ("returns",)

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings: a decay that would do nothing."""
        yield from super().refusals(algorithm)
        if self.length_alpha is not None and self.decay != 1:
            yield (
                "algorithm.advantage.decay does nothing with length_alpha, which gives each response a decay of its "
                "own: leave out one of them"
            )

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        rewards, values, lengths = inputs.token_rewards(), inputs.column("values"), inputs.lengths
        decay = self.decay if self.length_alpha is None else length_adaptive_decay(lengths, self.length_alpha)
        gains, returns = gae_advantages(rewards, values, lengths, discount=self.discount, decay=decay)
        if self.critic_decay is not None:
            _, returns = gae_advantages(rewards, values, lengths, discount=self.discount, decay=self.critic_decay)
        advantages = inputs.whitened(gains, self.epsilon) if self.whiten else gains
        return AdvantageOutput(advantages, {"returns": returns})


def length_adaptive_decay(lengths: Tensor, alpha: float) -> Tensor:
    """Lambda of each response, [n] float64: 1 - 1 / (alpha l), at least 0, with l from `lengths`, [n]."""
    return (1 - 1 / (alpha * lengths.double().clamp(min=1))).clamp(min=0)


def gae_advantages(
    token_rewards: Tensor, values: Tensor, lengths: Tensor, *, discount: float, decay: float | Tensor
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [total] each.

    `values`, [total], are the critic's before each token; gamma (`discount`) and lambda (`decay`), of all responses or
    of each, [n], are between 0 and 1.
    """
    token_rewards, values = widen(token_rewards), widen(values)
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    has_tokens = lengths > 0
    following[lengths.cumsum(0)[has_tokens] - 1] = 0.0
    surprises = token_rewards + discount * following - values
    per_token = decay if isinstance(decay, float) else repeat_per_token(decay.to(values), lengths, len(values))
    advantages = decayed_sum(surprises, lengths, discount * per_token)
    return advantages, advantages + values
