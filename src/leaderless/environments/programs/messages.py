"""Messages and calls of tools, between the formats of OpenAI's API and of chat templates."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from contextlib import suppress

from leaderless.base.values import Json
from leaderless.data.prompts.media import other_than_text
from leaderless.environments.pictures import is_image, message_with_files
from leaderless.environments.protocol import Message


class AskRefusedError(ValueError):
    """The policy is not asked; the text says why.

    Attributes:
        code: Word for programs; `context_length_exceeded` and `max_turns` are the ends of an episode's limits.
    """

    def __init__(self, text: str, code: str = "invalid_request") -> None:
        super().__init__(text)
        self.code = code


def checked(message: Message, *, sees_images: bool = False, known: set[str] | None = None) -> Message:
    """A message as chat templates know it; images are parts of it, where the policy sees them.

    Args:
        message: Message in the format of OpenAI's API.
        sees_images: Whether the policy sees images.
        known: Data URLs that were checked before, to which the message's are added: programs send a whole
            conversation with each question, and an image is decoded once.

    Raises:
        AskRefusedError: The message is malformed, or an image cannot be used.
    """
    if not isinstance(message, Mapping) or not isinstance(message.get("role"), str):
        raise AskRefusedError(f"a message must have a 'role' and a 'content', not {message!r:.80}")
    kept = {name: value for name, value in message.items() if value is not None}
    is_shown = sees_images and _has_image(kept)
    kept["content"] = _with_images(kept, known) if is_shown else _text(kept.get("content", ""))
    calls = kept.get("tool_calls")
    if calls:
        if not isinstance(calls, Sequence) or not all(isinstance(call, Mapping) for call in calls):
            raise AskRefusedError("tool_calls must be a list of objects with 'function'")
        kept["tool_calls"] = [_templated(call) for call in calls if isinstance(call, Mapping)]
    return kept


def _has_image(message: Message) -> bool:
    content = message.get("content")
    return isinstance(content, list | tuple) and any(isinstance(part, Mapping) and is_image(part) for part in content)


def _with_images(message: Message, known: set[str] | None) -> Sequence[Json]:
    """The parts of a message, with the files of its images."""
    if problem := other_than_text(message, has_images=True):
        raise AskRefusedError(f"content holds {problem}, which the policy does not read: describe it in words")
    try:
        found = message_with_files(message, takes_paths=False, known=known)
    except ValueError as error:
        raise AskRefusedError(f"an image cannot be used: {error}") from error
    content = found["content"]
    assert isinstance(content, list)
    return content


def _text(content: Json) -> str:
    if isinstance(content, str):
        return content
    if isinstance(content, Sequence):
        texts = [part.get("text") for part in content if isinstance(part, Mapping) and part.get("type") == "text"]
        if len(texts) == len(content):
            return "\n".join(map(str, texts))
    raise AskRefusedError(f"content must be a text, or a list of parts of type 'text', not {content!r:.80}")


def _templated(call: Mapping[str, Json]) -> Mapping[str, Json]:
    """A call with arguments as an object, as chat templates want them; OpenAI's API has them as a text."""
    function = call.get("function")
    if not isinstance(function, Mapping) or not isinstance(function.get("name"), str):
        raise AskRefusedError(f"a call of a tool must have a 'function' with a 'name', not {function!r:.80}")
    arguments = function.get("arguments", {})
    if isinstance(arguments, str):
        with suppress(ValueError):  # then it is shown as it is
            arguments = json.loads(arguments or "{}")
    return {**call, "function": {**function, "arguments": arguments}}


def call_of(identity: str, name: str, arguments: Mapping[str, Json]) -> Mapping[str, Json]:
    """A call of a tool in the format of OpenAI's API."""
    text = json.dumps(arguments, ensure_ascii=False)
    return {"id": identity, "type": "function", "function": {"name": name, "arguments": text}}
