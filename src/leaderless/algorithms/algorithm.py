"""The common base of advantages and losses: a section of the recipe that `type` selects, with its mathematics.

Built-in ones are found in the files of a folder, custom ones by the name that a recipe gives as `type`.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Mapping
from functools import partial
from importlib import import_module
from pkgutil import iter_modules
from typing import TYPE_CHECKING, Annotated, ClassVar, Protocol, TypeVar, Union

from pydantic import (
    BeforeValidator,
    Discriminator,
    GetJsonSchemaHandler,
    SerializeAsAny,
    Tag,
    ValidationError,
    WithJsonSchema,
)
from pydantic_core import CoreSchema, InitErrorDetails

from leaderless.base.errors import RecipeError
from leaderless.base.named_functions import is_function_name, load_class
from leaderless.base.section import Section

if TYPE_CHECKING:
    from leaderless.algorithms.settings import AlgorithmConfig


class CheckedBatch(Protocol):
    """The section `batch` of a recipe, as far as algorithms check it."""

    @property
    def responses_per_prompt(self) -> int:
        """Number of responses in a group."""


class CheckedBody(Protocol):
    """The section `body` of a recipe, as far as algorithms check it."""

    @property
    def log_prob(self) -> str:
        """Whether each action has a log-probability, or a whole decision: `action` or `chunk`."""


class CheckedRecipe(Protocol):
    """A recipe, as far as algorithms check it. The recipe is built of algorithms, so that they cannot import it."""

    @property
    def batch(self) -> CheckedBatch:
        """Sizes of a step."""

    @property
    def body(self) -> CheckedBody | None:
        """The body that the policy moves, if there is one."""

    @property
    def models(self) -> Container[str]:
        """Roles that have a model."""


class Algorithm(Section):
    """A part of an algorithm: its settings, what it needs, what it cannot be combined with, and its mathematics.

    A built-in one is a file of its folder, which is found without being listed; a custom one is a class that a recipe
    names as `package.module:Class`. The fields are the settings. The docstring has a summary, a paragraph `Formula:`
    and a paragraph `Source:` with every deviation.

    Attributes:
        reads: Columns that it reads besides those that every algorithm gets.
        metrics: Metrics that it reports, with their meanings.
    """

    type: str
    reads: ClassVar[tuple[str, ...]] = ()
    metrics: ClassVar[Mapping[str, str]] = {}

    def refusals(self, algorithm: AlgorithmConfig) -> Iterator[str]:  # noqa: ARG002
        """Reasons why it cannot be combined with other settings of the algorithm; none by default.

        A reason begins with the setting, as in "algorithm.aggregation=token_mean does not go with ...: use ...".
        """
        yield from ()

    def check(self, recipe: CheckedRecipe) -> None:
        """Raise `RecipeError` for settings of the recipe with which it cannot work; does nothing by default."""


def check_declared(algorithm: Algorithm, attribute: str, names: Iterable[str], declared: Iterable[str]) -> None:
    """Raise ValueError if a class returns other names than those that its attribute declares."""
    if set(names) != set(declared):
        raise ValueError(
            f"{algorithm.type} returned the {attribute} {sorted(names)}, but declares {sorted(declared)}: name in "
            f"`{attribute}` exactly what it returns"
        )


CUSTOM = "package.module:Class"
"""Tag of all custom classes among the types of a setting."""
_CUSTOM_SCHEMA = {
    "title": "Custom",
    "type": "object",
    "properties": {"type": {"type": "string", "pattern": r"^[\w.]+:\w+$"}},
    "required": ["type"],
    "additionalProperties": True,
}

Kind = TypeVar("Kind", bound=Algorithm)


def built_in(package: str, base: type[Kind]) -> Mapping[str, type[Kind]]:
    """The algorithms in the files of a package, by type, in the order of the files' names.

    Args:
        package: Name of the package.
        base: Class that they derive from.
    """
    found: dict[str, type[Kind]] = {}
    for file in sorted(module.name for module in iter_modules(import_module(package).__path__)):
        name = f"{package}.{file}"
        for value in vars(import_module(name)).values():
            if isinstance(value, type) and issubclass(value, base) and value.__module__ == name:
                found[value.model_fields["type"].default] = value
    return found


def union_of(classes: Mapping[str, type[Kind]], base: type[Kind], default: str) -> object:
    """The annotation of a setting whose `type` selects a built-in or custom algorithm.

    Args:
        classes: Built-in ones, by type.
        base: Class that all of them derive from.
        default: Type of settings that give none.
    """
    members: list[object] = [
        Annotated[kind, Tag(name)] if name == default else Annotated[kind, Tag(name), _TypeIsNeeded()]
        for name, kind in classes.items()
    ]
    members.append(Annotated[SerializeAsAny[base], Tag(CUSTOM), WithJsonSchema(_CUSTOM_SCHEMA)])  # type: ignore[misc, valid-type]

    def tag_of(value: object) -> object:
        """The tag by which pydantic chooses among the types; None for what is no section."""
        kind = value.get("type", default) if isinstance(value, Mapping) else getattr(value, "type", None)
        return CUSTOM if isinstance(kind, str) and is_function_name(kind) else kind

    custom = BeforeValidator(partial(_with_custom, base))
    return Annotated[Union[tuple(members)], Discriminator(tag_of), custom]  # noqa: UP007


class _TypeIsNeeded:
    """Marks types that are not the default: without `type`, editors would find that settings fit several of them."""

    def __get_pydantic_json_schema__(self, core: CoreSchema, handler: GetJsonSchemaHandler) -> dict[str, object]:
        schema = handler(core)
        section = handler.resolve_ref_schema(schema)
        section["required"] = ["type", *section.get("required", ())]
        return schema


def _with_custom(base: type[Kind], value: object) -> object:
    """Settings as given, or the custom algorithm made of them; errors have the places of built-in ones."""
    kind = value.get("type") if isinstance(value, Mapping) else None
    if kind == "function":
        raise _error_at("type", kind, f"a custom one is a class: give its name, '{CUSTOM}', as the type")
    if not isinstance(kind, str) or not is_function_name(kind):
        return value
    try:
        found = load_class(kind, "type", base)
    except RecipeError as error:
        raise _error_at("type", kind, error.problems[0].message) from error
    try:
        return found.model_validate(value)
    except ValidationError as error:
        lines = [
            InitErrorDetails(type=line["type"], loc=(kind, *line["loc"]), input=line["input"], ctx=line.get("ctx", {}))
            for line in error.errors()
        ]
        raise ValidationError.from_exception_data(kind, lines) from error


def _error_at(key: str, value: str, message: str) -> ValidationError:
    line = InitErrorDetails(type="value_error", loc=(key,), input=value, ctx={"error": ValueError(message)})
    return ValidationError.from_exception_data(value, [line])
