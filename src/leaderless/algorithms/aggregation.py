"""How the losses of tokens become one number: as a weight for each token, so that sums may be split at will."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from leaderless.algorithms.segments import repeat_per_token

Aggregation = Literal["sequence_mean_token_mean", "token_mean"]


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
        """What one rank contributes; summed over ranks it makes the denominators.

        Args:
            lengths: [n] int64, response tokens of each sample.
            is_valid: [n] bool, samples that count.

        Returns:
            [2] float64: samples and tokens.
        """
        counted = lengths * is_valid
        return torch.stack([(counted > 0).sum(), counted.sum()]).double()


def token_weights(aggregation: Aggregation, lengths: Tensor, is_valid: Tensor, totals: Denominators) -> Tensor:
    """The weight of each token, such that the loss is the weighted sum over all tokens of all ranks.

    Because the weights hold the global denominators, the loss and its gradient depend on neither micro-batches nor
    ranks nor packing. `sequence_mean_token_mean` is GRPO's 1/G sum 1/|o_i| (arXiv 2402.03300, equation 3);
    `token_mean` is DAPO's 1 / sum |o_i| (arXiv 2503.14476, equation 8).

    Args:
        aggregation: The mean that is meant.
        lengths: [n] int64, response tokens of each sample.
        is_valid: [n] bool; samples that do not count have weight 0.
        totals: Over the whole mini-batch.

    Returns:
        [sum(lengths)] float32.
    """
    if aggregation == "token_mean":
        per_sample = is_valid / max(totals.num_tokens, 1.0)
    else:
        per_sample = is_valid / (lengths.clamp(min=1) * max(totals.num_samples, 1.0))
    return repeat_per_token(per_sample.float(), lengths)
