"""Products of a few rows with a large matrix, on the CPU.

BLAS libraries hand out such a product to threads by its rows. With few of them each thread has little to do beside
reading the whole matrix. As a batch of products with blocks of the matrix it is handed out by blocks, and is up to
three times as fast.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import linear

BLOCK = 128
"""Outputs of one block."""
LARGE = 1 << 18
"""Weights of a matrix from which on it is worth it."""
FEW = 256
"""Rows up to which it is worth it."""


def linear_for_few(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """What `torch.nn.functional.linear` gives, up to the order of sums.

    Args:
        rows: [n, inputs].
        weight: [outputs, inputs].
        bias: [outputs].

    Returns:
        [n, outputs].
    """
    outputs, inputs = weight.shape
    whole = outputs - outputs % BLOCK
    if not (
        rows.device.type == "cpu"
        and len(rows) <= FEW
        and whole * inputs >= LARGE
        and rows.dtype in {torch.float32, torch.float64}
        and weight.is_contiguous()
    ):
        return linear(rows, weight, bias)
    blocks = weight[:whole].view(-1, BLOCK, inputs).transpose(1, 2)
    products = torch.bmm(rows.expand(len(blocks), -1, -1), blocks).transpose(0, 1).reshape(len(rows), whole)
    if whole < outputs:
        products = torch.cat([products, linear(rows, weight[whole:])], dim=1)
    return products if bias is None else products.add_(bias)
