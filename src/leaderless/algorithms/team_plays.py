"""Plays of several agents: their tokens in causal order, the rewards of a team, and updates of one after the other.

A row is the episode of one agent; the rows of one play have the same joint id. All rows of a play are on one rank.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of, repeat_per_token
from leaderless.algorithms.returns import Moments, whiten

if TYPE_CHECKING:
    from torch import Tensor


MAX_AGENTS = 64
"""Largest number of agents of an environment. All ranks sum up arrays of this size, whichever agents they have."""


@dataclass(frozen=True)
class Plays:
    """The tokens of all agents of each play, in the order in which they were sampled.

    Attributes:
        order: [total] int64, the place of each token among the tokens of the rows, play by play and turn by turn.
        lengths: [p] int64, sampled tokens of each play.
        turn_lengths: [t] int64, sampled tokens of each turn, in the same order; turns without any have no place.
        num_turns: [p] int64, turns of each play.
    """

    order: Tensor
    lengths: Tensor
    turn_lengths: Tensor
    num_turns: Tensor

    @classmethod
    def of(cls, joint_ids: Tensor, turns: Tensor, lengths: Tensor) -> Plays:
        """Put the tokens of all agents in order.

        Args:
            joint_ids: [n] int64, play of each row.
            turns: [total] int, number of each token's turn in its play, over all agents.
            lengths: [n] int64, sampled tokens of each row.
        """
        plays, index = torch.unique(joint_ids, return_inverse=True)
        play = repeat_per_token(index, lengths)
        by_turn = torch.argsort(turns, stable=True)
        order = by_turn[torch.argsort(play[by_turn], stable=True)]
        keys = torch.stack([play, turns.long()], dim=1)[order]
        found, turn_lengths = torch.unique_consecutive(keys, dim=0, return_counts=True)
        counts = [torch.bincount(part, minlength=len(plays)) for part in (play, found[:, 0])]
        return cls(order, counts[0], turn_lengths, counts[1])

    def ordered(self, values: Tensor) -> Tensor:
        """Values of the rows' tokens, [total], in causal order."""
        return values[self.order]

    def of_rows(self, values: Tensor) -> Tensor:
        """Values in causal order, [total], from values of the rows' tokens."""
        result = torch.empty_like(values)
        result[self.order] = values
        return result


def team_rewards(rewards: Tensor, is_valid: Tensor, joint_ids: Tensor) -> tuple[Tensor, Tensor]:
    """The sum of the rewards of all agents of a play, [n] at least float32, and whether none of them failed, [n] bool.

    Args:
        rewards: [n], reward of each agent; failed ones may be anything, including NaN.
        is_valid: [n] bool, false where the reward failed.
        joint_ids: [n] int64, play of each row.
    """
    _, index = torch.unique(joint_ids, return_inverse=True)
    count = int(index.max()) + 1 if len(index) else 0
    totals = torch.zeros(count, dtype=torch.float64).index_add(0, index, torch.where(is_valid, rewards.double(), 0.0))
    failures = torch.zeros(count, dtype=torch.int64).index_add(0, index, (~is_valid).long())
    return totals[index].to(rewards.dtype), (failures == 0)[index]


def agent_sums(values: Tensor, is_counted: Tensor, actor: Tensor, sum_over_ranks: Callable[[Tensor], Tensor]) -> Tensor:
    """[MAX_AGENTS, 2] float64: how many rows of each agent count on all ranks, and the sum of their values, [n].

    Raises:
        ValueError: A number of an agent, [n] int64 in `actor`, is too large.
    """
    _check(actor)
    sums = torch.zeros(MAX_AGENTS, 2, dtype=torch.float64)
    counted = torch.where(is_counted, values.double(), 0.0)
    return sum_over_ranks(sums.index_add(0, actor, torch.stack([is_counted.double(), counted], dim=1)))


def whitened_by_agent(
    values: Tensor, is_counted: Tensor, actor: Tensor, epsilon: float, sum_over_ranks: Callable[[Tensor], Tensor]
) -> Tensor:
    """[total] float32: values with mean 0 and deviation 1 over the tokens of each agent that count, on all ranks.

    Tokens that do not count, [total] bool, get 0. `actor` [total] int64 is each token's agent, `epsilon` is above 0.

    Raises:
        ValueError: A number of an agent is too large.
    """
    _check(actor)
    counts = torch.zeros(MAX_AGENTS, 3, dtype=torch.float64)
    for agent in torch.unique(actor).tolist():
        counts[agent] = Moments.count(values, is_counted & (actor == agent))
    counts, result = sum_over_ranks(counts), torch.zeros_like(values, dtype=torch.float32)
    for agent in torch.unique(actor).tolist():
        own = is_counted & (actor == agent)
        result += whiten(values, own, Moments.of(counts[agent]), epsilon=epsilon)
    return result


def _check(actor: Tensor) -> None:
    if len(actor) and int(actor.max()) >= MAX_AGENTS:
        raise ValueError(
            f"column 'actor' holds {int(actor.max())}: an environment may have at most {MAX_AGENTS} agents"
        )


def rounds_of(joint_ids: Tensor, actor: Tensor, turns: Tensor, lengths: Tensor) -> Tensor:
    """[total] int64: a number for each round of each play, the same for the k-th turns of all of its agents.

    Args:
        joint_ids: [n] int64, play of each row.
        actor: [n] int64, agent of each row.
        turns: [total] int, number of each token's turn in its play.
        lengths: [n] int64, sampled tokens of each row.
    """
    play, agent = (repeat_per_token(column, lengths) for column in (joint_ids, actor))
    found, index = torch.unique(torch.stack([play, agent, turns.long()], dim=1), dim=0, return_inverse=True)
    _, speaker, counts = torch.unique_consecutive(found[:, :2], dim=0, return_inverse=True, return_counts=True)
    ordinal = torch.arange(len(found)) - (counts.cumsum(0) - counts)[speaker]
    _, rounds = torch.unique(torch.stack([found[:, 0], ordinal], dim=1), dim=0, return_inverse=True)
    return torch.as_tensor(rounds)[index]


def joint_ratios(log_ratios: Tensor, is_own: Tensor, rounds: Tensor, *, max_ratio: float) -> Tensor:
    """[total] float32: how much likelier an update has made the agent's turns of the round that each token is in.

    Formula: clip(prod ratio_t, 1 / max_ratio, max_ratio), over the tokens t of the agent's turns in the round; 1 if the
    agent has none there.

    Source: HAPPO, arXiv 2109.11251, algorithm 4: the advantage of an agent is multiplied by the ratios of those that
    were updated before it. Actions at one time are taken to be the k-th turns of all agents of a play. The paper does
    not limit the product.

    Args:
        log_ratios: [total], log-probability after the update minus that before it; only the agent's own are read.
        is_own: [total] bool, tokens that the agent sampled.
        rounds: [total] int64, round of each token.
        max_ratio: Limit, above 1.
    """
    count = int(rounds.max()) + 1 if len(rounds) else 0
    own = torch.where(is_own, log_ratios.double(), 0.0)
    sums = torch.zeros(count, dtype=torch.float64).index_add(0, rounds, own)
    return ratio_of(sums).clamp(1 / max_ratio, max_ratio)[rounds].float()
