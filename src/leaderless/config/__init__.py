"""Settings of a user, and how they are read and checked. Imports no torch.

The names of other modules are loaded on first use, so that a process that needs one section of a recipe reads no other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

from leaderless.base.errors import Problem as Problem
from leaderless.base.errors import RecipeError as RecipeError
from leaderless.base.errors import nearest as nearest

if TYPE_CHECKING:
    from leaderless.config.keys import all_keys as all_keys
    from leaderless.config.load import LoadedRecipe as LoadedRecipe
    from leaderless.config.load import dump_recipe as dump_recipe
    from leaderless.config.load import load_recipe as load_recipe
    from leaderless.config.load import load_section as load_section
    from leaderless.config.recipe import Recipe as Recipe

_NAMES = {
    "load": ("LoadedRecipe", "dump_recipe", "load_recipe", "load_section"),
    "recipe": ("Recipe",),
    "keys": ("all_keys",),
}


def __getattr__(name: str) -> object:
    """Import a public name from the module that owns it."""
    for module, names in _NAMES.items():
        if name in names:
            return getattr(import_module(f"leaderless.config.{module}"), name)
    raise AttributeError(f"module 'leaderless.config' has no attribute {name!r}")
