"""What a user may set, and how it is read and checked. Imports no torch."""

from leaderless.config.errors import Problem, RecipeError, nearest
from leaderless.config.json import Json
from leaderless.config.load import LoadedRecipe, dump_recipe, load_recipe, load_section
from leaderless.config.recipe import Recipe
from leaderless.config.shape import all_keys

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
