"""Shaped rewards, and whitening over all ranks.

Tensors hold only the tokens that the policy sampled. What tools or an environment wrote between two turns is left out,
so each token is followed by the next one that the policy chose. Values of tokens are [total], values of samples [n];
`lengths`, [n] int64, are response tokens and sum to `total`; `is_valid`, [n] bool, is false where the reward failed.
Results are at least float32.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from leaderless.algorithms.lazy_torch import torch
from leaderless.algorithms.packed import add_to_last, repeat_per_token

if TYPE_CHECKING:
    from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """Penalty on the reward of a response that comes close to the longest length allowed: -1 to 0, [n] float32.

    Formula: 0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens.

    Source: DAPO, arXiv 2503.14476, equation 13 (soft overlong punishment), for the longest message of an episode.

    `max_tokens` is the longest length allowed; `buffer_tokens` is at least 1.
    """
    excess = lengths - (max_tokens - buffer_tokens)
    return -(excess.float() / buffer_tokens).clamp(0, 1)


def token_level_rewards(rewards: Tensor, is_valid: Tensor, penalties: Tensor, lengths: Tensor) -> Tensor:
    """The reward at the last token, minus a penalty at each token.

    Formula: r_t = (reward if t is the last token) - penalty_t; 0 at all tokens of a sample whose reward failed.

    Source: InstructGPT, arXiv 2203.02155, with the penalty spread over the tokens, as is common.

    A penalty is, for example, a coefficient times the KL divergence from the reference.
    """
    token_rewards = add_to_last(-penalties, rewards, lengths)
    return torch.where(repeat_per_token(is_valid, lengths), token_rewards, 0.0)


@dataclass(frozen=True)
class Moments:
    """Mean and deviation of values that are spread over several ranks.

    Attributes:
        mean: Arithmetic mean; 0 without values.
        std: Sample standard deviation (n - 1); 0 for fewer than two values.
    """

    mean: float
    std: float

    @staticmethod
    def count(values: Tensor, is_counted: Tensor) -> Tensor:
        """One rank's contribution, [3] float64, to be summed: number of values, their sum, the sum of their squares.

        Values that do not count may be anything, including NaN.
        """
        counted = torch.where(is_counted, values.double(), 0.0)
        return torch.stack([is_counted.sum().double(), counted.sum(), counted.square().sum()])

    @classmethod
    def of(cls, totals: Tensor) -> Moments:
        """Moments of all ranks' values, from the sum of all ranks' `count`."""
        count, total, squares = totals.tolist()
        if count == 0:
            return cls(0.0, 0.0)
        mean = total / count
        # Rounding may leave a trace of variance where all values are equal.
        variance = max(0.0, squares / count - mean * mean)
        is_constant = variance <= 1e-14 * squares / count
        return cls(mean, 0.0 if is_constant or count < 2 else (variance * count / (count - 1)) ** 0.5)


def whiten(values: Tensor, is_counted: Tensor, moments: Moments, *, epsilon: float) -> Tensor:
    """Values with mean 0 and deviation 1; all 0 where all are equal.

    Applied to returns to go this is REINFORCE++; applied to mean-centered rewards (`grpo_advantages` without the
    division, repeated for each token), it is REINFORCE++-baseline.

    Formula: (v - mean) / (std + epsilon).

    Source: REINFORCE++, arXiv 2501.03262, global advantage normalization. The paper does not say whether its batch
    consists of responses or of tokens; its code normalizes over tokens, as is intended here.

    Values that do not count may be anything, including NaN, and become 0. The moments are over the values that
    count, on all ranks; `epsilon` is above 0.
    """
    if moments.std == 0:
        return torch.zeros_like(values, dtype=torch.float32)
    whitened = (values.double() - moments.mean) / (moments.std + epsilon)
    return torch.where(is_counted, whitened, 0.0).float()
