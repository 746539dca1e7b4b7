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
    from leaderless.config.load import LoadedRecipe as LoadedRecipe
    from leaderless.config.load import all_keys as all_keys
    from leaderless.config.load import dump_recipe as dump_recipe
    from leaderless.config.load import load_recipe as load_recipe
    from leaderless.config.load import load_section as load_section
    from leaderless.config.recipe import Recipe as Recipe

_OF_LOAD = ("LoadedRecipe", "all_keys", "dump_recipe", "load_recipe", "load_section")


def __getattr__(name: str) -> object:
    """Import a public name from the module that owns it."""
    if name not in (*_OF_LOAD, "Recipe"):
        raise AttributeError(f"module 'leaderless.config' has no attribute {name!r}")
    return getattr(import_module(f"leaderless.config.{'recipe' if name == 'Recipe' else 'load'}"), name)
