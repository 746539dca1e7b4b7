"""Whether attention over pages works on a device: it is tried once, and compared with what torch computes."""

from __future__ import annotations

import warnings

import numpy as np
import torch
from torch import Tensor

from leaderless.data.transport import ProcessGroup
from leaderless.models.causal_lm import CausalLM
from leaderless.planner.cache_pool import PAGE_TOKENS
from leaderless.rollout.paged_attention import PagedAttend, attend_with_torch
from leaderless.rollout.paged_plan import Arrangement
from leaderless.rollout.paged_staging import Staging
from leaderless.rollout.pages import Pages

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference of results of about 1 that rounding explains, by the type of queries, keys and values."""
OWN, PROMPT, SIBLINGS = (0, 3, 300, 64, 17), 130, 3
"""Tokens of some rows before the new one, and of a prompt that the first rows share."""


def paged_attention(
    model: CausalLM, dtype: torch.dtype, device: torch.device, shard: ProcessGroup
) -> PagedAttend | None:
    """Choose the kernels of a CUDA device for a model in some type, if they work on all ranks of a shard.

    All ranks of the shard call it together. If they do not work, a warning gives the reason.
    """
    if device.type != "cuda":
        return None
    reason = ""
    try:
        from leaderless.rollout.paged_kernels import attend_with_kernels

        error = largest_error(attend_with_kernels, heads_of(model), dtype, device)
        if not error < TOLERANCES[dtype]:
            reason = f"its results are wrong by {error:.2g}"
    except Exception as failure:  # noqa: BLE001 - compilers and drivers fail in many ways
        reason = (
            f"{type(failure).__name__}: {failure}".splitlines()[0].partition(" Reducing block sizes")[0].rstrip(".")
        )
    if shard.size > 1 and bool(shard.max(torch.tensor([int(bool(reason))]), "which ranks can attend over pages")):
        reason = reason or "it does not work on another rank"
    if reason:
        warnings.warn(
            f"decoding is slower, since attention over pages cannot be used: {reason}; install the Triton of torch "
            f"{torch.__version__}, or let vLLM generate (rollout.engine: vllm)",
            stacklevel=2,
        )
        return None
    return attend_with_kernels


def heads_of(model: CausalLM) -> tuple[int, int, int]:
    """Query heads, key heads and their width, by the model's configuration."""
    text = model.model.config.get_text_config()
    heads = int(text.num_attention_heads)
    kv_heads = int(getattr(text, "num_key_value_heads", None) or heads)
    return heads, kv_heads, int(getattr(text, "head_dim", None) or text.hidden_size // heads)


def largest_error(
    function: PagedAttend, heads: tuple[int, int, int], dtype: torch.dtype, device: torch.device
) -> float:
    """Largest difference between a function and `attend_with_torch`, over rows with and without a prompt."""
    num_heads, kv_heads, width = heads
    pages = Pages(sum(-(-(tokens + 1) // PAGE_TOKENS) for tokens in (*OWN, PROMPT)))
    prompt, owns = pages.add(PROMPT), [pages.add(tokens, 1) for tokens in OWN]
    arrangement = Arrangement(owns, [prompt] * SIBLINGS + [None] * (len(OWN) - SIBLINGS))
    staging = Staging(len(OWN), PAGE_TOKENS, max(*OWN, PROMPT) + 1, device)
    lengths = np.array(OWN)
    host = staging.host(arrangement, pages, lengths + 1)
    for tensor in (host.noise, host.positions, host.seats, host.places):
        tensor.zero_()
    host.places.numpy()[: len(OWN)] = pages.slots_at(arrangement.own_slots, lengths)
    plan, rows = staging.send(arrangement, lengths + 1, pages), len(host.places)
    generator = torch.Generator().manual_seed(0)

    def random(count: int, number: int) -> Tensor:
        return torch.randn(count, number, width, generator=generator).to(device, dtype)

    query, key, value = random(rows, num_heads), random(rows, kv_heads), random(rows, kv_heads)
    size = (pages.num_pages + 1) * PAGE_TOKENS
    inputs = query, key, value, random(size, kv_heads), random(size, kv_heads)

    def attended(one: PagedAttend, kind: torch.dtype) -> Tensor:
        query, key, value, *cached = (tensor.to(kind, copy=True) for tensor in inputs)
        return one(query, key, value, (cached[0], cached[1]), plan, width**-0.5).double()

    # Some images of torch round products of float32, but none those of float64.
    return float((attended(function, dtype) - attended(attend_with_torch, torch.float64)).abs().max())
