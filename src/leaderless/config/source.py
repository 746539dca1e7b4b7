"""Settings of a recipe, and where each of them was written."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from pathlib import Path

import yaml

from leaderless.base.errors import Problem, RecipeError
from leaderless.config.packaged_files import with_packaged_files

MAX_DEPTH, MAX_VALUES = 100, 10_000
"""Most mappings and lists within each other, and most values for which a short text may stand through aliases."""
Setting = object
"""A value as YAML gives it: text, number, boolean, null, list or mapping."""
_Key = tuple[tuple[str, ...], int, bool]
"""Path and line of a key, and whether it is the first one of that name in its section."""
_Loader = type[yaml.SafeLoader | yaml.CSafeLoader]
_LOADER: _Loader = yaml.CSafeLoader if yaml.__with_libyaml__ else yaml.SafeLoader
"""Reader of YAML: libyaml's takes a tenth of the time."""
_READ_OTHERWISE = re.compile(r"[\t!?\ufeff]|[|>][-+\d]*#")
"""Parts of texts in which libyaml accepts, or understands differently, what is refused without it: tabs between tokens,
bare tags, question marks in flow style, byte order marks, and comments right after `|` or `>`."""


@dataclass(frozen=True)
class RecipeSource:
    """A recipe's text as settings, and the place of each.

    Attributes:
        settings: Settings as written, with overrides applied.
        places: Place of each key by its path: `recipes/x.yaml:14`, or `override a.b=c`.
    """

    settings: Mapping[str, Setting]
    places: Mapping[tuple[str, ...], str]

    def place_of(self, key: str | Sequence[str]) -> str:
        """Where a setting, by its dotted path or its parts, was written, or the first one in it.

        If there is none, the place of the nearest section around it counts; for a setting of a role, the place of
        the general setting if there is one.
        """
        path = tuple(key.split(".")) if isinstance(key, str) else tuple(key)
        inside = next((place for other, place in self.places.items() if path and other[: len(path)] == path), "")
        if not inside and path[:1] == ("roles",) and path[2:] in self.places:
            path = path[2:]
        while path and path not in self.places:
            path = path[:-1]
        return inside or self.places.get(path, "")


def read_yaml(path: Path) -> RecipeSource:
    """Read a YAML mapping, keeping the line of every key; a RecipeError if the file is none, or names a key twice."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RecipeError([Problem("", f"cannot be read: {error}", str(path))]) from error
    try:
        keys, settings = _parse(text)
    except _ShapeError as error:
        raise RecipeError([Problem("", str(error), f"{path}:{error.line}")]) from error
    except (yaml.YAMLError, ValueError) as error:  # ValueError: a date that does not exist
        mark = getattr(error, "problem_mark", None)
        place = f"{path}:{mark.line + 1}" if mark else str(path)
        reason = getattr(error, "problem", None) or getattr(error, "reason", None) or error
        raise RecipeError([Problem("", f"is not valid YAML: {reason}", place)]) from error
    if not isinstance(settings, dict):
        raise RecipeError([Problem("", "must be a mapping of sections, as `name: my-run`", f"{path}:1")])
    if twice := [(key, line) for key, line, is_first in keys if not is_first]:
        raise RecipeError(
            [Problem(".".join(key), "is written twice; keep one", f"{path}:{line}") for key, line in twice]
        )
    settings = with_packaged_files(path, settings)
    return RecipeSource(settings, {(): str(path)} | {key: f"{path}:{line}" for key, line, _ in keys})


def apply_overrides(source: RecipeSource, overrides: Sequence[str]) -> RecipeSource:
    """Set single values on top of a recipe, each written as `a.b=value`, where the value is YAML.

    Raises:
        RecipeError: An override has no `=`, its value is not YAML, or its path runs through a plain value.
    """
    for override in overrides:
        key, equals, text = override.partition("=")
        path = path_of(key.strip())
        place = f"override {override}"
        if not equals or not all(path):
            raise RecipeError([Problem("", "an override must look like section.key=value", place)])
        try:
            _, value = _parse(text)
        except _ShapeError as error:
            raise RecipeError([Problem(key, str(error), place)]) from error
        except (yaml.YAMLError, ValueError) as error:
            raise RecipeError([Problem(key, f"the value is not valid YAML: {text!r}", place)]) from error
        source = with_setting(source, path, value, place)
    return source


def with_setting(source: RecipeSource, path: tuple[str, ...], value: Setting, place: str) -> RecipeSource:
    """Set a single value on top of a recipe; a RecipeError if the path runs through a plain value."""
    settings = _copy(source.settings)
    section: dict[str, Setting] = settings
    for depth, part in enumerate(path[:-1], start=1):
        inner = section.setdefault(part, {})
        if not isinstance(inner, dict):
            inner = section[part] = _long_form(path[:depth], inner, place)
        section = inner
    section[path[-1]] = value
    # Settings of the file below this key are gone, and so are their places.
    places = {inner: line for inner, line in source.places.items() if inner[: len(path)] != path}
    return RecipeSource(settings, places | {path: place})


def merge_settings(defaults: Mapping[str, Setting], settings: Mapping[str, Setting]) -> dict[str, Setting]:
    """Settings on top of defaults. A section of another `type` than the default's inherits nothing from it."""
    merged = {**defaults, **settings}
    for key, default in defaults.items():
        value = settings.get(key)
        if isinstance(default, Mapping) and isinstance(value, Mapping):
            is_other = "type" in value and value["type"] != default.get("type")
            merged[key] = value if is_other else merge_settings(default, value)
    return merged


