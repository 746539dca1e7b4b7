"""MARFT: generalized advantage estimation over the turns of several agents."""

from __future__ import annotations

from collections.abc import Iterator
from typing import TYPE_CHECKING, ClassVar, Literal

from pydantic import Field

from leaderless.algorithms.advantage import Advantage, AdvantageInputs, AdvantageOutput
from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import decayed_sum, repeat_per_token, segment_sum, widen
from leaderless.algorithms.team_plays import Plays, team_rewards, whitened_by_agent

if TYPE_CHECKING:
    from torch import Tensor

    from leaderless.algorithms.settings import AlgorithmConfig

Level = Literal["token", "action"]


class ChainedGaeAdvantage(Advantage):
    """Generalized advantage estimation over all agents of a play, with a critic.

    The tokens of all agents form one chain in the order in which they were sampled: agent by agent within a step of the
    environment, then step by step. The critic expects of each token what the whole team will still get.

    Formula: A_t = d_t + g_t decay A_{t+1}, d_t = r_t + g_t V_{t+1} - V_t, with t over the tokens of all agents, or over
    turns, and g_t = turn_discount from turn to turn, else token_discount.

    Source: MARFT, arXiv 2504.16129, and its code: `level: action` is APPO, `level: token` TPPO. As in that code, a
    discount counts turns, not steps of the environment; tokens have one of their own. The state after a play has value
    0. A play whose reward failed for any agent has no advantages. Unlike in the code, an advantage of 0 counts in
    whitening like any other, and only the end of a play cuts the chain.
    """

    type: Literal["chained_gae"] = "chained_gae"
    level: Level = "token"
    """`token` has a value and an advantage for each token; `action` has one for each turn, which all of its tokens
    share, and the critic's value before the first token of a turn."""
    turn_discount: float = Field(default=1.0, gt=0, le=1)
    """How much a reward counts one turn earlier."""
    token_discount: float = Field(default=1.0, gt=0, le=1)
    """How much a reward counts one token earlier in the same turn; only for `level: token`."""
    decay: float = Field(default=1.0, ge=0, le=1)
    """Lambda: 1 relies on rewards alone, 0 on the critic's next value."""
    whiten: Literal["agent", "all", "none"] = "agent"
    """Normalize advantages to mean 0 and deviation 1 over the step's tokens of each agent, or of all agents."""
    epsilon: float = Field(default=1e-8, gt=0)
    """Constant added to the standard deviation for whitening."""

    is_per_token: ClassVar[bool] = True
    reads: ClassVar[tuple[str, ...]] = ("values", "joint_ids", "actor", "turns")
    writes: ClassVar[tuple[str, ...]] = ("returns",)

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:
        """Reasons why it cannot be combined with other settings: a discount that would do nothing."""
        yield from super().refusals(algorithm)
        if self.level == "action" and self.token_discount != 1:
            yield (
                "algorithm.advantage.token_discount does nothing with level=action, which has no steps within a turn: "
                "leave it out, or use level=token"
            )

    def compute(self, inputs: AdvantageInputs) -> AdvantageOutput:
        lengths, joint_ids, values = inputs.lengths, inputs.column("joint_ids"), inputs.column("values")
        _, is_valid = team_rewards(inputs.final_rewards, inputs.is_valid, joint_ids)
        is_counted = repeat_per_token(is_valid, lengths)
        gains, returns = chained_gae(
            inputs.token_rewards(),
            values,
            Plays.of(joint_ids, inputs.column("turns"), lengths),
            level=self.level,
            turn_discount=self.turn_discount,
            token_discount=self.token_discount,
            decay=self.decay,
        )
        advantages, returns = torch.where(is_counted, gains, 0.0), torch.where(is_counted, returns, values)
        is_trained = is_counted & repeat_per_token(inputs.is_trained, lengths)
        if self.whiten == "agent":
            actor = repeat_per_token(inputs.column("actor"), lengths)
            advantages = whitened_by_agent(advantages, is_trained, actor, self.epsilon, inputs.sum_over_ranks)
        elif self.whiten == "all":
            everyone = torch.zeros_like(is_counted, dtype=torch.int64)
            advantages = whitened_by_agent(advantages, is_trained, everyone, self.epsilon, inputs.sum_over_ranks)
        return AdvantageOutput(advantages, {"returns": returns})


def chained_gae(
    token_rewards: Tensor,
    values: Tensor,
    plays: Plays,
    *,
    level: Level,
    turn_discount: float,
    token_discount: float = 1.0,
    decay: float,
) -> tuple[Tensor, Tensor]:
    """Advantages and returns, [total] each, in the order of the rows' tokens; settings are those of the class.

    `token_rewards`, [total], belong to each token, and so do `values`, [total], the critic's before it. At the level of
    actions all tokens of a turn get the advantage and the return of the turn.
    """
    rewards, values = (plays.ordered(widen(column)) for column in (token_rewards, values))
    sizes, lengths = plays.turn_lengths, plays.lengths
    is_last = torch.zeros_like(rewards, dtype=torch.bool)
    is_last[sizes.cumsum(0) - 1] = True
    if level == "action":
        rewards, values = segment_sum(rewards, sizes), values[sizes.cumsum(0) - sizes]
        is_last, lengths = torch.ones_like(rewards, dtype=torch.bool), plays.num_turns
    following = torch.cat([values[1:], values.new_zeros(min(1, len(values)))])
    following[lengths.cumsum(0)[lengths > 0] - 1] = 0.0
    surprises = rewards + _choice(is_last, turn_discount, token_discount, rewards) * following - values
    steps = _choice(is_last, turn_discount * decay, token_discount * decay, rewards)
    advantages = decayed_sum(surprises, lengths, steps)
    returns = advantages + values
    if level == "action":
        advantages, returns = repeat_per_token(advantages, sizes), repeat_per_token(returns, sizes)
    return plays.of_rows(advantages), plays.of_rows(returns)


def _choice(is_chosen: Tensor, chosen: float, other: float, like: Tensor) -> Tensor:
    return torch.where(is_chosen, like.new_tensor(chosen), like.new_tensor(other))
