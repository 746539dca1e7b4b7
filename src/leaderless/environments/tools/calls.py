"""Calls of tools as a policy wrote them, and what is answered."""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Literal

from leaderless.base.values import Json
from leaderless.config.failures import FailureKind

Refusal = Literal["malformed", "unknown_tool", "wrong_arguments", "tool_error", "failed"]
"""Why a call has no result: it cannot be read, names no tool, has arguments that the tool does not take, the tool
refused it with a `ToolError`, or has failed."""
MISTAKES: frozenset[Refusal] = frozenset({"malformed", "unknown_tool", "wrong_arguments"})
"""Refusals that are the policy's own failures."""
DECODER = json.JSONDecoder(strict=False)
"""Reads JSON in which texts may have line breaks, a common slip."""
_SHOWN = 80


class WrongArgumentsError(ValueError):
    """Arguments that a tool does not take; the text is for the policy."""


@dataclass(frozen=True)
class Call:
    """A call that a policy wrote.

    Attributes:
        name: Name of the tool; empty if it cannot be read.
        arguments: Arguments by name.
        problem: Reason why it cannot be read; empty if it can.
        is_text: Whether all arguments are texts, from which the types that the tool wants are still to be read.
    """

    name: str
    arguments: Mapping[str, Json] = field(default_factory=dict)
    problem: str = ""
    is_text: bool = False


def read_call(value: object) -> Call:
    """A call that is written as a JSON object."""
    if not isinstance(value, dict):
        return unread(f"a call must be a JSON object with 'name' and 'arguments', not {shown(json.dumps(value))}")
    name = value.get("name")
    if not isinstance(name, str) or not name:
        return unread(f"a call lacks 'name', the name of a tool: {shown(json.dumps(value, ensure_ascii=False))}")
    arguments = value.get("arguments", value.get("parameters", {}))
    if isinstance(arguments, str):  # OpenAI's API has them so
        try:
            arguments = DECODER.decode(arguments)
        except (ValueError, RecursionError) as error:
            return Call(name, problem=f"arguments must be a JSON object ({reason_of(error)}): {shown(arguments)}")
    if not isinstance(arguments, dict):
        return Call(name, problem=f"arguments must be a JSON object, not {shown(json.dumps(arguments))}")
    return Call(name, arguments)


def unread(problem: str) -> Call:
    """A call that cannot be read."""
    return Call("", problem=problem)


def reason_of(error: Exception) -> str:
    """Why a text is no JSON."""
    return "nested too deeply" if isinstance(error, RecursionError) else str(error)


def shown(text: str) -> str:
    """A text as errors quote it."""
    text = text.strip()
    return text if len(text) <= _SHOWN else f"{text[:_SHOWN]}…"


def typed_arguments(call: Call, parameters: Json) -> Mapping[str, Json]:
    """The arguments of a call in the types that the JSON schema of a tool's parameters wants, if all are texts."""
    if not call.is_text:
        return call.arguments
    properties = parameters.get("properties") if isinstance(parameters, Mapping) else None
    schemas = properties if isinstance(properties, Mapping) else {}
    return {name: _value_of(str(text), schemas.get(name)) for name, text in call.arguments.items()}


def offered_parameters(name: str, tools: Sequence[Json]) -> Json:
    """The JSON schema of the parameters of one of some tools in the format of OpenAI's API; None if there is none."""
    functions = [tool.get("function") for tool in tools if isinstance(tool, Mapping)]
    found = (one.get("parameters") for one in functions if isinstance(one, Mapping) and one.get("name") == name)
    return next(found, None)


def _value_of(text: str, schema: Json) -> Json:
    """A text as it is where a text is wanted, else what it says as JSON."""
    others = schema.get("anyOf") if isinstance(schema, Mapping) else None
    choices = [schema, *(others if isinstance(others, list | tuple) else ())]
    if any(isinstance(choice, Mapping) and (choice.get("type") == "string") for choice in choices):
        return text
    try:
        return json.loads(text)  # type: ignore[no-any-return]
    except (ValueError, RecursionError):
        return text  # the tool says what is wrong


