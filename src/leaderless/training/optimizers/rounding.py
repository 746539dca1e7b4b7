"""Stochastic rounding to bfloat16, by noise that depends on neither ranks nor the order of weights.

A number between two neighbors in bfloat16 becomes the upper one with a probability that is its distance from the lower
one (Gupta et al., arXiv 1502.02551). So averages that change by less than half of that distance in an update still
change, on average as they should; rounded to the nearest, they would stay. The second moment of AdamW, for one, moves
by at most a thousandth of what a gradient differs from it, and numbers in bfloat16 are at least 1/256 apart.
"""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

from leaderless.distributed.weights.blocks import Shape, WeightBlock
from leaderless.models.lora.dropout import key_of, mixed
from leaderless.planner.memory.limits import MAX_WORDS

BITS = 16
"""Bits of a float32 number that bfloat16 lacks."""
_MASK = (1 << BITS) - 1

Piece = tuple[int | slice, ...]


def rounded(values: Tensor, noise: Tensor) -> Tensor:
    """Numbers in bfloat16 from finite ones in float32.

    Args:
        values: Numbers, float32.
        noise: Words with as many elements, int64, of which the last 16 bits are used.
    """
    raised = values.contiguous().view(torch.int32) + (noise & _MASK).int()
    return (raised & ~_MASK).view(torch.float32).bfloat16()


def pieces(local: Tensor) -> Iterator[Piece]:
    """Indices of parts of a tensor of at least one dimension, with few enough numbers that a random word each fits."""
    if local.ndim > 2:
        for index, one in enumerate(local):
            yield from ((index, *rest) for rest in pieces(one))
        return
    rows = max(1, MAX_WORDS // max(1, local[:1].numel()))
    yield from ((slice(first, first + rows),) for first in range(0, len(local), rows))


def random_words(
    name: str, update: int, shape: Shape, block: WeightBlock, piece: Piece, device: torch.device
) -> Tensor:
    """A random word for each number in a piece of a rank's block of a weight, int64.

    It follows from the weight's name, the update, and the place of the number in the whole weight.
    """
    *before, rows = piece
    assert isinstance(rows, slice)
    strides = torch.empty(shape, device="meta").stride()
    first = sum(
        (offset + index) * stride
        for offset, index, stride in zip(block.offsets, before, strides, strict=False)
        if isinstance(index, int)
    )
    inner = [range(size) for size in block.sizes[len(before) :]]
    inner[0] = inner[0][rows]
    places = torch.full((1,) * len(inner), first, dtype=torch.int64, device=device)
    for dim, span in enumerate(inner):
        offset, stride = block.offsets[len(before) + dim], strides[len(before) + dim]
        along = (torch.arange(span.start, span.stop, device=device) + offset) * stride
        places = places + along.view(*(-1 if one == dim else 1 for one in range(len(inner))))
    seed = mixed(torch.tensor(key_of(f"{name} in update {update}"), device=device))
    return mixed(seed ^ mixed(places))
