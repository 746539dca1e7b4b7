"""Fused attention on Ascend, `torch_npu.npu_fusion_attention`, where it is installed and computes what it should.

It is documented in https://gitee.com/ascend/pytorch, as part of `torch_npu`. Its masks are 1 where nothing is attended
to, and causal ones are always given as the same matrix of 2,048 rows.
"""

from __future__ import annotations

import warnings
from collections.abc import Callable, Sequence
from functools import cache
from importlib import import_module
from typing import cast

import torch
from torch import Tensor

CAUSAL_ROWS = 2048
"""Rows and columns of the mask that stands for causal masks of all sizes."""
MAX_SEQUENCES = 2048
"""Most sequences of one packed call."""
LEFT_UP, RIGHT_DOWN = 2, 3
"""Modes in which the first query is aligned with the first key, or the last one with the last."""
TOLERANCE = 0.02
"""Largest error of the trial's result, which is about 1, in bfloat16."""


FusionAttention = Callable[..., tuple[Tensor, ...]]
"""`torch_npu.npu_fusion_attention`, whose first result is the attention."""


@cache
def fusion_attention(device: torch.device) -> FusionAttention | None:
    """The fused attention of a device; None where there is none, or where a small trial of it fails."""
    if device.type != "npu":
        return None
    try:
        function = cast("FusionAttention", import_module("torch_npu").npu_fusion_attention)
    except (ImportError, AttributeError):
        return None
    try:
        error = trial_error(function, device)
    except (RuntimeError, TypeError, ValueError) as problem:
        reason = (str(problem).splitlines() or [type(problem).__name__])[0]
    else:
        if error <= TOLERANCE:
            return function
        reason = f"a trial of it is wrong by {error:.2g}"
    warnings.warn(f"attention is slow and takes much memory, as npu_fusion_attention fails: {reason}", stacklevel=2)
    return None


def trial_error(function: FusionAttention, device: torch.device) -> float:
    """Largest error of a packed and of a padded call, with groups of heads and with more keys than queries."""
    generator = torch.Generator().manual_seed(0)
    query, key, value = (torch.randn(n, heads, 16, generator=generator) for n, heads in ((7, 4), (9, 2), (9, 2)))
    q, k, v = (tensor.to(device, torch.bfloat16) for tensor in (query, key, value))
    packed = attend_packed(function, q, k, v, (3, 7), (5, 9), 0.25).cpu().float()
    lengths = [(slice(0, 3), slice(0, 5)), (slice(3, 7), slice(5, 9))]
    errors = [(packed[mine] - _plain(query[mine], key[own], value[own])).abs().max() for mine, own in lengths]
    q, k, v = (tensor[-4:].transpose(0, 1)[None] for tensor in (q, k, v))
    padded = attend_padded(function, q, k, v, None, 0.25)[0].transpose(0, 1).cpu().float()
    errors.append((padded - _plain(query[-4:], key[-4:], value[-4:])).abs().max())
    return float(torch.stack(errors).max())


def _plain(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Reference result of the trial: [queries, heads, head_dim], the last query aligned with the last key."""
    key, value = (tensor.repeat_interleave(query.shape[1] // key.shape[1], dim=1) for tensor in (key, value))
    scores = torch.einsum("qhd,khd->hqk", query, key) * 0.25
    hidden = torch.ones(len(query), len(key), dtype=torch.bool).triu(len(key) - len(query) + 1)
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), value)


def attend_packed(
    function: FusionAttention,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    query_ends: Sequence[int],
    key_ends: Sequence[int],
    scale: float,
) -> Tensor:
    """Causal attention of consecutive sequences, whose last query is aligned with their last key.

    Queries are [T, query_heads, head_dim], keys and values [K, kv_heads, head_dim]; sequences are given by their ends.
    """
    return function(
        query,
        key,
        value,
        query.shape[1],
        "TND",
        atten_mask=_causal_mask(query.device),
        scale=scale,
        sparse_mode=RIGHT_DOWN,
        actual_seq_qlen=query_ends,
        actual_seq_kvlen=key_ends,
    )[0]


def attend_padded(
    function: FusionAttention, query: Tensor, key: Tensor, value: Tensor, mask: Tensor | None, scale: float
) -> Tensor:
    """Attend like `packed.attend_padded`, by Ascend's fused kernel."""
    hidden, mode = (_causal_mask(query.device), LEFT_UP) if mask is None else (~mask, 0)
    return function(query, key, value, query.shape[1], "BNSD", atten_mask=hidden, scale=scale, sparse_mode=mode)[0]


@cache
def _causal_mask(device: torch.device) -> Tensor:
    return torch.ones(CAUSAL_ROWS, CAUSAL_ROWS, dtype=torch.bool, device=device).triu(1)
