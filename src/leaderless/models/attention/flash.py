"""FlashAttention-3 in the place of torch's own kernels, where it is installed and computes what these compute."""

from __future__ import annotations

from collections.abc import Sequence
from importlib.util import find_spec

import torch
from torch import Tensor
from torch.nn import attention

from leaderless.models.attention.form import AttentionForm
from leaderless.models.attention.shared_prompts import Family, VarlenAttention

PACKAGE = "flash_attn_interface"
"""Module with the kernels, which the package `flash_attn_3` installs."""
CAPABILITY = 9
"""Generation of processors that the kernels are for: Hopper."""
TOLERANCE = 0.02
"""Largest relative difference of a trial's results, in bfloat16."""
FAMILIES = (Family(40, (9, 17)), Family(150, (70,)), Family(5, ()))

Heads = tuple[int, int, int]
"""Numbers of heads of queries and of keys, and their size."""


def activate_flash_attention_3(device: torch.device, models: Sequence[Heads]) -> str | None:
    """Let attention in half precision use FlashAttention-3 from now on, if a trial with each of the models is right.

    Returns:
        None if it is used. Else the reason, which is empty where nothing is installed that torch could use.
    """
    activate = getattr(attention, "activate_flash_attention_impl", None)
    if activate is None or find_spec(PACKAGE) is None:
        return ""
    if torch.cuda.get_device_capability(device)[0] != CAPABILITY:
        return "it is for processors of compute capability 9.0"
    models = models or [(4, 2, 128)]
    expected = [_trial(device, heads) for heads in models]
    try:
        activate("FA3")
        results = [_trial(device, heads) for heads in models]
        errors = [
            float((result - other).norm() / other.norm())
            for own, others in zip(results, expected, strict=True)
            for result, other in zip(own, others, strict=True)
        ]
    except (AttributeError, ImportError, OSError, RuntimeError, TypeError, ValueError) as error:
        reason = (str(error).splitlines() or [type(error).__name__])[0]
    else:
        wrong = [error for error in errors if not error <= TOLERANCE]  # or NaN
        if not wrong:
            return None
        reason = f"a trial of it differs by {wrong[0]:.2g}"
    restore_flash_attention()
    return reason


def restore_flash_attention() -> None:
    """Let attention use torch's own kernels again."""
    attention.restore_flash_attention_impl()


def _trial(device: torch.device, heads: Heads) -> list[Tensor]:
    """Attention of some samples and its gradients, float32."""
    generator = torch.Generator().manual_seed(0)
    num_tokens = sum(family.num_tokens for family in FAMILIES)
    query_heads, key_heads, size = heads
    query, key, value = (
        torch.randn(num_tokens, number, size, generator=generator).to(device, torch.bfloat16).requires_grad_()
        for number in (query_heads, key_heads, key_heads)
    )
    with torch.enable_grad():
        output = VarlenAttention(FAMILIES, device).attend(0, query, key, value, AttentionForm(size**-0.5))
        slope = torch.randn(output.shape, generator=generator).to(output)
        gradients = torch.autograd.grad(output, [query, key, value], slope)
    return [tensor.float() for tensor in (output.detach(), *gradients)]
