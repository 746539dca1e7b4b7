"""Matrix products that torch alone computes too slowly, or rounds too coarsely."""

from __future__ import annotations

from functools import cache

import torch
from torch import Tensor
from torch.nn.functional import linear

BLOCK = 128
"""Outputs of one block."""
LARGE = 1 << 18
"""Smallest number of weights for which blocks are worth it."""
FEW = 256
"""Largest number of rows for which blocks are worth it."""
WIDENED = 1 << 24
"""Most weights that are converted to float32 at a time, where the device cannot write float32 itself."""


def linear_for_few(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute what `torch.nn.functional.linear` computes, up to the order of sums.

    BLAS libraries give each thread some rows of such a product. With few rows a thread has little to do besides reading
    the whole matrix. As a batch of products with blocks of the matrix, each thread gets blocks instead, and the product
    is up to three times as fast on a CPU. Rows are [n, inputs], the weight is [outputs, inputs], the bias [outputs].
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


def linear_in_float32(rows: Tensor, weight: Tensor, bias: Tensor | None = None) -> Tensor:
    """Compute a linear layer of [n, inputs] in at least float32. Without a gradient for half precision.

    Rounded to bfloat16, a logit between 16 and 32 would become a multiple of 0.125.
    """
    if rows.dtype.itemsize >= 4:
        return linear_for_few(rows, weight, bias)
    if _can_write_float32(rows.device.type):
        products = torch.mm(rows, weight.t(), out_dtype=torch.float32)
    else:
        products = torch.empty(len(rows), len(weight), device=rows.device)
        size, wide = max(1, WIDENED // weight.shape[1]), rows.float()
        for part, columns in zip(torch.split(weight, size), torch.split(products, size, dim=1), strict=True):
            columns.copy_(wide @ part.float().t())
    return products if bias is None else products.add_(bias)


def bmm_in_float32(left: Tensor, right: Tensor) -> Tensor:
    """Multiply [b, n, k] and [b, k, m] into at least float32. Without a gradient for half precision."""
    if left.dtype.itemsize >= 4:
        return torch.bmm(left, right)
    if _can_write_float32(left.device.type):
        return torch.bmm(left, right, out_dtype=torch.float32)
    return torch.bmm(left.float(), right.float())


def add_product(total: Tensor, left: Tensor, right: Tensor) -> None:
    """Add the product of [n, k] and [k, m] to a total, [n, m], in place, and in one kernel where there is one.

    To a total in float32, an accelerator adds products of half precision that are not rounded to it.
    """
    if total.dtype == left.dtype:
        total.addmm_(left, right)
    elif _can_add_float32(total.device.type):
        torch.addmm(total, left, right, out_dtype=torch.float32, out=total)
    elif _can_write_float32(total.device.type):
        total += torch.mm(left, right, out_dtype=torch.float32)
    else:
        total += left @ right


@cache
def _can_write_float32(device_type: str) -> bool:
    """Try whether kernels on a device multiply bfloat16 matrices and write float32."""
    if device_type == "cpu":
        return False
    matrix = torch.ones(16, 16, dtype=torch.bfloat16, device=device_type)
    try:
        torch.mm(matrix, matrix, out_dtype=torch.float32)
        torch.bmm(matrix[None], matrix[None], out_dtype=torch.float32)
    except RuntimeError:  # not there for this kind of device, or this library
        return False
    return True


@cache
def _can_add_float32(device_type: str) -> bool:
    """Try whether a kernel on a device multiplies bfloat16 matrices and adds them to float32, in place."""
    if not _can_write_float32(device_type):
        return False
    matrix, total = (torch.full((16, 16), one, device=device_type) for one in (1.0, 2.0**-10))
    matrix = matrix.to(torch.bfloat16)
    try:
        torch.addmm(total, matrix, matrix, out_dtype=torch.float32, out=total)
        return bool((total == 16 + 2.0**-10).all())  # in bfloat16 the sum would be 16
    except (RuntimeError, TypeError):  # as above, or the total has to be bfloat16, as in torch 2.8
        return False
