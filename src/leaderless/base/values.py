"""Values that JSON can hold, which recipes, files and messages consist of."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TypeGuard

Json = None | bool | int | float | str | Sequence["Json"] | Mapping[str, "Json"]
"""Values that JSON can hold."""


def is_finite_number(value: object) -> TypeGuard[float]:
    """Check whether a value is a number that a float can hold, and not true or false."""
    if isinstance(value, bool) or not isinstance(value, int | float):
        return False
    try:
        return math.isfinite(value)
    except OverflowError:  # a whole number that is too large
        return False
