"""Finds the sections and keys of a recipe through the types of its models."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from types import UnionType
from typing import Annotated, Union, get_args, get_origin

from pydantic import BaseModel, Tag

from leaderless.algorithms.registry import CUSTOM
from leaderless.base.errors import closest, nearest
from leaderless.base.named_functions import is_function_name, load_class
from leaderless.base.section import Section
from leaderless.config.foreign_names import own_name
from leaderless.config.recipe import Recipe
from leaderless.config.reward_options import RewardOptions
from leaderless.config.rewards import RewardsConfig, named_type


def hints_for(
    location: Sequence[int | str], value: object, root: type[BaseModel] = Recipe
) -> dict[tuple[str, ...], str]:
    """Hints for an unknown key at pydantic's location: a sibling, a key of another section, or of another framework.

    The keys of an unknown section are looked up one by one, so there is a hint for each of them, by its path.
    """
    path, sections = follow(location, root)
    if root is Recipe and path[:1] == ("models",) and path[2:] == ("optimizer",):
        return {path: f": a role has its own optimizer as 'roles.{path[1]}.optimizer'"}
    siblings = sorted({name for section in sections for name in section.model_fields})
    hint, has_sibling = nearest(path[-1], siblings), closest(path[-1], siblings) is not None
    if has_sibling and (isinstance(value, Mapping) or root is not Recipe):
        return {path: hint}
    keys = all_keys(root)
    meant = {leaf: _meant(leaf, keys, is_like_sibling=has_sibling) for leaf in _leaves(path, value)}
    known = {leaf: key for leaf, key in meant.items() if key and (root is Recipe or key in keys)}
    return {leaf: f" (did you mean '{key}'?)" for leaf, key in known.items()} or {path: hint}


def _meant(path: tuple[str, ...], keys: Sequence[str], *, is_like_sibling: bool) -> str | None:
    """The setting with the same ending, with that name in another framework, or with a similar last part."""
    ending = "." + ".".join(path[-2:])
    exact = next((key for key in keys if len(path) > 1 and key.endswith(ending)), None) or own_name(path)
    if exact or is_like_sibling:
        return exact
    by_name = {key.rpartition(".")[2]: key for key in reversed(keys)}
    similar = closest(path[-1], [*by_name][::-1], similarity=0.8)
    return by_name[similar] if similar else None


def _leaves(path: tuple[str, ...], value: object) -> list[tuple[str, ...]]:
    if not isinstance(value, Mapping) or not value:
        return [path]
    return [leaf for key, inner in value.items() for leaf in _leaves((*path, str(key)), inner)]


def all_keys(section: type[BaseModel] = Recipe, prefix: str = "") -> list[str]:
    """Dotted names of all settings of a section that have a fixed name, each after a prefix."""
    keys: dict[str, None] = {}
    for name, field in section.model_fields.items():
        inner = [key for child in _sections_in(field.annotation) for key in all_keys(child, f"{prefix}{name}.")]
        keys |= dict.fromkeys(inner or [f"{prefix}{name}"])
    return list(keys)


def follow(
    location: Sequence[int | str], root: type[BaseModel] = Recipe
) -> tuple[tuple[str, ...], list[type[BaseModel]]]:
    """The keys of a location, without the forms that pydantic puts between them, and the sections around the last."""
    path: list[str] = []
    annotation: object = root
    parents: list[type[BaseModel]] = []
    for part in map(str, location):
        forms = _forms(annotation)
        if part in forms:
            annotation = forms[part]
            continue
        if CUSTOM in forms and is_function_name(part):
            annotation = load_class(part, ".".join(path), Section)
            continue
        path.append(part)
        parents = _sections_in(annotation)
        annotation = _child(annotation, parents, part)
    return tuple(path), parents


def _forms(annotation: object) -> dict[str, object]:
    """The annotations of the forms that a setting may have, by tag."""
    is_union = get_origin(annotation) in {Union, UnionType}
    forms = [get_args(form) for form in get_args(annotation) if is_union and get_origin(form) is Annotated]
    return {mark.tag: form for form, *marks in forms for mark in marks if isinstance(mark, Tag)}


def _child(annotation: object, sections: Sequence[type[BaseModel]], part: str) -> object:
    """The annotation of a key, from the annotation of the section or mapping that contains it."""
    for section in sections:
        if part in section.model_fields:
            return section.model_fields[part].annotation
        if section is RewardsConfig and (":" in part or named_type(part)):
            return named_type(part) or RewardOptions
    arguments = get_args(annotation)
    return arguments[1] if get_origin(annotation) is Mapping else None


def _sections_in(annotation: object) -> list[type[BaseModel]]:
    """The sections that an annotation such as `X | None` allows."""
    if isinstance(annotation, type) and issubclass(annotation, BaseModel):
        return [annotation]
    if get_origin(annotation) in {Annotated, Union, UnionType}:
        return [section for argument in get_args(annotation) for section in _sections_in(argument)]
    return []
