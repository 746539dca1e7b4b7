"""How the losses of tokens become one number: by a weight for each token, so that the sum can be split at will."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from leaderless.algorithms.lazy import torch
from leaderless.algorithms.segments import repeat_per_token

if TYPE_CHECKING:
    from torch import Tensor

Aggregation = Literal[
    "token_mean", "sequence_mean_token_mean", "sequence_mean_token_sum", "sequence_mean_token_sum_norm"
]


@dataclass(frozen=True)
class EpisodeParts:
    """What samples have to know of their episodes, of which other samples may be on other ranks.

    Attributes:
        lengths: [n] int64, response tokens of the whole episode that each sample is a part of.
        is_first: [n] bool, true for exactly one sample of each episode, which stands for it in counts.
    """

    lengths: Tensor
    is_first: Tensor

    @classmethod
    def whole(cls, lengths: Tensor) -> EpisodeParts:
        """Each sample is an episode; `lengths`, [n] int64, are its response tokens."""
        return cls(lengths, torch.ones_like(lengths, dtype=torch.bool))


@dataclass(frozen=True)
class Denominators:
    """Counts over the whole mini-batch, on all ranks.

    Attributes:
        num_episodes: Episodes that count and have at least one token.
        num_tokens: Tokens of samples that count.
    """

    num_episodes: float
    num_tokens: float

    @staticmethod
    def count(lengths: Tensor, is_valid: Tensor, episodes: EpisodeParts | None = None) -> Tensor:
        """One rank's contribution, [2] float64 episodes and tokens; its sum over ranks makes the denominators."""
        episodes = episodes or EpisodeParts.whole(lengths)
        stands_for_one = is_valid & episodes.is_first & (episodes.lengths > 0)
        return torch.stack([stands_for_one.sum(), (lengths * is_valid).sum()]).double()


def token_weights(
    aggregation: Aggregation,
    lengths: Tensor,
    is_valid: Tensor,
    totals: Denominators,
    episodes: EpisodeParts | None = None,
    *,
    norm_tokens: int = 1,
) -> Tensor:
    """The weight of each token, [total] float32, such that the loss is the weighted sum over all tokens of all ranks.

    Because the weights contain the global denominators, the loss and its gradient do not depend on micro-batches, ranks
    or packing. The weights do not depend on how an episode's tokens are divided into samples. With N episodes that have
    tokens, o_i the tokens of one of them, and T tokens in all:

    - `token_mean`: 1 / T; DAPO, arXiv 2503.14476, equation 8.
    - `sequence_mean_token_mean`: 1 / (N |o_i|); GRPO, arXiv 2402.03300, equation 3.
    - `sequence_mean_token_sum`: 1 / N; the policy gradient itself.
    - `sequence_mean_token_sum_norm`: 1 / (N norm_tokens); Dr. GRPO, arXiv 2503.20783, section 3.2.

    Source: as named; each paper states its mean for the responses to one prompt. Here, as in their code, it is over the
    whole mini-batch, which makes a difference for `token_mean`: prompts with longer responses weigh more. The papers
    know only episodes of one response.

    `lengths`, [n] int64, are response tokens; samples that are not valid, [n] bool and the same for all samples of an
    episode, have weight 0. Without `episodes` each sample is one. `norm_tokens` is a constant, such as the longest
    response allowed.
    """
    episodes = episodes or EpisodeParts.whole(lengths)
    num_episodes, num_tokens = max(totals.num_episodes, 1.0), max(totals.num_tokens, 1.0)
    match aggregation:
        case "token_mean":
            denominator: float | Tensor = num_tokens
        case "sequence_mean_token_mean":
            denominator = episodes.lengths.clamp(min=1) * num_episodes
        case "sequence_mean_token_sum":
            denominator = num_episodes
        case "sequence_mean_token_sum_norm":
            denominator = norm_tokens * num_episodes
    return repeat_per_token((is_valid.double() / denominator).float(), lengths)
