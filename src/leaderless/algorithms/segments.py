"""Sums over the tokens of each sample, in packed form: values one behind the other, and lengths.

Half-precision values are summed, and the sums returned, in float32: in bfloat16, 256 + 1 is 256.
"""

from __future__ import annotations

import torch
from torch import Tensor

from leaderless.algorithms.ratios import widen


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sample's tokens.

    Args:
        values: [total].
        lengths: [n] int64, summing to `total`.

    Returns:
        [n]; 0 for a sample without tokens.
    """
    sample = torch.repeat_interleave(torch.arange(len(lengths), device=values.device), lengths)
    values = widen(values)
    return values.new_zeros(len(lengths)).index_add(0, sample, values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each sample's tokens.

    Args:
        values: [total].
        lengths: [n] int64, summing to `total`.

    Returns:
        [n]; 0 for a sample without tokens.
    """
    return segment_sum(values, lengths) / lengths.clamp(min=1)


def repeat_per_token(values: Tensor, lengths: Tensor) -> Tensor:
    """Each sample's value, once for each of its tokens.

    Args:
        values: [n].
        lengths: [n] int64.

    Returns:
        [sum(lengths)].
    """
    return torch.repeat_interleave(values, lengths)


def add_to_last(values: Tensor, per_sample: Tensor, lengths: Tensor) -> Tensor:
    """Add each sample's value to that of its last token; a sample without tokens has nowhere to put it.

    Args:
        values: [total].
        per_sample: [n].
        lengths: [n] int64, summing to `total`.

    Returns:
        [total].
    """
    has_tokens = lengths > 0
    last = lengths.cumsum(0)[has_tokens] - 1
    values = widen(values)
    return values.index_add(0, last, per_sample[has_tokens].to(values.dtype))


def decayed_sum(values: Tensor, lengths: Tensor, decay: float) -> Tensor:
    """For each token the sum over itself and all later ones of its sample, `s_t = v_t + decay s_{t+1}`.

    Args:
        values: [total].
        lengths: [n] int64, summing to `total`.
        decay: Between 0 and 1.

    Returns:
        [total].
    """
    values = widen(values)
    result = values.clone()
    last = lengths.cumsum(0) - 1
    # All samples take a step back from their ends at a time: as many steps as the longest sample has tokens.
    for back in range(1, int(lengths.max()) if len(lengths) else 0):
        place = last[lengths > back] - back
        result[place] = values[place] + decay * result[place + 1]
    return result
