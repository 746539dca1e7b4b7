"""Ages of samples at training, and the ranges of ages in reports. No torch."""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leaderless.config import Recipe

AGES: Mapping[str, tuple[float, float]] = {
    **{str(age): (age, age) for age in range(5)},
    "5-8": (5, 8),
    "9+": (9, math.inf),
}
"""First and last age of each range, in optimizer updates, by its name."""


def may_be_stale(recipe: Recipe) -> bool:
    """Whether samples of a recipe may be trained with later weights than those that sampled them."""
    return bool(recipe.open_channels) or recipe.online is not None
