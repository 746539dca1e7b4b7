"""Responses that take turns at the places of an engine."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Tokens = NDArray[np.float64]

LAST_TURNS = 16
"""Turns that are followed one by one; before these, all places are about equally busy."""


def fullest_place(tokens: Tokens, places: int) -> Tokens:
    """The tokens of the place that has the most, if each response takes the place that is free first.

    Args:
        tokens: [..., rows] of responses in order; zeros, as after the last one of a shard, change nothing.
        places: Number of places, at least 1.

    Returns:
        [...] tokens.
    """
    num_rows = tokens.shape[-1]
    if num_rows <= places:
        return np.asarray(tokens.max(axis=-1))
    first = max(places, num_rows - LAST_TURNS * places)
    busy = tokens[..., :places].copy()
    busy += tokens[..., places:first].sum(axis=-1, keepdims=True) / places
    for row in range(first, num_rows):
        place = busy.argmin(axis=-1)[..., None]
        np.put_along_axis(busy, place, np.take_along_axis(busy, place, axis=-1) + tokens[..., row, None], axis=-1)
    return np.asarray(busy.max(axis=-1))
