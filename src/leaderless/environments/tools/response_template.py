"""Calls read by a tokenizer's own response template, which transformers parses: no format has to be known here."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol, cast

from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.tools.calls import Call, ToolCalls, read_call

CALLS = "tool_calls"
"""Field of parsed messages that has the calls."""
_TEXT_ENDED = ("region_close", "content")
_END_OF_THINK = "</think>"
_SHOWN = 300


class ResponseParser(Protocol):
    """The part of the parser of transformers that is used here."""

    def feed(self, text: str) -> Sequence[Mapping[str, Json]]:
        """Read text, and return which fields of the message have begun or ended."""

    def finalize(self) -> tuple[Mapping[str, Json], Sequence[Mapping[str, Json]]]:
        """End the message; returns it, and which fields have ended with it."""


class ParsingTokenizer(Tokenizer, Protocol):
    """A tokenizer that comes with a response template."""

    response_template: Mapping[str, Json] | None

    def get_response_parser(self, *, prefix: str, tools: Sequence[Json] | None = None) -> ResponseParser:
        """A parser of a message behind a prompt, by the response template."""


class TemplateReader:
    """Finds the calls in a message by the response template of a tokenizer.

    A message that the template cannot read is a call with a problem. Reasoning before the message is kept as text.

    Attributes:
        marks: Texts with which calls begin; None if they are not fixed.
    """

    def __init__(self, tokenizer: ParsingTokenizer, schemas: Sequence[Json], prompt: str) -> None:
        """Read calls of some tools in answers to prompts that end as one does."""
        self._tokenizer, self._schemas, self._prompt = tokenizer, schemas, prompt
        fields = (tokenizer.response_template or {}).get("fields")
        field = fields.get(CALLS) if isinstance(fields, Mapping) else None
        begin = field.get("open") if isinstance(field, Mapping) else None
        marks = [begin] if isinstance(begin, str) else begin
        self.marks = tuple(map(str, marks)) if isinstance(marks, list | tuple) else None

    def __call__(self, text: str) -> ToolCalls:
        """Read a message with its special tokens."""
        try:
            parser = self._tokenizer.get_response_parser(prefix=self._prompt, tools=self._schemas)
            events = [*parser.feed(text)]
            message, last = parser.finalize()
        except (ValueError, KeyError, TypeError, RecursionError) as error:
            reason = " ".join(str(error).split())
            return ToolCalls(text, (Call("", problem=f"the response template cannot read it: {reason[:_SHOWN]}"),))
        thought, mark, _ = text.partition(_END_OF_THINK)
        # The message has only the last text of several, which may be the blank between two calls.
        ended = [event["value"] for event in (*events, *last) if (event["type"], event["field"]) == _TEXT_ENDED]
        content = "\n".join(value.strip() for value in ended if isinstance(value, str) and value.strip())
        return ToolCalls(f"{thought}{mark}{content}" if mark else content, tuple(map(_call, _flat(message.get(CALLS)))))


def reader_of_template(tokenizer: Tokenizer, schemas: Sequence[Json], prompt: str) -> TemplateReader | None:
    """The reader of a tokenizer that comes with a response template with calls; None if it does not."""
    template = getattr(tokenizer, "response_template", None)
    fields = template.get("fields") if isinstance(template, Mapping) else None
    if not isinstance(fields, Mapping) or CALLS not in fields:
        return None
    return TemplateReader(cast("ParsingTokenizer", tokenizer), schemas, prompt)


def _flat(value: Json) -> list[Json]:
    if isinstance(value, list | tuple):
        return [inner for one in value for inner in _flat(one)]
    return [] if value is None else [value]


def _call(value: Json) -> Call:
    function = value.get("function", value) if isinstance(value, Mapping) else value
    if isinstance(function, Mapping):  # some templates have null in the place of no arguments
        return read_call({name: one for name, one in function.items() if one is not None})
    return read_call(function)
