"""How policies write calls of tools: a reader for each format of chat templates.

Readers get a message as it was sampled, special tokens included. A call that cannot be read is a call with a problem,
which is answered: it is the policy's to learn from.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, cast

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import FORMAT_KEY, TOOL_FORMATS, custom_reader
from leaderless.environments.protocol import Message
from leaderless.environments.tools.calls import (
    DECODER,
    Call,
    CallResult,
    ToolCalls,
    read_call,
    reason_of,
    result_messages,
    shown,
    unread,
)
from leaderless.environments.tools.response_template import TemplateReader, reader_of_template

if TYPE_CHECKING:
    from leaderless.data.prompts.encode import Tokenizer

Reader = Callable[[str], ToolCalls]
"""Finds the calls in a message."""

_END = re.compile(r"(?:<\|(?!python_tag)\w+\|>|</s>)$")
"""Tokens that end a message, such as `<|im_end|>`."""
_END_OF_THINK = "</think>"


def read_hermes(text: str) -> ToolCalls:
    """The format of Hermes, Qwen2.5 and Qwen3: `<tool_call>{"name": ..., "arguments": {...}}</tool_call>`."""
    thought, text = _split(text)
    content, calls = [], []
    for place, part in enumerate(text.split("<tool_call>")):
        body, end, after = part.partition("</tool_call>")
        if place == 0:
            content.append(part)
            continue
        content.append(after)
        calls.append(_read_json(body) if end else unread(f"<tool_call> is not closed by </tool_call>: {shown(part)}"))
    return _calls(thought, content, calls)


def read_llama(text: str) -> ToolCalls:
    """The format of Llama 3: `<|python_tag|>{"name": ..., "parameters": {...}}`, or only the object; `;` separates."""
    thought, text = _split(text)
    content, tag, body = text.partition("<|python_tag|>")
    if not tag:
        if not re.match(r'\s*\{\s*"name"\s*:', text):
            return _calls(thought, [text], [])
        content, body = "", text
    calls = []
    rest = body.strip()
    while rest:
        try:
            value, end = DECODER.raw_decode(rest)
        except (ValueError, RecursionError) as error:
            calls.append(unread(f"a call must be a JSON object ({reason_of(error)}): {shown(rest)}"))
            break
        calls.append(read_call(value))
        rest = rest[end:].lstrip()
        if rest and not rest.startswith(";"):
            calls.append(unread(f"`;` must separate calls, and nothing may follow the last: {shown(rest)}"))
            break
        rest = rest[1:].lstrip()
    return _calls(thought, [content], calls)


def read_qwen3_coder(text: str) -> ToolCalls:
    """The format of Qwen3-Coder: `<tool_call><function=NAME><parameter=NAME>VALUE</parameter></function></tool_call>`.

    Values are texts; what a tool does not want as a text is read as JSON later.
    """
    thought, text = _split(text)
    content, calls, place = [], [], 0
    for found in re.finditer(r"(?:<tool_call>\s*)?<function=|<tool_call>", text):
        if found.start() < place:
            continue
        content.append(text[place : found.start()])
        is_function = found.group().endswith("<function=")
        end = "</function>" if is_function else "</tool_call>"
        stop = text.find(end, found.end())
        place = len(text) if stop < 0 else stop + len(end)
        if not is_function:
            calls.append(unread(f"<tool_call> must be followed by <function=NAME>: {shown(text[found.start() :])}"))
        elif stop < 0:
            calls.append(unread(f"<function=NAME> is not closed by </function>: {shown(text[found.start() :])}"))
        else:
            calls.append(_read_xml(text[found.end() : stop]))
        closing = re.compile(r"\s*</tool_call>").match(text, place)
        place = closing.end() if closing else place
    content.append(text[place:])
    return _calls(thought, content, calls)


def read_mistral(text: str) -> ToolCalls:
    """The formats of Mistral: `[TOOL_CALLS][{"name": ..., "arguments": {...}}]` and `[TOOL_CALLS]NAME[ARGS]{...}`."""
    thought, text = _split(text)
    content, *parts = text.split("[TOOL_CALLS]")
    calls: list[Call] = []
    for part in parts:
        body = part.strip()
        named = re.match(r"([\w.-]+)\s*(?:\[CALL_ID\]\s*\w+\s*)?(?:\[ARGS\])?\s*(?=\{)", body)
        try:
            value = DECODER.decode(body[named.end() :] if named else body)
        except (ValueError, RecursionError) as error:
            calls.append(unread(f"[TOOL_CALLS] must be followed by a JSON list ({reason_of(error)}): {shown(part)}"))
            continue
        if named:
            value = {"name": named.group(1), "arguments": value}
        calls += [read_call(one) for one in (value if isinstance(value, list) else [value])]
    return _calls(thought, [content], calls)


FORMATS: Mapping[str, Reader] = dict(
    zip(TOOL_FORMATS, (read_hermes, read_llama, read_qwen3_coder, read_mistral), strict=True)
)
"""Readers by the name of their format."""

_MARKS: Mapping[Reader, Sequence[str]] = {
    read_hermes: ("<tool_call>",),
    read_llama: ("<|python_tag|>", "{"),
    read_qwen3_coder: ("<tool_call>", "<function="),
    read_mistral: ("[TOOL_CALLS]",),
}


def marks_of(read: Reader) -> Sequence[str] | None:
    """Texts with which calls may begin in the format of a reader; None if they are not known."""
    return read.marks if isinstance(read, TemplateReader) else _MARKS.get(read)


def _split(text: str) -> tuple[str, str]:
    """Reasoning, in which nothing is a call, and the rest without the tokens that end the message."""
    while found := _END.search(text.rstrip()):
        text = text[: found.start()]
    thought, mark, rest = text.partition(_END_OF_THINK)
    return (thought + mark, rest) if mark else ("", text)


def _calls(thought: str, content: list[str], calls: list[Call]) -> ToolCalls:
    parts = [part.strip() for part in content] if calls else content
    return ToolCalls(thought + "\n".join(part for part in parts if part), tuple(calls))


def _read_json(body: str) -> Call:
    try:
        return read_call(DECODER.decode(body.strip()))
    except (ValueError, RecursionError) as error:
        return unread(f"a call must be a JSON object ({reason_of(error)}): {shown(body)}")


def _read_xml(body: str) -> Call:
    """A call that is written as `NAME><parameter=NAME>VALUE</parameter>`."""
    name, mark, rest = body.partition(">")
    if not mark or not name.strip() or "<" in name:
        return unread(f"<function=NAME> must have a name: {shown(body)}")
    arguments: dict[str, Json] = {}
    for key, value in re.findall(r"<parameter=([^>\n]+)>(.*?)</parameter>", rest, re.DOTALL):
        arguments[key.strip()] = value.removeprefix("\n").removesuffix("\n")
    left = re.sub(r"<parameter=[^>\n]+>.*?</parameter>", "", rest, flags=re.DOTALL).strip()
    if left:
        return Call(
            name.strip(),
            arguments,
            f"arguments must be written as <parameter=NAME>VALUE</parameter>, not {shown(left)}",
        )
    return Call(name.strip(), arguments, is_text=True)


_QUESTION: Message = {"role": "user", "content": "What is it?"}
_CALL = Call("look_up", {"word": "blue"})
_RESULT = "the seventh color"


def find_reader(name: str, tokenizer: Tokenizer, schemas: Sequence[Json], *, is_chat: bool = True) -> Reader:
    """The reader of the calls that a policy writes.

    Args:
        name: Name of a format; `auto` for that in which the chat template writes calls, which is read by the response
            template of the tokenizer if it has one that reads it; or `package.module:function`, a function that gets
            a message and returns `ToolCalls`.
        tokenizer: Tokenizer of the policy.
        schemas: Tools that the template has to show.
        is_chat: Whether messages are written by the chat template.

    Raises:
        RecipeError: There is no such format, or none that the template writes; or the template leaves out the tools or
            their results.
    """
    from leaderless.environments.chat_writer import ChatWriter  # it imports jinja2, which takes time

    is_chat = is_chat and tokenizer.chat_template is not None
    rendered = partial(ChatWriter(tokenizer, is_chat, tools=schemas).rendered, key=FORMAT_KEY)
    if is_chat:
        results = result_messages([CallResult(_CALL.name, _CALL.arguments, _RESULT)])
        if _RESULT not in rendered([_QUESTION, {"role": "assistant", "content": "a call"}, *results]):
            raise RecipeError.at(
                FORMAT_KEY, "the chat template leaves out messages of the role 'tool': correct the template"
            )
    named = cast("Reader | None", custom_reader(name)) or FORMATS.get(name)
    if named is not None:
        return named
    remedy = f"set {FORMAT_KEY} to the format in which the policy is to write calls: {', '.join(FORMATS)}"
    if not is_chat:
        raise RecipeError.at(FORMAT_KEY, f"auto: no chat template is used, which would tell the format; {remedy}")
    prompt = rendered([_QUESTION])
    names = [str(schema["function"]["name"]) for schema in schemas]  # type: ignore[call-overload,index]
    if missing := [name for name in names if name not in prompt]:
        raise RecipeError.at(
            FORMAT_KEY,
            f"auto: the chat template does not show the tool '{missing[0]}': use a template that renders `tools`, or "
            f"describe the tools in the prompt and set {FORMAT_KEY}",
        )
    written = rendered([_QUESTION, ToolCalls("", [_CALL]).message()], is_prompt=False)
    common = next((i for i, pair in enumerate(zip(written, prompt, strict=False)) if pair[0] != pair[1]), len(prompt))
    own = reader_of_template(tokenizer, schemas, prompt)
    readers: list[Reader] = [*FORMATS.values()] if own is None else [own, *FORMATS.values()]
    for read in readers:
        calls = [(call.name, call.arguments, call.problem) for call in read(written[common:]).calls]
        if calls == [(_CALL.name, _CALL.arguments, "")]:
            return read
    raise RecipeError.at(FORMAT_KEY, f"auto: the chat template writes calls in an unknown format; {remedy}")
