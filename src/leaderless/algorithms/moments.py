"""Mean and deviation over all ranks, and values brought to mean 0 and deviation 1."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor


@dataclass(frozen=True)
class Moments:
    """Of values that lie on several ranks.

    Attributes:
        mean: Arithmetic mean; 0 without values.
        std: Standard deviation of a sample (n - 1); 0 for fewer than two values.
    """

    mean: float
    std: float

    @staticmethod
    def count(values: Tensor, is_counted: Tensor) -> Tensor:
        """What one rank contributes; summed over ranks it makes the moments.

        Args:
            values: Any shape; what does not count may be anything, NaN included.
            is_counted: Of the same shape, bool.

        Returns:
            [3] float64: how many values count, their sum and the sum of their squares.
        """
        counted = torch.where(is_counted, values.double(), 0.0)
        return torch.stack([is_counted.sum().double(), counted.sum(), counted.square().sum()])

    @classmethod
    def of(cls, totals: Tensor) -> Moments:
        """Moments of all ranks' values.

        Args:
            totals: [3], the sum of all ranks' `count`.
        """
        count, total, squares = totals.tolist()
        if count == 0:
            return cls(0.0, 0.0)
        mean = total / count
        # Rounding may leave a trace where all values are equal; it is no deviation.
        variance = max(0.0, squares / count - mean * mean)
        is_constant = variance <= 1e-14 * squares / count
        return cls(mean, 0.0 if is_constant or count < 2 else (variance * count / (count - 1)) ** 0.5)


def whiten(values: Tensor, is_counted: Tensor, moments: Moments, *, epsilon: float) -> Tensor:
    """Values with mean 0 and deviation 1; all 0 where all are equal.

    Of returns to go this is REINFORCE++; of mean-centred rewards (`grpo_advantages` without the division, repeated for
    each token), its form with a baseline.

    Formula: (v - mean) / (std + epsilon).

    Source: REINFORCE++, arXiv 2501.03262, global advantage normalisation. The paper does not say whether the batch it
    means is of responses or of tokens; its code takes tokens, as is meant here: what counts is for the caller to say.

    Args:
        values: Any shape; what does not count may be anything, NaN included.
        is_counted: Of the same shape, bool.
        moments: Of the values that count, over all ranks.
        epsilon: Added to the deviation, above 0.

    Returns:
        The same shape, float32; 0 where a value does not count.
    """
    if moments.std == 0:
        return torch.zeros_like(values, dtype=torch.float32)
    whitened = (values.double() - moments.mean) / (moments.std + epsilon)
    return torch.where(is_counted, whitened, 0.0).float()
