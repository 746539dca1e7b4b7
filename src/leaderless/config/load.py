"""From a YAML file and overrides to a recipe, or to an error that says where and why."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import UnionType
from typing import Union, get_args, get_origin

import yaml
from pydantic import BaseModel, ValidationError
from pydantic_core import ErrorDetails

from leaderless.config.errors import Problem, RecipeError, nearest
from leaderless.config.recipe import Recipe
from leaderless.config.rewards import RewardOptions, RewardsConfig
from leaderless.config.source import RecipeSource, apply_overrides, read_yaml

_RULES = {
    "model_type": "must be a section of settings",
    "dict_type": "must be a section of settings",
    "mapping_type": "must be a section of settings",
    "tuple_type": "must be a list",
    "invalid_key": "a key must be text; put it in quotes",
}
"""What pydantic says in terms of Python, in terms of YAML."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe together with where its settings were written."""

    recipe: Recipe
    source: RecipeSource

    def locate(self, error: RecipeError) -> RecipeError:
        """The same error with file and line filled in.

        Args:
            error: An error raised for this recipe after it was read.
        """
        return RecipeError([problem if problem.place else self._locate(problem) for problem in error.problems])

    def _locate(self, problem: Problem) -> Problem:
        # Nodes are not in the recipe, but it names the workflow that they are in.
        key = "workflow" if problem.key.partition(".")[0] == "nodes" else problem.key
        return Problem(problem.key, problem.message, self.source.place_of(key))


def load_recipe(path: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Read and check a recipe.

    Args:
        path: The YAML file.
        overrides: `section.key=value` each, applied on top of the file in order.

    Raises:
        RecipeError: Something in it is wrong; all problems are named, each with its place.
    """
    source = apply_overrides(read_yaml(Path(path)), overrides)
    try:
        return LoadedRecipe(Recipe.model_validate(source.settings), source)
    except ValidationError as error:
        raise RecipeError([_problem(details, source) for details in error.errors()]) from error


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML, every default written out; `load_recipe` reads it back to an equal recipe.

    Args:
        recipe: What to write.
    """
    settings = recipe.model_dump(mode="json", exclude_none=True)
    return yaml.dump(settings, Dumper=_Dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Escapes the line breaks of Unicode, which YAML would fold into spaces on reading."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Text, in double quotes where it needs escapes."""
        style = '"' if set(data) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)


def _problem(details: ErrorDetails, source: RecipeSource) -> Problem:
    """What one pydantic error means to the user."""
    path = tuple(str(part) for part in details["loc"])
    kind = details["type"]
    if kind == "invalid_key":
        path = (*path[:-1], str(details["input"]))  # pydantic calls the key `true` 1
    key = ".".join(path)
    rule = re.sub(r"^\w+ should ", "must ", details["msg"].removeprefix("Value error, "))
    message = _RULES.get(kind, rule)
    if kind == "extra_forbidden":
        return Problem(key, f"unknown key{_nearest_key(path)}", source.place_of(path))
    if kind == "missing":
        return Problem(key, "must be given", source.place_of(path))
    value = details["input"]
    if kind == "value_error" and (not path or isinstance(value, Mapping)):
        mentioned = message.split("=")[0].split(" ")[0]
        if "." in mentioned:
            return Problem("", message, source.place_of(mentioned))
        return Problem(key, message, source.place_of(path))
    if isinstance(value, str | int | float | bool | None):
        return Problem(f"{key}={value!r}", message, source.place_of(path))
    return Problem(key, message, source.place_of(path))


def _nearest_key(path: tuple[str, ...]) -> str:
    """A hint for an unknown key: a sibling that is spelt alike, else a key of that name in another section."""
    annotation: object = Recipe
    for part in path[:-1]:
        annotation = _child(annotation, part)
    section = _section_in(annotation)
    hint = nearest(path[-1], section.model_fields if section else [])
    if "did you mean" in hint:
        return hint
    elsewhere = [key for key in all_keys() if key.rpartition(".")[2] == path[-1]]
    return f" (did you mean '{elsewhere[0]}'?)" if elsewhere else hint


def _child(annotation: object, part: str) -> object:
    """The annotation of what a key holds, given that of the section or mapping that it is in."""
    section = _section_in(annotation)
    if section is not None:
        field = section.model_fields.get(part)
        if field is None:
            return RewardOptions if section is RewardsConfig and ":" in part else None
        return field.annotation
    arguments = get_args(annotation)
    return arguments[1] if get_origin(annotation) is Mapping else None


def _section_in(annotation: object) -> type[BaseModel] | None:
    """The pydantic model inside an annotation such as `X | None`."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return annotation
    if get_origin(annotation) in {Union, UnionType}:
        return next((found for arg in get_args(annotation) if (found := _section_in(arg))), None)
    return None


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Dotted names of all settings that have a fixed name.

    Args:
        section: Where to begin.
        prefix: What to put before each name.
    """
    keys: list[str] = []
    for name, field in section.model_fields.items():
        inner = _section_in(field.annotation)
        keys += all_keys(inner, f"{prefix}{name}.") if inner else [f"{prefix}{name}"]
    return keys
