"""Chat templates and tools: in which format a template writes calls, and whether it shows tools and their results."""

from __future__ import annotations

from collections.abc import Sequence

from jinja2 import TemplateError

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.config.environment import FORMAT_KEY
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.protocol import Message
from leaderless.environments.tools.calls import Call, CallResult, ToolCalls, result_messages
from leaderless.environments.tools.formats import FORMATS, Reader, named_reader

_QUESTION: Message = {"role": "user", "content": "What is it?"}
_CALL = Call("look_up", {"word": "blue"})
_RESULT = "the seventh color"


def find_reader(name: str, tokenizer: Tokenizer, schemas: Sequence[Json], *, is_chat: bool = True) -> Reader:
    """The reader of the calls that a policy writes.

    Args:
        name: Name of a format; `auto` for that in which the chat template writes calls; or `package.module:function`,
            a function that gets a message and returns `ToolCalls`.
        tokenizer: Tokenizer of the policy.
        schemas: Tools that the template has to show.
        is_chat: Whether messages are written by the chat template.

    Raises:
        RecipeError: There is no such format, or none that the template writes; or the template leaves out the tools or
            their results.
    """
    is_chat = is_chat and tokenizer.chat_template is not None
    if is_chat:
        check_results(tokenizer, schemas)
    named = named_reader(name)
    if named is not None:
        return named
    remedy = f"set {FORMAT_KEY} to the format in which the policy is to write calls: {', '.join(FORMATS)}"
    if not is_chat:
        raise RecipeError.at(FORMAT_KEY, f"auto: no chat template is used, which would tell the format; {remedy}")
    check_shown(tokenizer, schemas)
    written = _render(tokenizer, [_QUESTION, ToolCalls("", [_CALL]).message()], schemas, is_prompt=False)
    found = _written_format(written, _render(tokenizer, [_QUESTION], schemas))
    if found is None:
        raise RecipeError.at(FORMAT_KEY, f"auto: the chat template writes calls in an unknown format; {remedy}")
    return FORMATS[found]


def check_shown(tokenizer: Tokenizer, schemas: Sequence[Json]) -> None:
    """Refuse a chat template that does not tell the policy which tools it has.

    Raises:
        RecipeError: The name of a tool is not in the prompt.
    """
    prompt = _render(tokenizer, [_QUESTION], schemas)
    missing = [name for name in map(_name_of, schemas) if name not in prompt]
    if missing:
        raise RecipeError.at(
            FORMAT_KEY,
            f"auto: the chat template does not show the tool '{missing[0]}': use a template that renders `tools`, or "
            f"describe the tools in the prompt and set {FORMAT_KEY}",
        )


def check_results(tokenizer: Tokenizer, schemas: Sequence[Json]) -> None:
    """Refuse a chat template that does not tell the policy what a tool has answered.

    Raises:
        RecipeError: The result of a tool is not in the prompt.
    """
    said: Message = {"role": "assistant", "content": "a call"}
    results = result_messages([CallResult(_CALL.name, _CALL.arguments, _RESULT)])
    if _RESULT not in _render(tokenizer, [_QUESTION, said, *results], schemas):
        raise RecipeError.at(
            FORMAT_KEY, "the chat template leaves out messages of the role 'tool': correct the template"
        )


def _written_format(written: str, prompt: str) -> str | None:
    """The format that reads a call as it was meant."""
    common = next((i for i, pair in enumerate(zip(written, prompt, strict=False)) if pair[0] != pair[1]), len(prompt))
    answer = written[common:]
    for name, read in FORMATS.items():
        calls = read(answer).calls
        if [(call.name, call.arguments, call.problem) for call in calls] == [(_CALL.name, _CALL.arguments, "")]:
            return name
    return None


def _render(
    tokenizer: Tokenizer, messages: Sequence[Message], schemas: Sequence[Json], *, is_prompt: bool = True
) -> str:
    try:
        return tokenizer.apply_chat_template(
            list(messages), tools=list(schemas), add_generation_prompt=is_prompt, tokenize=False
        )
    except (TemplateError, TypeError, ValueError, KeyError, AttributeError) as error:
        roles = ", ".join(str(message["role"]) for message in messages)
        raise RecipeError.at(
            FORMAT_KEY, f"the chat template cannot write tools, with the roles {roles}: {type(error).__name__}: {error}"
        ) from error


def _name_of(schema: Json) -> str:
    return str(schema["function"]["name"])  # type: ignore[call-overload,index]
