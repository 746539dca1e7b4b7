"""Texts that end a response."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.data.encode import Tokenizer


def has_stopped(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Check whether the last token of a response, which had not stopped before, completes a stop text.

    A stop text begins at most as many tokens earlier as it has bytes.
    """
    if not stop:
        return False
    reach = max(len(text.encode()) for text in stop)
    text = tokenizer.decode(tokens[-reach - 1 :])
    return any(ending in text for ending in stop)
