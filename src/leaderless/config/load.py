"""Reads a recipe from a YAML file and overrides, or raises an error that says where and why."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TypeVar

import yaml
from pydantic import ValidationError
from pydantic_core import ErrorDetails

from leaderless.base.errors import Problem, RecipeError, nearest
from leaderless.base.section import Section
from leaderless.config.keys import follow, hints_for
from leaderless.config.recipe import Recipe
from leaderless.config.source import RecipeSource, Setting, apply_overrides, merge_settings, read_yaml

AnySection = TypeVar("AnySection", bound=Section)

_RULES = {
    "model_type": "must be a section of settings",
    "dict_type": "must be a section of settings",
    "mapping_type": "must be a section of settings",
    "tuple_type": "must be a list",
    "invalid_key": "a key must be text; put it in quotes",
    "missing": "must be given",
    "union_tag_not_found": "must be a section of settings",
}
"""Rules by pydantic's kinds of errors, in terms of YAML; pydantic's own are in terms of Python."""


@dataclass(frozen=True)
class LoadedRecipe:
    """A recipe together with where its settings were written."""

    recipe: Recipe
    source: RecipeSource

    def locate(self, error: RecipeError) -> RecipeError:
        """An error that was raised for this recipe after it was read, with file and line filled in."""
        return error.placed(self._place_of)

    def _place_of(self, key: str) -> str:
        # Nodes are not in the recipe, but it names the workflow that they are in.
        return self.source.place_of("workflow" if key.partition(".")[0] in {"nodes", "repeat"} else key)


def load_recipe(
    recipe: str | Path | RecipeSource,
    overrides: Sequence[str] = (),
    defaults_of: Callable[[str], Mapping[str, Setting]] = lambda _: {},
) -> LoadedRecipe:
    """Read and check a recipe.

    Args:
        recipe: YAML file, or settings that have been read already.
        overrides: `section.key=value` each, applied on top of it in order.
        defaults_of: Function from the name of a workflow to its settings, which hold where the recipe has none.

    Raises:
        RecipeError: Something in it is wrong; all problems are named, each with its place.
    """
    written = recipe if isinstance(recipe, RecipeSource) else read_yaml(Path(recipe))
    source = apply_overrides(written, overrides)
    workflow = source.settings.get("workflow")
    try:
        defaults = defaults_of(workflow) if isinstance(workflow, str) else {}
    except RecipeError as error:
        raise error.placed(source.place_of) from error
    return LoadedRecipe(_validate(Recipe, merge_settings(defaults, source.settings), source), source)


def load_section(path: Path, section: type[AnySection]) -> AnySection:
    """Read and check a YAML file that is not a recipe, with a model of its settings, by the same rules."""
    source = read_yaml(path)
    return check_section(section, source)


def check_section(section: type[AnySection], source: RecipeSource) -> AnySection:
    """Check settings that are not a recipe's with a model of them, by the same rules."""
    return _validate(section, source.settings, source)


def _validate(section: type[AnySection], settings: Mapping[str, Setting], source: RecipeSource) -> AnySection:
    try:
        return section.model_validate(settings)
    except ValidationError as error:
        problems = [problem for details in error.errors() for problem in _problems(details, source, section)]
        raise RecipeError([problem for problem in problems if not _is_inherited(problem, problems)]) from error


def _is_inherited(problem: Problem, problems: Sequence[Problem]) -> bool:
    """Whether a problem of a role's settings is one of the general settings that they are written on top of."""
    section, _, rest = problem.key.partition(".")
    general = replace(problem, key=rest.partition(".")[2])
    return section == "roles" and general in problems


def dump_recipe(recipe: Recipe) -> str:
    """The resolved recipe as YAML with all defaults; `load_recipe` reads it back to an equal recipe."""
    settings = recipe.model_dump(mode="json")
    # PyYAML's writer in C is four times as fast, but escapes or cannot write some characters that are not ASCII.
    is_plain = json.dumps(settings, ensure_ascii=False).isascii()
    dumper = _FAST_DUMPER if is_plain else _Dumper
    return yaml.dump(settings, Dumper=dumper, sort_keys=False, allow_unicode=True)


class _Dumper(yaml.SafeDumper):
    """Escapes the line breaks of Unicode, which YAML would fold into spaces on reading."""

    def represent_str(self, data: str) -> yaml.ScalarNode:
        """Text, in double quotes where it needs escapes."""
        style = '"' if set(data) & set("\x85\u2028\u2029\ufeff") else None
        return self.represent_scalar("tag:yaml.org,2002:str", data, style)


_Dumper.add_representer(str, _Dumper.represent_str)
_FAST_DUMPER: type[yaml.SafeDumper] = getattr(yaml, "CSafeDumper", _Dumper)


def _problems(details: ErrorDetails, source: RecipeSource, root: type[Section]) -> list[Problem]:
    """One pydantic error in terms of the recipe."""
    kind, value = details["type"], details["input"]
    if kind == "extra_forbidden":
        hints = hints_for(details["loc"], value, root)
        return [Problem(".".join(path), f"unknown key{hint}", source.place_of(path)) for path, hint in hints.items()]
    path, _ = follow(details["loc"], root)
    if kind == "invalid_key":
        path = (*path[:-1], str(value))  # pydantic calls the key `true` 1
    key = ".".join(path)
    rule = re.sub(r"^\w+ should ", "must ", details["msg"].removeprefix("Value error, "))
    message = _RULES.get(kind, rule)
    if kind == "union_tag_invalid":
        wrong, known = details["ctx"]["tag"], re.findall(r"'([^']+)'", details["ctx"]["expected_tags"])
        path, key, message = (*path, "type"), f"{key}.type={wrong!r}", f"unknown type{nearest(wrong, known)}"
    elif kind == "value_error" and (not path or isinstance(value, Mapping)):
        mentioned = message.split("=")[0].split(" ")[0]
        role = path[:2] if path[:1] == ("roles",) else ()
        if "." in mentioned:
            path, key = (*role, *mentioned.split(".")), ".".join(role)
    elif kind != "missing" and isinstance(value, str | int | float | bool | None):
        key = f"{key}={value!r}"
    return [Problem(key, message, source.place_of(path))]
