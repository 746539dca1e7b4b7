"""Drafts of tokens on the CPU, where one of vLLM's functions does not do what its caller relies on."""

from __future__ import annotations

from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from torch import Tensor


def sample_drafts_on_cpu() -> None:
    """Have vLLM on the CPU apply temperature, `top_k` and `top_p` to tokens that have been drafted.

    It expands the settings of requests to their drafts with a kernel for whole numbers of 64 bits. Settings of other
    types are converted for it, and what it writes is lost: drafts are then judged with what was in that memory.
    """
    from vllm.v1.sample import rejection_sampler

    rejection_sampler.expand_batch_to_tokens = expand


def expand(x: Tensor, ends: Tensor, num_tokens: int, replace_from: int = 0, replace_to: int = 0) -> Tensor:
    """Repeat the value of each request for each of its tokens, with another value in place of one.

    Args:
        x: [requests] values.
        ends: [requests] number of tokens of each request and those before it.
        num_tokens: Number of all tokens.
        replace_from: Value that is replaced.
        replace_to: Value in place of it.
    """
    counts = ends.diff(prepend=ends.new_zeros(1))
    values = x.masked_fill(x == replace_from, replace_to) if replace_from != replace_to else x
    expanded = values.repeat_interleave(counts)
    assert len(expanded) == num_tokens, "tokens belong to requests"
    return expanded