def path_of(key: str) -> tuple[str, ...]:
    """The parts of a dotted key; a reward `package.module:function` is one part."""
    section, _, rest = key.partition(".")
    function = re.match(r"[\w.]+:\w+", rest)
    if section == "reward" and function:
        option = rest[function.end() :]
        return (section, function[0], *(option[1:].split(".") if option else ()))
    return tuple(key.split("."))


class _ShapeError(ValueError):
    """A text whose values cannot be read in bounded time and memory."""

    def __init__(self, reason: str, line: int) -> None:
        super().__init__(reason)
        self.line = line


_TOO_DEEP = f"has more than {MAX_DEPTH} mappings and lists within each other: write fewer levels"
_UNFINISHED = (-1, -1)


def _parse(text: str) -> tuple[list[_Key], Setting]:
    """The keys of a YAML text, and its plain values; a YAMLError or ValueError if it is none."""
    try:
        loader, tree = _composed(text, yaml.SafeLoader if _READ_OTHERWISE.search(text) else _LOADER)
    except yaml.YAMLError:  # libyaml says less of the reason
        loader, tree = _composed(text, yaml.SafeLoader)
    if tree is None:
        return [], None
    _check_size(tree, max(MAX_VALUES, len(text)), {})
    keys = list(_keys_in(tree))  # now, because the next line copies what `<<` names into the tree
    return keys, loader.construct_document(tree)


def _composed(text: str, kind: _Loader) -> tuple[yaml.SafeLoader | yaml.CSafeLoader, yaml.Node | None]:
    """The nodes of a text and their reader, which walks down all levels; too many of these are refused before."""
    depth = 0
    for event in yaml.parse(text, Loader=kind):
        depth += isinstance(event, yaml.CollectionStartEvent) - isinstance(event, yaml.CollectionEndEvent)
        if depth > MAX_DEPTH:
            raise _ShapeError(_TOO_DEEP, event.start_mark.line + 1 if event.start_mark else 1)
    loader = kind(text)
    return loader, loader.get_single_node()


def _check_size(node: yaml.Node, most: int, known: dict[yaml.Node, tuple[int, int]]) -> tuple[int, int]:
    """Levels and values of a node with its aliases written out; refuse a node of too many, or within itself.

    Each node is looked at once, in the order of the text; an alias comes after what it stands for.
    """
    if node in known:
        if known[node] == _UNFINISHED:
            raise _ShapeError("holds itself through an alias: write out what is meant", node.start_mark.line + 1)
        return known[node]
    known[node] = _UNFINISHED
    parts = () if isinstance(node, yaml.ScalarNode) else node.value
    if isinstance(node, yaml.MappingNode):
        parts = chain.from_iterable(node.value)
    sizes = [(0, 0), *(_check_size(part, most, known) for part in parts)]
    depth, count = 1 + max(depth for depth, _ in sizes), 1 + sum(count for _, count in sizes)
    if depth > MAX_DEPTH + 1 or count > most:
        reason = _TOO_DEEP if depth > MAX_DEPTH + 1 else f"has more than {most:,} values through its aliases: use fewer"
        raise _ShapeError(reason, node.start_mark.line + 1)
    known[node] = depth, count
    return known[node]


def _keys_in(node: yaml.Node, prefix: tuple[str, ...] = ()) -> Iterator[_Key]:
    """Every key below a node, except those that `<<` takes over from another section."""
    seen: set[str] = set()
    for key_node, value_node in node.value if isinstance(node, yaml.MappingNode) else ():
        if key_node.tag == "tag:yaml.org,2002:merge":
            continue
        key = _key_of(key_node)
        yield (*prefix, key), key_node.start_mark.line + 1, key not in seen
        seen.add(key)
        yield from _keys_in(value_node, (*prefix, key))


def _key_of(node: yaml.Node) -> str:
    """A key as settings have it: `on` is true in YAML, and `~` is nothing."""
    is_text = node.tag == "tag:yaml.org,2002:str" or not isinstance(node, yaml.ScalarNode)
    return str(node.value if is_text else yaml.safe_load(node.value))


def _long_form(path: tuple[str, ...], value: Setting, place: str) -> dict[str, Setting]:
    """The mapping for which a section's shorthand stands, so that an override can reach inside it."""
    short = {"models": "path", "reward": "weight"}
    if len(path) == 2 and path[0] in short:
        return {short[path[0]]: value}
    raise RecipeError([Problem(".".join(path), f"is {value!r}, not a section", place)])


def _copy(value: Mapping[str, Setting]) -> dict[str, Setting]:
    """A copy whose sections can be changed without changing the original's."""
    return {key: _copy(inner) if isinstance(inner, dict) else inner for key, inner in value.items()}
