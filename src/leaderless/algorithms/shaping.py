"""What a response loses by its length."""

from __future__ import annotations

from torch import Tensor


def overlong_penalty(lengths: Tensor, *, max_tokens: int, buffer_tokens: int) -> Tensor:
    """What is added to the reward of a response that comes near its longest length.

    Formula: 0 up to max_tokens - buffer_tokens, then falling linearly to -1 at max_tokens.

    Source: DAPO, arXiv 2503.14476, equation 13 (soft overlong punishment).

    Args:
        lengths: [n] int64, response tokens.
        max_tokens: Longest response allowed.
        buffer_tokens: Over which the penalty rises, at least 1.

    Returns:
        [n] float32, between -1 and 0.
    """
    excess = lengths - (max_tokens - buffer_tokens)
    return -(excess.float() / buffer_tokens).clamp(0, 1)
