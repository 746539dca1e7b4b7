"""The memory of a native engine on an accelerator for keys and values: pages of a pool whose size does not change."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

PAGE_TOKENS = 64
"""Tokens of a page: `leaderless.rollout.pages` has the same."""
SPARE_ITEMS = 256
"""Items of work that long sequences add to a decoding step: `leaderless.rollout.paged_plan` has the same."""


@dataclass(frozen=True)
class CachePool:
    """What an engine has.

    Attributes:
        tokens: Tokens of all pages.
        stays: Whether the pool, the engine's weights and its recorded passes stay while it sleeps.
    """

    tokens: int
    stays: bool = False


class CacheBound(NamedTuple):
    """What engines may have where there is not room for everything: most tokens of a pool, and whether it stays."""

    most_tokens: int | None = None
    stays: bool = False


UNBOUND = CacheBound()
"""A pool for all sequences at their longest, which is released while its engine sleeps."""


def pages_for(tokens: int) -> int:
    """Pages of a segment of some tokens and one more."""
    return -(-(tokens + 1) // PAGE_TOKENS)


def pool_tokens(num_sequences: int, own: int, num_prompts: int, prompt: int, most: int | None) -> int:
    """Tokens of a pool in which no sequence has to wait for pages, or of the largest one that is allowed.

    Args:
        num_sequences: Sequences that are decoded at the same time.
        own: Most tokens that each of them has for itself.
        num_prompts: Prompts that several sequences share.
        prompt: Most tokens of a prompt.
        most: Most tokens of the pool; a single sequence has to fit in any case. None without a bound.
    """
    # An engine starts a sequence only if each of the others may take one page more.
    pages = num_sequences * (pages_for(own) + 1) + num_prompts * pages_for(prompt)
    if most is not None:
        pages = min(pages, max(most // PAGE_TOKENS, pages_for(own + prompt) + 2))
    return pages * PAGE_TOKENS


def results_bytes(num_sequences: int, num_heads: int, head_dim: int) -> int:
    """Bytes for the results of items of work, which are float32 with a normalizer each."""
    rows = 1 << max(0, num_sequences - 1).bit_length()
    return (3 * rows + 2 * SPARE_ITEMS) * num_heads * (head_dim + 1) * 4
