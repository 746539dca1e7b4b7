"""Tools that are Python functions or methods, described by their type hints and docstrings."""

from __future__ import annotations

import inspect
import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from functools import partial
from typing import Annotated, TypeVar, get_type_hints

from pydantic import BaseModel, ConfigDict, Field, TypeAdapter, ValidationError, create_model
from pydantic.errors import PydanticUserError

from leaderless.base.values import Json
from leaderless.config import nearest
from leaderless.environments.tools.calls import Tool, WrongArgumentsError
from leaderless.environments.user_functions import call_user

Function = TypeVar("Function", bound=Callable[..., object])

_MARK = "__leaderless_tool__"


class ToolError(Exception):
    """A call that a tool refuses; the policy gets the text. Any other exception makes the episode fail."""


def tool(function: Function) -> Function:
    """Offer a method of an environment, or a function, to the policy.

    Its parameters need type hints. The policy sees the docstring, with the descriptions of its arguments.
    """
    setattr(function, _MARK, True)
    return function


@dataclass(frozen=True, eq=False)
class ToolOwner:
    """The class whose methods are tools; each episode has an object of it.

    Attributes:
        kind: The class.
        options: Arguments of its constructor.
        is_environment: Whether the object is the episode's environment.
    """

    kind: type
    options: Mapping[str, Json]
    is_environment: bool = False


@dataclass(frozen=True)
class FunctionTool(Tool):
    """A Python function as a tool.

    Attributes:
        function: The function; it takes the arguments by name.
        model: The arguments as a pydantic model.
        home: Class whose method it is; None for a plain function.
        instance: Object whose method it is; None for a plain function, and as long as there is none.
    """

    function: Callable[..., object]
    model: type[BaseModel]
    home: ToolOwner | None = None
    instance: object | None = None

    @classmethod
    def of(cls, function: Callable[..., object], *, skips_first: bool = False) -> FunctionTool:
        """Describe a function with type hints, or a method, whose first parameter is skipped.

        Raises:
            ValueError: A parameter has no type hint, or one that JSON cannot hold.
        """
        name = getattr(function, "__name__", type(function).__name__)
        where = f"tool '{name}' ({function.__module__}:{getattr(function, '__qualname__', name)})"
        from docstring_parser import parse

        doc = parse(inspect.getdoc(function) or "")
        description = "\n\n".join(part for part in (doc.short_description, doc.long_description) if part)
        about = {found.arg_name: found.description or "" for found in doc.params}
        fields = _fields(function, where, about, skips_first=skips_first)
        model: type[BaseModel] = create_model(  # the names of fields are made up, as some mean something to pydantic
            name,
            __config__=ConfigDict(extra="forbid", arbitrary_types_allowed=False),
            **{f"field_{place}": found for place, found in enumerate(fields)},  # type: ignore[call-overload]
        )
        parameters = model.model_json_schema()
        return cls(name, description, _without_titles(parameters), function, model)

    @property
    def owner(self) -> object | None:
        """The object whose method it is, unless the method is `async`."""
        return None if inspect.iscoroutinefunction(self.function) else self.instance

    def of_instance(self, instance: object) -> FunctionTool:
        """The same method of an object."""
        return replace(self, function=getattr(instance, self.function.__name__), instance=instance)

    def prepare(self, arguments: Mapping[str, Json]) -> Mapping[str, object]:
        """Check and convert arguments by the type hints."""
        try:
            values = self.model.model_validate(arguments)
        except ValidationError as error:
            raise WrongArgumentsError(_problems(error, self.model)) from error
        return {
            field.alias: getattr(values, key)
            for key, field in self.model.model_fields.items()
            if key in values.model_fields_set and field.alias
        }

    async def call(self, arguments: Mapping[str, object]) -> object:
        """Call the function, in a thread unless it is `async`."""
        function = partial(self.function, **arguments)
        return await call_user(function, f"tool {self.name}")


def tools_of(home: ToolOwner) -> list[FunctionTool]:
    """The methods of a class that are marked with `@tool`, base classes first, in the order of the source.

    Raises:
        ValueError: One of them cannot be a tool.
    """
    tools = []
    for name in dict.fromkeys(name for base in reversed(home.kind.__mro__) for name in vars(base)):
        found = inspect.getattr_static(home.kind, name, None)
        function = found.__func__ if isinstance(found, staticmethod | classmethod) else found
        if inspect.isfunction(function) and getattr(function, _MARK, False):
            described = FunctionTool.of(getattr(home.kind, name), skips_first=found is function)
            tools.append(replace(described, home=home))
    return tools


def _fields(
    function: Callable[..., object], where: str, about: Mapping[str, str], *, skips_first: bool
) -> Iterator[tuple[object, object]]:
    """Types and facts of the parameters, as pydantic's fields."""
    try:
        hints = get_type_hints(function, include_extras=True)
    except NameError as error:
        raise ValueError(f"{where}: {error}: types of parameters must be imported at run time") from error
    parameters = list(inspect.signature(function).parameters.values())[int(skips_first) :]
    for parameter in parameters:
        place = f"{where}: parameter '{parameter.name}'"
        if parameter.kind in {parameter.VAR_POSITIONAL, parameter.VAR_KEYWORD, parameter.POSITIONAL_ONLY}:
            raise ValueError(f"{place} ({parameter}) cannot be given by name: write each parameter as `name: type`")
        if parameter.name not in hints:
            raise ValueError(f"{place} has no type hint, which says what the policy may give: write `name: type`")
        hint = hints[parameter.name]
        try:
            TypeAdapter(hint).json_schema()
        except PydanticUserError as error:
            raise ValueError(
                f"{place} has the type {inspect.formatannotation(hint)}, which JSON cannot hold: use str, int, float, "
                f"bool, list, dict, Literal, a dataclass or a pydantic model"
            ) from error
        default = ... if parameter.default is parameter.empty else parameter.default
        described = about.get(parameter.name) or None
        yield Annotated[hint, Field(alias=parameter.name, description=described)], default


def _without_titles(schema: Mapping[str, Json]) -> dict[str, Json]:
    """A JSON schema without the titles that pydantic makes of names: they tell a policy nothing."""
    kept: dict[str, Json] = {}
    for key, value in schema.items():
        if key == "title" and isinstance(value, str):
            continue
        if key in {"properties", "$defs"} and isinstance(value, Mapping):
            kept[key] = {name: _without_titles(inner) for name, inner in value.items() if isinstance(inner, Mapping)}
        elif key in {"items", "additionalProperties"} and isinstance(value, Mapping):
            kept[key] = _without_titles(value)
        elif key in {"anyOf", "allOf", "oneOf", "prefixItems"} and isinstance(value, list):
            kept[key] = [_without_titles(inner) if isinstance(inner, Mapping) else inner for inner in value]
        else:
            kept[key] = value
    return kept


def _problems(error: ValidationError, model: type[BaseModel]) -> str:
    """Description of what is wrong with arguments, for the policy."""
    known = [str(field.alias) for field in model.model_fields.values()]
    found = []
    for problem in error.errors(include_url=False):
        name = ".".join(map(str, problem["loc"]))
        if problem["type"] == "missing":
            found.append(f"argument '{name}' is missing")
        elif problem["type"] == "extra_forbidden" and len(problem["loc"]) == 1:
            found.append(f"there is no argument '{name}'{nearest(name, known)}")
        else:
            value = json.dumps(problem["input"], ensure_ascii=False, default=str)
            shown = value if len(value) <= 60 else f"{value[:60]}…"
            found.append(f"argument '{name}' = {shown}: {problem['msg']}")
    return "; ".join(found)
