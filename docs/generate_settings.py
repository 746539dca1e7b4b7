"""Writes the reference of settings: a page for each section of a recipe, and the constants of a cluster."""

from __future__ import annotations

import inspect
import json
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import Literal, get_args, get_origin

from generate_markup import cell, sections_of, table_of
from pydantic import BaseModel
from pydantic.fields import FieldInfo
from pydantic_core import PydanticUndefined

from leaderless.algorithms.algorithm import CUSTOM
from leaderless.base.section import ShorthandSection
from leaderless.config import Recipe
from leaderless.config.judges import RewardOptions
from leaderless.config.models import RoleConfig
from leaderless.planner.simulate.cluster import ClusterConfig


def configuration_pages() -> dict[str, str]:
    """Every setting of a recipe: a page for each section, by name, and one that lists them."""
    pages = {}
    own = {name: field for name, field in Recipe.model_fields.items() if not sections_of(field.annotation)}
    rows: list[tuple[str, ...]] = []
    for name, field in Recipe.model_fields.items():
        for section in sections_of(field.annotation):
            key = f"{name}.<name>" if get_origin(field.annotation) is Mapping else name
            text = "\n\n".join(section_of(section, key, field.description or ""))
            first, _, rest = text.partition("\n")
            page = f"{first.removeprefix('#')}\n{rest}".replace("\n### ", "\n## ")
            page = re.sub(r"\]\((?!https:|#)", "](../", page)  # descriptions name pages as from `reference/`
            pages[f"configuration/{name}"] = page
            inner = ", ".join(f"`{heading}`" for heading in re.findall(r"^## `(.+)`$", page, re.M))
            rows.append((f"[`{name}`](configuration/{name}.md)", cell(field.description or ""), inner))
    parts = [
        "# Recipe settings",
        (
            "All keys of a recipe, with a page for each section. On the command line, each can be set as "
            "`section.key=value`. [Recipes and overrides](../concepts/recipe.md) explains how recipes are read and "
            "checked. The search of this site finds a key by its full name, such as `rollout.temperature`, or by its "
            "last part."
        ),
        "Keys without a default are required. Names of times in seconds end in `_s`.",
        "## Top level",
        _settings_table(own, ""),
        "## Sections",
        table_of(("section", "content", "sections in it"), rows),
    ]
    return {"configuration": "\n\n".join(parts)} | pages


def cluster_page() -> str:
    """Every constant of a cluster file."""
    parts = [
        "# Cluster constants",
        (
            "The constants of machines, libraries and workload that `leaderless simulate` reads from a cluster file. "
            "[By simulation](../scaling/simulation.md) explains how they are used; `recipes/clusters/` has files with "
            "values and their sources."
        ),
        "Names of times end in `_us` (microseconds), of memory in `_gib`, of bandwidth in `_gb_per_s` (10⁹ bytes/s).",
    ]
    for name, field in ClusterConfig.model_fields.items():
        for section in sections_of(field.annotation):
            key = f"{name}.<name>" if get_origin(field.annotation) is Mapping else name
            parts += list(section_of(section, key, field.description or ""))
    return "\n\n".join(parts)


def section_of(section: type[BaseModel], key: str, description: str) -> Iterator[str]:
    """Heading, description and settings of a section, and of the sections in it."""
    heading = key.replace(
        "<name>",
        {"models": "<role>", "roles": "<role>", "layout": "<node>", "channels": "<node>"}.get(
            key.partition(".")[0], "<name>"
        ),
    )
    yield f"## `{heading}`" if "." not in heading or "<" in heading else f"### `{heading}`"
    yield cell(description, keep_lines=True)
    if issubclass(section, ShorthandSection):
        yield f"A single value in place of this section sets `{section.shorthand}`."
    fields = section.model_fields
    plain = {name: field for name, field in fields.items() if not sections_of(field.annotation)}
    if plain:
        yield _settings_table(plain, f"{heading}.")
    if section.__name__ == "RewardsConfig":
        yield "Every reward, built-in or custom, also has these settings:"
        yield _settings_table(RewardOptions.model_fields, "reward.<name>.")
        yield "A custom reward is named `package.module:function`; see [Rewards](../concepts/rewards.md)."
    for name, field in fields.items():
        inner_sections = sections_of(field.annotation)
        if len(inner_sections) > 1 and "type" not in inner_sections[0].model_fields:
            yield from _one_or_several(inner_sections, f"{heading}.{name}", field)
            continue
        if len(inner_sections) > 1:
            yield from _typed_sections(inner_sections, f"{heading}.{name}", field)
            continue
        for inner in inner_sections:
            if issubclass(inner, RewardOptions):
                yield from _reward(inner, f"{heading}.{name}", field.description or "")
            elif section is RoleConfig:
                yield f"### `{heading}.{name}`"
                yield f"{cell(field.description or '')} It has the settings of [`{name}`](configuration/{name}.md)."
            else:
                yield from section_of(inner, f"{heading}.{name}", field.description or "")


