"""Rotary positions of the tokens of a pass."""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor


class Rotation(NamedTuple):
    """Factors by which queries and keys are rotated.

    Attributes:
        cosine: [T, 1, head_dim].
        sine: [T, 1, head_dim], negated in the first half of a head.
    """

    cosine: Tensor
    sine: Tensor

    @classmethod
    def of(cls, cosine: Tensor, sine: Tensor) -> Rotation:
        """The rotation by the cosines and sines of `transformers`, [1, T, head_dim]."""
        cosine, sine = (values.squeeze(0).unsqueeze(1) for values in (cosine, sine))
        half = sine.shape[-1] // 2
        return cls(cosine, torch.cat((-sine[..., :half], sine[..., half:]), dim=-1))


def rotate(values: Tensor, cosine: Tensor, sine: Tensor) -> Tensor:
    """Rotate each half of a head of [T, heads, head_dim] with the other, rounded step by step as in `transformers`."""
    return values * cosine + values.roll(values.shape[-1] // 2, -1) * sine
