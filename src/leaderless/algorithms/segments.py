"""Packed values, the tokens of one sample after those of another, and ratios of probabilities.

Values of tokens are [total], with `lengths` [n] int64 summing to `total`; values of samples are [n]. Half-precision
values are summed, and sums returned, in float32: in bfloat16, 256 + 1 is 256.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

from leaderless.algorithms.lazy import torch

if TYPE_CHECKING:
    from torch import Tensor

MAX_LOG_RATIO = 20.0
"""Bound of log-ratios before they are exponentiated, far outside any clipping range."""


def widen(values: Tensor) -> Tensor:
    """Half-precision numbers as float32, others unchanged.

    With its three digits, bfloat16 can express neither sums over a response nor ratios within 1e-4 of 1.
    """
    return values.to(torch.promote_types(values.dtype, torch.float32))


def log_ratio_of(log_probs: Tensor, others: Tensor) -> Tensor:
    """The logarithm of the ratio of two probabilities, at least in float32."""
    return widen(log_probs) - widen(others)


def ratio_of(log_ratio: Tensor) -> Tensor:
    """The ratio of two probabilities; constant and without gradient beyond the bound."""
    return log_ratio.clamp(-MAX_LOG_RATIO, MAX_LOG_RATIO).exp()


def with_gradient_of(value: Tensor, source: Tensor) -> Tensor:
    """A tensor with the value of one and the gradient of another, which has the same shape and is finite."""
    return value.detach() + (source - source.detach())


def segment_sum(values: Tensor, lengths: Tensor) -> Tensor:
    """Sum over each sample's tokens; 0 for a sample without tokens."""
    # With the size of the result, an accelerator need not wait to compute it.
    places = torch.arange(len(lengths), device=values.device)
    sample = torch.repeat_interleave(places, lengths, output_size=len(values))
    values = widen(values)
    return values.new_zeros(len(lengths)).index_add(0, sample, values)


def segment_mean(values: Tensor, lengths: Tensor) -> Tensor:
    """Mean over each sample's tokens; 0 for a sample without tokens."""
    return segment_sum(values, lengths) / lengths.clamp(min=1)


def repeat_per_token(values: Tensor, lengths: Tensor, num_tokens: int | None = None) -> Tensor:
    """Each sample's value, once for each of its tokens; an accelerator need not wait if the number of all is known."""
    return torch.repeat_interleave(values, lengths, output_size=num_tokens)


def add_to_last(values: Tensor, per_sample: Tensor, lengths: Tensor) -> Tensor:
    """Add each sample's value to its last token; values of samples without tokens are dropped."""
    has_tokens = lengths > 0
    last = lengths.cumsum(0)[has_tokens] - 1
    values = widen(values)
    return values.index_add(0, last, per_sample[has_tokens].to(values.dtype))


def decayed_sum(values: Tensor, lengths: Tensor, decay: float | Tensor) -> Tensor:
    """For each token, the decayed sum over itself and later tokens of its sample: `s_t = v_t + decay s_{t+1}`.

    The decay is one number, or one for each token, [total], that holds from this token to the next.
    """
    values = widen(values)
    result = values.clone()
    last = lengths.cumsum(0) - 1
    # All samples step back from their ends together, in as many steps as the longest sample has tokens.
    for back in range(1, int(lengths.max()) if len(lengths) else 0):
        place = last[lengths > back] - back
        step = decay if isinstance(decay, float) else decay[place]
        result[place] = values[place] + step * result[place + 1]
    return result


def pack(values: Tensor, mask: Tensor) -> tuple[Tensor, Tensor]:
    """The masked values of padded rows `[B, T]`, as other frameworks use them, one row after the other.

    The mask is [B, T] bool, or numbers that are 0 outside; values outside may be anything. Returns [total] values and
    [B] int64 lengths.
    """
    is_counted = mask.bool()
    return values[is_counted], is_counted.sum(dim=1)


def unpack(values: Tensor, mask: Tensor, fill: float = 0.0) -> Tensor:
    """Packed values in their padded places, [B, T], and `fill` elsewhere.

    Raises:
        ValueError: The number of values differs from the number of places.
    """
    places = int(mask.bool().sum())
    if places != len(values):
        raise ValueError(f"values: {len(values)} of them for the {places} places of the mask; pack with the same mask")
    return torch.full(mask.shape, fill, dtype=values.dtype, device=values.device).masked_scatter(mask.bool(), values)
