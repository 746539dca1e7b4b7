"""How the losses of tokens become one number: by a weight for each token, so that the sum can be split at will."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leaderless.algorithms.segments import repeat_per_token

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
        """One rank's contribution; its sum over ranks makes the denominators.

        Args:
            lengths: [n] int64, response tokens of each sample.
            is_valid: [n] bool, samples that count.

        Returns:
            [2] float64: samples and tokens.
        """
        counted = lengths * is_valid
        return torch.stack([(counted > 0).sum(), counted.sum()]).double()


def token_weights(
    aggregation: Aggregation, lengths: Tensor, is_valid: Tensor, totals: Denominators, *, norm_tokens: int = 1
) -> Tensor:
    """The weight of each token, such that the loss is the weighted sum over all tokens of all ranks.

    Because the weights contain the global denominators, the loss and its gradient do not depend on micro-batches, ranks
    or packing. With N samples that have tokens, and T tokens in all:

    - `token_mean`: 1 / T; DAPO, arXiv 2503.14476, equation 8.
    - `sequence_mean_token_mean`: 1 / (N |o_i|); GRPO, arXiv 2402.03300, equation 3.
    - `sequence_mean_token_sum`: 1 / N; the policy gradient itself.
    - `sequence_mean_token_sum_norm`: 1 / (N norm_tokens); Dr. GRPO, arXiv 2503.20783, section 3.2.

    Source: as named; each paper states its mean for the responses to one prompt. Here, as in their code, it is over the
    whole mini-batch, which makes a difference for `token_mean`: prompts with longer responses weigh more.

    Args:
        aggregation: Kind of mean.
        lengths: [n] int64, response tokens of each sample.
        is_valid: [n] bool; samples that do not count have weight 0.
        totals: Denominators over the whole mini-batch.
        norm_tokens: Constant of `sequence_mean_token_sum_norm`, such as the longest response allowed.

    Returns:
        [sum(lengths)] float32.
    """
    match aggregation:
        case "token_mean":
            per_sample = is_valid.double() / max(totals.num_tokens, 1.0)
        case "sequence_mean_token_mean":
            per_sample = is_valid.double() / (lengths.clamp(min=1) * max(totals.num_samples, 1.0))
        case "sequence_mean_token_sum":
            per_sample = is_valid.double() / max(totals.num_samples, 1.0)
        case "sequence_mean_token_sum_norm":
            per_sample = is_valid.double() / (norm_tokens * max(totals.num_samples, 1.0))
    return repeat_per_token(per_sample.float(), lengths)
