"""Numbers that a plan shares with the code whose memory it counts. Imports nothing."""

from __future__ import annotations

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
