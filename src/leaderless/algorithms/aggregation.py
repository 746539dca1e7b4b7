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
class Denominators:
    """Counts over the whole mini-batch, on all ranks.

    Attributes:
        num_samples: Samples that count and have at least one token.
        num_tokens: Tokens of samples that count.
    """

    num_samples: float
    num_tokens: float

    @staticmethod
    def count(lengths: Tensor, is_valid: Tensor) -> Tensor:
        """One rank's contribution, [2] float64 samples and tokens; its sum over ranks makes the denominators."""
        counted = lengths * is_valid
        return torch.stack([(counted > 0).sum(), counted.sum()]).double()


def token_weights(
    aggregation: Aggregation, lengths: Tensor, is_valid: Tensor, totals: Denominators, *, norm_tokens: int = 1
) -> Tensor:
    """The weight of each token, [total] float32, such that the loss is the weighted sum over all tokens of all ranks.

    Because the weights contain the global denominators, the loss and its gradient do not depend on micro-batches, ranks
    or packing. With N samples that have tokens, and T tokens in all:

    - `token_mean`: 1 / T; DAPO, arXiv 2503.14476, equation 8.
    - `sequence_mean_token_mean`: 1 / (N |o_i|); GRPO, arXiv 2402.03300, equation 3.
    - `sequence_mean_token_sum`: 1 / N; the policy gradient itself.
    - `sequence_mean_token_sum_norm`: 1 / (N norm_tokens); Dr. GRPO, arXiv 2503.20783, section 3.2.

    Source: as named; each paper states its mean for the responses to one prompt. Here, as in their code, it is over the
    whole mini-batch, which makes a difference for `token_mean`: prompts with longer responses weigh more.

    `lengths`, [n] int64, are response tokens; samples that are not valid, [n] bool, have weight 0. `norm_tokens` is a
    constant, such as the longest response allowed.
    """
    num_samples, num_tokens = max(totals.num_samples, 1.0), max(totals.num_tokens, 1.0)
    match aggregation:
        case "token_mean":
            denominator: float | Tensor = num_tokens
        case "sequence_mean_token_mean":
            denominator = lengths.clamp(min=1) * num_samples
        case "sequence_mean_token_sum":
            denominator = num_samples
        case "sequence_mean_token_sum_norm":
            denominator = norm_tokens * num_samples
    return repeat_per_token((is_valid.double() / denominator).float(), lengths)
