"""Computations of scoring on logits besides products, as kernels that read them once; `torch.compile` makes them."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from functools import cache, partial
from typing import Any, NamedTuple, TypeVar

import torch
from torch import Tensor
from torch._dynamo import mark_static

from leaderless.distributed.errors import is_out_of_memory
from leaderless.models import compiled_layers
from leaderless.models.compiled_layers import compiled
from leaderless.models.logit_form import damping, squashed

Result = TypeVar("Result")

BLOCK = 1024
"""Words of a block, which a kernel keeps in registers: as many as Inductor lets it."""
TOLERANCE = 1e-4
"""Largest difference of compiled numbers in float32 that is rounding."""


def summarize(
    logits: Tensor, divisor: Tensor, targets: Tensor, steepness: float | None = None
) -> tuple[Tensor, Tensor, Tensor]:
    """Compute log-probabilities of targets, normalizers and entropies, [n] each, by blocks of words.

    A block has its largest logit m, the sum of exp(z - m), and the sum of (z - m) exp(z - m); from these of all blocks
    follow the sums over all words. So no logit is needed twice.

    Args:
        logits: [n, words] float32, as the head gives them.
        divisor: [n, 1] temperatures.
        targets: [n, 1] int64, places of the targets.
        steepness: Factor of logits, whose hyperbolic tangent is what temperatures divide; None to divide logits.
    """
    scaled, words = _scaled(logits, divisor, steepness), logits.shape[1]
    whole = words - words % BLOCK
    found = [_sums(scaled.narrow(1, 0, whole).view(-1, whole // BLOCK, BLOCK))] if whole else []
    if whole < words:
        found.append(_sums(scaled.narrow(1, whole, words - whole).unsqueeze(1)))
    largest, sums, products = (torch.cat(one, dim=1) for one in zip(*found, strict=True))
    top = largest.amax(dim=1, keepdim=True)
    below = largest - top
    powers = below.exp()
    total = (sums * powers).sum(dim=1)
    mean = ((products + below * sums) * powers).sum(dim=1) / total  # of logits, less the largest one
    log_total = total.log()
    target = (_scaled(logits.gather(1, targets), divisor, steepness) - top).squeeze(1)
    return target - log_total, top.squeeze(1) + log_total, log_total - mean


def _scaled(logits: Tensor, divisor: Tensor, steepness: float | None) -> Tensor:
    """Divide logits by temperatures, or their hyperbolic tangents."""
    return (logits if steepness is None else squashed(logits, steepness)) / divisor


def _sums(block: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Of [n, blocks, words]: the largest logit m, the sums of exp(z - m), and of (z - m) exp(z - m)."""
    largest = block.amax(dim=2)
    below = block - largest.unsqueeze(2)
    powers = below.exp()
    return largest, powers.sum(dim=2), (powers * below).sum(dim=2)


def slope(
    logits: Tensor,
    divisor: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    dtype: torch.dtype,
    steepness: float | None = None,
) -> Tensor:
    """Compute p - 1_t, [n, words] of a type, from logits as above and [n, 1] normalizers.

    A target of -1 is a word of another rank. With a hyperbolic tangent it is multiplied by the derivative of that.
    """
    probabilities = (_scaled(logits, divisor, steepness) - normalizers).exp()
    return _damped(probabilities - _is_target(logits, targets), logits, steepness).to(dtype)


def bent_slope(  # noqa: PLR0913, PLR0917
    logits: Tensor,
    divisor: Tensor,
    targets: Tensor,
    normalizers: Tensor,
    entropies: Tensor,
    by_log_probs: Tensor,
    by_entropies: Tensor,
    dtype: torch.dtype,
    steepness: float | None = None,
) -> Tensor:
    """The same with a loss that depends on entropies: (p - 1_t) g + p (log p + H) h.

    All but logits are [n, 1], also g, the gradients of log-probabilities, and h, the gradients of entropies.
    """
    log_p = _scaled(logits, divisor, steepness) - normalizers
    probabilities = log_p.exp()
    bend = probabilities * (log_p + entropies) * by_entropies
    whole = (probabilities - _is_target(logits, targets)) * by_log_probs + bend
    return _damped(whole, logits, steepness).to(dtype)


def _damped(values: Tensor, logits: Tensor, steepness: float | None) -> Tensor:
    """Multiply slopes by the derivative of the hyperbolic tangent, if there is one."""
    return values if steepness is None else values * damping(squashed(logits, steepness), steepness)


def _is_target(logits: Tensor, targets: Tensor) -> Tensor:
    """[n, words] 1 at targets, and else 0."""
    return (torch.arange(logits.shape[1], device=logits.device) == targets).to(logits.dtype)


class FusedScores(NamedTuple):
    """These functions, compiled for any number of tokens and one number of words."""

    summarize: Callable[[Tensor, Tensor, Tensor, float | None], tuple[Tensor, Tensor, Tensor]]
    slope: Callable[[Tensor, Tensor, Tensor, Tensor, torch.dtype, float | None], Tensor]
    bent_slope: Callable[..., Tensor]


PLAIN = FusedScores(summarize, slope, bent_slope)
"""The same, not compiled."""


def compile_scores() -> FusedScores:
    """Compile the functions; kernels are made when they are first called."""
    return _compiled(compiled_layers.BACKEND)


@cache
def _compiled(backend: str) -> FusedScores:
    functions: list[Callable[..., Any]] = [compiled(one, backend) for one in PLAIN]
    return FusedScores(*(partial(_call, one) for one in functions))


def _call(function: Callable[..., Result], logits: Tensor, *others: object) -> Result:
    mark_static(logits, 1)
    # Of a view, kernels would be made for the size of all that it is a view of.
    return function(logits, *(one.clone() if isinstance(one, Tensor) else one for one in others))


@torch.no_grad()  # as within passes, since kernels are made for either
def scores_failure(device: torch.device, dtype: torch.dtype, words: int, steepness: float | None = None) -> str:
    """Why the functions cannot be compiled for a device, a type and a number of words; empty if they can.

    The steepness is the one with which they are called.
    """
    generator = torch.Generator().manual_seed(0)
    logits, divisor, first, second = (
        torch.randn(shape, generator=generator).to(device) for shape in ((3, words), (3, 1), (3, 1), (3, 1))
    )
    divisor, targets = divisor.abs() + 0.5, torch.arange(3, device=device).unsqueeze(1)

    def results(kind: FusedScores) -> Iterator[Tensor]:
        _, normalizers, entropies = found = kind.summarize(logits, divisor, targets, steepness)
        common = logits, divisor, targets, normalizers.unsqueeze(1)
        yield from found
        yield kind.slope(*common, dtype, steepness)
        yield kind.bent_slope(*common, entropies.unsqueeze(1), first, second, dtype, steepness)

    try:
        fused, plain = [*results(compile_scores())], [*results(PLAIN)]
    except Exception as error:
        if is_out_of_memory(error):
            raise
        return f"{type(error).__name__}: {error}"
    differences = [(one - other).abs().max().float() for one, other in zip(fused, plain, strict=True)]
    largest = float(torch.stack(differences).max())  # NaN if one is
    rounding = TOLERANCE + torch.finfo(dtype).eps * 8
    return "" if largest <= rounding else f"its scores differ by {largest:.1e}"
