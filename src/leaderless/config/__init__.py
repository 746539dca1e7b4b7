"""What a user may set, and how it is read and checked. Imports no torch.

The names below are loaded on first use, so that a process that needs one section of a recipe reads no other.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from leaderless.config.errors import Problem as Problem
    from leaderless.config.errors import RecipeError as RecipeError
    from leaderless.config.errors import nearest as nearest
    from leaderless.config.json import Json as Json
    from leaderless.config.load import LoadedRecipe as LoadedRecipe
    from leaderless.config.load import dump_recipe as dump_recipe
    from leaderless.config.load import load_recipe as load_recipe
    from leaderless.config.load import load_section as load_section
    from leaderless.config.recipe import Recipe as Recipe
    from leaderless.config.shape import all_keys as all_keys

_HOME = {
    "Json": "json",
    "LoadedRecipe": "load",
    "Problem": "errors",
    "Recipe": "recipe",
    "RecipeError": "errors",
    "all_keys": "shape",
    "dump_recipe": "load",
    "load_recipe": "load",
    "load_section": "load",
    "nearest": "errors",
}

__all__ = [
    "Json",
    "LoadedRecipe",
    "Problem",
    "Recipe",
    "RecipeError",
    "all_keys",
    "dump_recipe",
    "load_recipe",
    "load_section",
    "nearest",
]


def __getattr__(name: str) -> object:
    """Import a public name from the module that owns it."""
    if name not in _HOME:
        raise AttributeError(f"module 'leaderless.config' has no attribute {name!r}")
    return getattr(import_module(f"leaderless.config.{_HOME[name]}"), name)