def _reward(options: type[RewardOptions], heading: str, description: str) -> Iterator[str]:
    """The settings of a reward that not all rewards have, or that mean something else in it."""
    yield f"### `{heading}`"
    yield cell(description, keep_lines=True)
    common = {name: field.description for name, field in RewardOptions.model_fields.items()}
    own = {name: one for name, one in options.model_fields.items() if one.description != common.get(name)}
    if plain := {name: one for name, one in own.items() if not sections_of(one.annotation)}:
        yield _settings_table(plain, f"{heading}.")
    for name, one in own.items():
        for inner in sections_of(one.annotation):
            several = ".<name>" if get_origin(one.annotation) is Mapping else ""
            yield from section_of(inner, f"{heading}.{name}{several}", one.description or "")


def _one_or_several(sections: Sequence[type[BaseModel]], heading: str, field: FieldInfo) -> Iterator[str]:
    """A section that may also be given several times, by names that the user chooses."""
    one, of_several = sections
    yield from section_of(one, heading, field.description or "")
    more = {name: inner for name, inner in of_several.model_fields.items() if name not in one.model_fields}
    yield f"### `{heading}.<name>`"
    yield f"One of several, by name. It has the settings of [`{heading}`](#{heading.replace('.', '')}), and also:"
    yield _settings_table(more, f"{heading}.<name>.")


def _typed_sections(sections: Sequence[type[BaseModel]], heading: str, field: FieldInfo) -> Iterator[str]:
    """Sections from which `type` selects one."""
    yield f"### `{heading}`"
    yield f"{cell(field.description or '')} `{heading}.type` selects it; the default is `{field.default.type}`."
    rows: list[tuple[str, ...]] = []
    for section in sections:
        kind = section.model_fields["type"].default
        if kind is PydanticUndefined:
            text = (
                "A custom class with settings of its own; see [A custom class](../algorithms/index.md#a-custom-class)."
            )
            rows.append((f"**`{CUSTOM}`**", "", "", text))
            continue
        rows.append((f"**`{kind}`**", "", "", cell(inspect.cleandoc(section.__doc__ or "").partition("\n\n")[0])))
        for name, inner in section.model_fields.items():
            if name != "type":
                rows.append((f"`{heading}.{name}`", _type_name(inner), _default(inner), cell(inner.description or "")))
    yield table_of(("type and its settings", "type", "default", "meaning"), rows)


def _settings_table(fields: Mapping[str, FieldInfo], prefix: str) -> str:
    rows = [
        (f"`{prefix}{name}`", f"{_type_name(field)}", _default(field), cell(field.description or ""))
        for name, field in fields.items()
    ]
    return table_of(("setting", "type", "default", "meaning"), rows)


def _type_name(field: FieldInfo) -> str:
    """The type of a setting in YAML terms, with its bounds."""
    bounds = []
    for bound in field.metadata:
        for name, sign in (("ge", "≥"), ("gt", ">"), ("le", "≤"), ("lt", "<")):
            value = getattr(bound, name, None)
            if value is not None:
                bounds.append(f"{sign} {value}")
    return " ".join([_annotation_name(field.annotation), ", ".join(bounds)]).strip()


def _annotation_name(annotation: object) -> str:
    names = {int: "whole number", float: "number", str: "text", bool: "`true` or `false`", type(None): ""}
    if annotation in names:
        return names[annotation]  # type: ignore[index]
    if get_origin(annotation) is Literal:
        return " or ".join(f"`{value}`" for value in get_args(annotation))
    if get_origin(annotation) is tuple:
        return f"list of {_annotation_name(get_args(annotation)[0])}s"
    inner = [name for argument in get_args(annotation) if (name := _annotation_name(argument))]
    return " or ".join(inner)


def _default(field: FieldInfo) -> str:
    value = field.default
    if field.default_factory is not None:
        return "see meaning"
    if value is PydanticUndefined:
        return "required"
    if value is None:
        return "none"
    if isinstance(value, tuple) and not value:
        return "none"
    if isinstance(value, float) and 0 < abs(value) < 1e-3:
        return f"`{value:.0e}`".replace("e-0", "e-")
    return f"`{json.dumps(value)}`"
