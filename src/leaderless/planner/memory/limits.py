"""Numbers that a plan shares with the code whose memory it counts, and pools of pages for keys and values."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple

MIB = 1 << 20
MAX_LOGITS, CPU_MAX_LOGITS = 1 << 25, 1 << 21
"""Most logits of one chunk, and most probabilities that are kept for the backward pass, unless there is more room; most
logits of a chunk in float32 on a CPU, so that it stays in the cache."""
MAX_WORDS = 1 << 20
"""Number of random words of dropout that are drawn at once."""
CPU_PASS_TOKENS = 2048
"""Tokens up to which samples of several prompts share a pass on a CPU that gathers nothing: it is faster with passes
whose activations stay near its caches."""
READ_BYTES = 64 * MIB
"""Bytes of a model's files that are read at a time."""
WEIGHT_BUCKET_BYTES, DEVICE_WEIGHT_BUCKET_BYTES = 32 * MIB, 256 * MIB
"""Most bytes of a bucket of weights on their way to serving ranks, except that a row is never divided; and where an
accelerator's memory is sent, which needs time to start each message and each checksum."""
PINNED_BYTES = 1024 * MIB
"""Most bytes of a block of pinned memory for weights that come; a larger weight has a block to itself."""
STATE_GROUP_BYTES, STATE_ROOMS = 64 * MIB, 3
"""Bytes of what an optimizer keeps that come to a device at a time where they are not always there, or of one weight if
they are more; and the rooms for so many on the device: while one group changes weights, one comes and one leaves."""
SMALLEST_SLOT = 64
"""Tokens of the smallest slots for keys and values; each size is twice the previous one."""
MOST_SPARE_SLOTS = 64
"""Most slots that are added beyond the needed ones. When slots of a size run out, their number at most doubles."""
PREFILL_TOKENS = 8192
"""Most tokens of a pass that reads prompts; a longer prompt is read in parts."""
ROUNDS_AHEAD = 2
"""Rounds of an exchange that are in progress at a time: one is filled while another is sent."""
ROUND_BYTES = 1 << 25
"""Approximate bytes that a rank sends to all its peers in one round, and receives."""
PIECE_BYTES = (1 << 16, 1 << 22)
"""Least and most of that for one parcel."""


PAGE_TOKENS = 64
"""Tokens of a page: few enough to waste little of the last page, and enough to keep lists of pages short."""
SPARE_ITEMS = 256
"""Most items of work that lengths add to the number of rows; with them a device has work for all its processors."""


@dataclass(frozen=True)
class CachePool:
    """Pool of an engine's pages.

    Attributes:
        tokens: Tokens of all pages.
        stays: Whether the pool, the engine's weights and its recorded passes stay while it sleeps.
    """

    tokens: int
    stays: bool = False


class CacheBound(NamedTuple):
    """Limits of engines' pools where there is not room for everything.

    Attributes:
        most_tokens: Most tokens of a pool; None without a bound.
        stays: Whether it stays while its engine sleeps.
        has_pages: Whether there are pages, for which CUDA has kernels; else keys and values are in slots.
    """

    most_tokens: int | None = None
    stays: bool = False
    has_pages: bool = True


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


def bucket_of(num_rows: int) -> int:
    """Round a number of rows up to a power of two, or from 16 on also to one and a half times such a power.

    It is at least two: for a single row, when the last response is left, `torch.compile` would make other kernels.
    """
    power = 1 << max(1, (num_rows - 1).bit_length())
    return 3 * power // 4 if power >= 32 and num_rows <= 3 * power // 4 else power


def buffers_bytes(most_rows: int, longest: int, num_heads: int, head_dim: int) -> int:
    """Bytes of the memory through which numbers reach passes, and of what these write for each other.

    For each row, 32 bytes by which its token is drawn and written, 28 of the places of its work, 16 of what is drawn, 4
    of its number, and 8 of its last token; 20 bytes for each item of work; and 4 for each page that is listed, which
    are as many as fit prompts and responses of the greatest length as there are rows. Results of items of work are
    float32, with a normalizer for each head of queries.
    """
    rows = bucket_of(most_rows)
    pages = 2 * rows * -(-longest // PAGE_TOKENS)
    numbers = rows * (32 + 28 + 16 + 4 + 8) + 2 * (rows + SPARE_ITEMS) * 20 + 4 * pages
    return numbers + (3 * rows + 2 * SPARE_ITEMS) * num_heads * (head_dim + 1) * 4
