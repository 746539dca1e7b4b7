"""What a user may set, and how it is read and checked. Imports no torch.

The names of other modules are loaded on first use, so that a process that needs one section of a recipe reads no other.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from importlib import import_module
from typing import TYPE_CHECKING, TypeGuard

if TYPE_CHECKING:
    from leaderless.config.errors import Problem as Problem
    from leaderless.config.errors import RecipeError as RecipeError
    from leaderless.config.errors import nearest as nearest
    from leaderless.config.load import LoadedRecipe as LoadedRecipe
    from leaderless.config.load import dump_recipe as dump_recipe
    from leaderless.config.load import load_recipe as load_recipe
    from leaderless.config.load import load_section as load_section
    from leaderless.config.recipe import Recipe as Recipe
    from leaderless.config.shape import all_keys as all_keys

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


_NAMES = {
    "errors": ("Problem", "RecipeError", "nearest"),
    "load": ("LoadedRecipe", "dump_recipe", "load_recipe", "load_section"),
    "recipe": ("Recipe",),
    "shape": ("all_keys",),
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that owns it."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"leaderless.config.{module}"), name)
    raise AttributeError(f"module 'leaderless.config' has no attribute {name!r}")
