"""Texts behind which a response ends."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.data.encode import Tokenizer


def has_stopped(tokens: Sequence[int], stop: Sequence[str], tokenizer: Tokenizer) -> bool:
    """Whether the last token of a response has completed a stop text, which begins at most one token a byte before.

    Args:
        tokens: Of the response, which had not stopped before its last one.
        stop: The texts.
        tokenizer: Of the model.
    """
    if not stop:
        return False
    reach = max(len(text.encode()) for text in stop)
    text = tokenizer.decode(tokens[-reach - 1 :])
    return any(ending in text for ending in stop)
