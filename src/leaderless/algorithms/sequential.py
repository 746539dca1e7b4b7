"""Updates of one agent after the other: what the updates of earlier agents mean for the advantages of later ones."""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import ratio_of, repeat_per_token

if TYPE_CHECKING:
    from torch import Tensor


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
