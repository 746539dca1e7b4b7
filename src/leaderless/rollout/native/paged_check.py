"""Whether the kernels of the engine with pages work on a device: each is tried once, and compared with torch."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor

from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.transport import ProcessGroup
from leaderless.models.causal_lm import CausalLM
from leaderless.planner.memory.limits import PAGE_TOKENS
from leaderless.rollout.native.lean_forward import Rotation, rotate
from leaderless.rollout.native.paged_attention import PagedAttend, attend_with_torch
from leaderless.rollout.native.paged_plan import Arrangement
from leaderless.rollout.native.paged_staging import Staging
from leaderless.rollout.native.pages import PagePool
from leaderless.rollout.native.sampling import Draw, write_drawn

TOLERANCES = {torch.float32: 1e-4, torch.bfloat16: 3e-2, torch.float16: 1e-2}
"""Largest difference of results of about 1 that rounding explains, by the type of queries, keys and values."""
OWN, PROMPT, SIBLINGS = (0, 3, 300, 64, 17), 130, 3
"""Tokens of some rows before the new one, and of a prompt that the first rows share."""
DRAW_TOLERANCE = 1e-5
"""Largest error of a cumulative probability and of a log-probability that rounding explains."""


def paged_attention(
    model: CausalLM, dtype: torch.dtype, device: torch.device, shard: ProcessGroup
) -> PagedAttend | None:
    """Choose the kernels of a CUDA device for a model in some type, if they work on all ranks of a shard.

    All ranks of the shard call it together. If they do not work, a warning gives the reason.
    """
    if device.type != "cuda":
        return None

    def error() -> float:
        from leaderless.rollout.native.paged_kernels import attend_with_kernels

        return largest_error(attend_with_kernels, heads_of(model), dtype, device)

    if reason := _why_not(error, TOLERANCES[dtype], shard):
        _warn(f"decoding is slower, since attention over pages cannot be used: {reason}")
        return None
    from leaderless.rollout.native.paged_kernels import attend_with_kernels

    return attend_with_kernels


def token_drawing(model: CausalLM, device: torch.device, shard: ProcessGroup) -> Draw:
    """Choose what draws tokens: on a CUDA device kernels, if they work on all ranks; see `paged_attention`."""
    if device.type != "cuda":
        return write_drawn
    vocabulary = int(model.model.config.get_text_config().vocab_size)

    def error() -> float:
        from leaderless.rollout.native.sampling_kernels import draw_with_kernels

        return draw_error(draw_with_kernels, vocabulary, device)

    if reason := _why_not(error, DRAW_TOLERANCE, shard):
        _warn(f"decoding is slower, since the kernels that draw tokens cannot be used: {reason}")
        return write_drawn
    from leaderless.rollout.native.sampling_kernels import draw_with_kernels

    return draw_with_kernels


def _why_not(error: Callable[[], float], tolerance: float, shard: ProcessGroup) -> str:
    """Why kernels with some error cannot be used on all ranks of a shard; empty if they can."""
    reason = ""
    try:
        if not (found := error()) < tolerance:
            reason = f"its results are wrong by {found:.2g}"
    except Exception as failure:  # noqa: BLE001 - compilers and drivers fail in many ways
        reason = (
            f"{type(failure).__name__}: {failure}".splitlines()[0].partition(" Reducing block sizes")[0].rstrip(".")
        )
    if shard.size > 1 and bool(shard.max(torch.tensor([int(bool(reason))]), "which ranks can use kernels")):
        reason = reason or "it does not work on another rank"
    return reason


def _warn(message: str) -> None:
    warnings.warn(
        f"{message}; install the Triton of torch {torch.__version__}, or let vLLM generate (rollout.engine: vllm)",
        stacklevel=3,
    )


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
    pages = PagePool(sum(-(-(tokens + 1) // PAGE_TOKENS) for tokens in (*OWN, PROMPT)))
    prompt, owns = pages.add(PROMPT), [pages.add(tokens, 1) for tokens in OWN]
    arrangement = Arrangement.of(owns, [prompt] * SIBLINGS + [None] * (len(OWN) - SIBLINGS))
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
    cached, scale = [random(size, kv_heads) for _ in range(2)], width**-0.5
    angles = random(rows, 1).float()
    rotation = Rotation.of(angles.cos().to(dtype).transpose(0, 1), angles.sin().to(dtype).transpose(0, 1))

    def error(way: Rotation | None) -> Tensor:
        found = function(query, key, value, (cached[0].clone(), cached[1].clone()), plan, scale, way)
        asked, new = (query, key) if way is None else (rotate(query, *way), rotate(key, *way))
        # Some images of torch round products of float32, but none round products of float64.
        wide = [tensor.to(torch.float64, copy=True) for tensor in (asked, new, value, *cached)]
        expected = attend_with_torch(wide[0], wide[1], wide[2], (wide[3], wide[4]), plan, scale)
        return (found.double() - expected).abs().max()

    return float(torch.stack([error(None), error(rotation)]).max())  # NaN if one is


def draw_error(function: Draw, vocabulary: int, device: torch.device) -> float:
    """Largest error of what a function draws from random logits.

    It is the distance of noise from the interval of the drawn token in the cumulative distribution, computed in
    float64, or the error of its log-probability if that is larger; 1 for another token than the likeliest where it is
    asked for.
    """
    generator, count = torch.Generator().manual_seed(0), 8
    errors = list[Tensor]()
    logits = 3 * torch.randn(count, vocabulary, generator=generator).to(device)
    noise = torch.rand(count, dtype=torch.float64, generator=generator).to(device)
    for temperature in (1.0, 0.7, 0.0):
        drawn = torch.zeros(2, count, dtype=torch.int64, device=device)
        function(logits, noise, SamplingConfig(temperature=temperature), drawn)
        tokens, scores = drawn[:1].t(), drawn[1].view(torch.float64)
        log_probs = (logits.double() / (temperature or 1)).log_softmax(1)
        errors.append((scores - log_probs.gather(1, tokens)[:, 0]).abs())
        if temperature:
            probabilities = log_probs.exp()
            ends = probabilities.cumsum(1).gather(1, tokens)[:, 0]
            errors += [noise - ends, ends - probabilities.gather(1, tokens)[:, 0] - noise]
        else:
            errors.append((tokens[:, 0] != logits.argmax(1)).double())
    return float(torch.stack(errors).max())  # NaN if any is
