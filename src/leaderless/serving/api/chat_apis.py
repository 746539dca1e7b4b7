"""The APIs in which a model is asked to continue a chat: each translates its requests, and composes its replies."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import UTC, datetime
from functools import partial
from typing import NamedTuple

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.data.prompts.encode import Tokenizer
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.programs.conversations import AskRefusedError, checked
from leaderless.environments.protocol import Message
from leaderless.serving.api.anthropic_messages import MessagesBody, MessagesComposer
from leaderless.serving.api.chat_requests import ChatQuestion
from leaderless.serving.api.openai_responses import ResponseMemory, ResponsesBody, ResponsesComposer
from leaderless.serving.api.requests import read_question
from leaderless.serving.api.responses import ChatComposer, Composer
from leaderless.serving.api.text_stream import CallReader

MakeComposer = Callable[
    [ChatQuestion, Sequence[list[int]], Tokenizer, CallReader | None],
    Composer[ChatQuestion],
]
"""Makes what composes the reply to a question, of its prompts, the tokenizer, and the reader of calls of tools."""


class ChatApi(NamedTuple):
    """One API.

    Attributes:
        path: Path of its endpoint, behind the version.
        field: Field of its requests that has the conversation.
        read: Function that reads the body of a request, which may continue what is remembered of earlier ones.
        is_bounded: Whether a longer answer than there is room for may be asked for; it ends where the room does.
    """

    path: str
    field: str
    read: Callable[[bytes, ResponseMemory], tuple[ChatQuestion, MakeComposer]]
    is_bounded: bool = False


def _read_chat(body: bytes, memory: ResponseMemory) -> tuple[ChatQuestion, MakeComposer]:  # noqa: ARG001
    return read_question(body, ChatQuestion), ChatComposer


def _read_messages(body: bytes, memory: ResponseMemory) -> tuple[ChatQuestion, MakeComposer]:  # noqa: ARG001
    return read_question(body, MessagesBody).question(), MessagesComposer


def _read_responses(body: bytes, memory: ResponseMemory) -> tuple[ChatQuestion, MakeComposer]:
    asked = read_question(body, ResponsesBody)
    messages = asked.messages(memory)
    return asked.question(messages), partial(ResponsesComposer, body=asked, memory=memory, messages=messages)


CHAT_APIS = (
    ChatApi("/chat/completions", "messages", _read_chat),
    ChatApi("/messages", "messages", _read_messages, is_bounded=True),
    ChatApi("/responses", "input", _read_responses),
)
"""All of them."""


def model_entry(name: str, created: int) -> dict[str, Json]:
    """A model as OpenAI's and Anthropic's clients know it."""
    day = datetime.fromtimestamp(created, UTC).isoformat().replace("+00:00", "Z")
    entry: dict[str, Json] = {"id": name, "object": "model", "created": created, "owned_by": "leaderless"}
    return entry | {"type": "model", "display_name": name, "created_at": day}


def listed(model: dict[str, Json]) -> Json:
    """The list of the only model."""
    return {"object": "list", "data": [model], "has_more": False, "first_id": model["id"], "last_id": model["id"]}


def written(writer: ChatWriter, question: ChatQuestion) -> tuple[list[Message], list[int]]:
    """The messages of a question as templates know them, and the tokens of the whole prompt.

    Raises:
        AskRefusedError: The messages cannot be written.
    """
    sees_images = writer.reader is not None
    messages = [checked(message.to_json(), sees_images=sees_images) for message in question.messages]
    try:
        return replace(writer, tools=question.offered_tools, options=question.chat_template_kwargs).begin(messages)
    except RecipeError as error:
        raise AskRefusedError(error.problems[0].message) from error