@dataclass(frozen=True)
class ToolCalls:
    """A message of the policy, read.

    Attributes:
        content: Text of the message without its calls, and without the tokens that end it.
        calls: Calls in the order in which they were written.
    """

    content: str
    calls: Sequence[Call] = ()

    def message(self) -> Mapping[str, Json]:
        """The message as chat templates know it. It is a record: what was sampled is never rendered again."""
        message: dict[str, Json] = {"role": "assistant", "content": self.content}
        if self.calls:
            message["tool_calls"] = [
                {
                    "id": _identifier(place),
                    "type": "function",
                    "function": {"name": call.name, "arguments": call.arguments},
                }
                for place, call in enumerate(self.calls)
            ]
        return message


@dataclass(frozen=True)
class CallResult:
    """Answer to a call.

    Attributes:
        name: Name of the tool, as the policy wrote it.
        arguments: Arguments, as the policy wrote them.
        text: Text for the policy.
        seconds: Seconds that the tool took.
        refusal: Reason why the call has no result; None if it has one.
        kind: Kind of the failure of a tool that has failed; None for any other.
        reward: Reward of the call.
        done: Whether the episode is over.
    """

    name: str
    arguments: Mapping[str, Json]
    text: str
    seconds: float = 0.0
    refusal: Refusal | None = None
    kind: FailureKind | None = None
    reward: float = 0.0
    done: bool = False


def result_messages(results: Sequence[CallResult]) -> list[Mapping[str, Json]]:
    """The messages that tell the policy what was answered to the calls of one message."""
    return [
        {"role": "tool", "name": result.name, "tool_call_id": _identifier(place), "content": result.text}
        for place, result in enumerate(results)
    ]


def _identifier(place: int) -> str:
    """Nine letters and digits, on which some templates insist."""
    return f"call{place:05d}"


@dataclass(frozen=True)
class ToolTurn:
    """Answer of a tool whose call is a step of its environment.

    Attributes:
        text: Text for the policy.
        reward: Reward of the call.
        done: Whether the episode is over.
        is_refused: Whether the tool has refused the call; the text says why.
    """

    text: str
    reward: float = 0.0
    done: bool = False
    is_refused: bool = False


@dataclass(frozen=True)
class Tool(ABC):
    """A tool that a policy may call.

    Attributes:
        name: Name by which it is called.
        description: Description of its effect, for the policy.
        parameters: JSON schema of its arguments, which are an object.
    """

    name: str
    description: str
    parameters: Mapping[str, Json]
    limits_itself: ClassVar[bool] = False
    """Whether it keeps the limits of a call's time and of a result's length by itself."""
    is_step: ClassVar[bool] = False
    """Whether a call is a step of the environment, answered by a `ToolTurn`; it counts if nobody reads its result."""

    @property
    def owner(self) -> object | None:
        """The object whose state it may change; calls of tools of one owner are answered one after the other."""
        return None

    @abstractmethod
    def prepare(self, arguments: Mapping[str, Json]) -> Mapping[str, object]:
        """Arguments in the types that the tool takes.

        Raises:
            WrongArgumentsError: The tool does not take them.
        """

    @abstractmethod
    async def call(self, arguments: Mapping[str, object]) -> object:
        """The result for prepared arguments: a text or what JSON can hold."""

    @property
    def schema(self) -> Json:
        """The tool as chat templates know it, in OpenAI's format."""
        function: Json = {"name": self.name, "description": self.description, "parameters": self.parameters}
        return {"type": "function", "function": function}

    @property
    def usage(self) -> str:
        """How it is called, for people and policies: `add(a: integer, b: integer = 1)`."""
        return f"{self.name}({usage_of(self.parameters)})"


def usage_of(schema: Mapping[str, Json]) -> str:
    """The fields of a JSON schema, for people and policies: `a: integer, b: integer = 1`."""
    properties, required = schema.get("properties"), schema.get("required", ())
    assert isinstance(properties, Mapping | None)
    assert isinstance(required, Sequence)
    shown = []
    for name, value in (properties or {}).items():
        known = value if isinstance(value, Mapping) else {}
        default = f" = {json.dumps(known['default'])}" if "default" in known else ""
        shown.append(f"{name}{'' if name in required or default else '?'}: {_type_name(value)}{default}")
    return ", ".join(shown)


def _type_name(schema: Json) -> str:
    """The type that a JSON schema asks for, in a word or two."""
    if not isinstance(schema, Mapping):
        return "any"
    if isinstance(options := schema.get("enum"), Sequence):
        return " | ".join(repr(value) for value in options)
    if isinstance(choices := schema.get("anyOf"), Sequence):
        return " | ".join(_type_name(choice) for choice in choices)
    return str(schema.get("type", "object" if "$ref" in schema else "any"))
