"""Replies in the format of OpenAI's API, whole or streamed in parts."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.rollout.engine import Delta
from leaderless.serving.api.requests import ChatQuestion, CompletionQuestion
from leaderless.serving.http_server import ApiError, event

REPLACEMENT = "\N{REPLACEMENT CHARACTER}"
"""Character that tokenizers write for bytes that are no character, or not a whole one yet."""


class TextStream:
    """The text of one response while it grows.

    A character whose bytes are spread over several tokens is written with the last of them. Text that may turn out
    to be the beginning of a stop text is held back. The stop text and everything after it is not written.
    """

    def __init__(self, tokenizer: Tokenizer, stop: Sequence[str]) -> None:
        """Start without any text; `stop` are texts that end it."""
        self._tokenizer, self._stop = tokenizer, stop
        self._window: list[int] = []
        """Newest tokens. The first ones were written already; they affect how the next one is decoded."""
        self._num_old = 0
        self._num_written = 0
        self._held = ""
        self.num_characters = 0
        """Number of whole characters so far, including those held back."""
        self.has_stopped = False
        """Whether a stop text has appeared."""

    def add(self, token: int) -> str:
        """Add the next token, and return the text that is certain now; special tokens have none."""
        self._window.append(token)
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        whole = text.rstrip(REPLACEMENT)
        new = whole[self._num_written :]
        self._num_written = max(self._num_written, len(whole))
        if new and whole == text:
            self._window = self._window[self._num_old :]
            self._num_old = len(self._window)
            self._num_written = len(self._tokenizer.decode(self._window, skip_special_tokens=True))
        return self._before_stop(new)

    def finish(self) -> str:
        """Return the rest of the text after the last token."""
        text = self._tokenizer.decode(self._window, skip_special_tokens=True)
        rest = self._before_stop(text[self._num_written :])
        held, self._held = self._held, ""
        return rest + held

    def _before_stop(self, new: str) -> str:
        """Return the part of the text that is certain to come before any stop text."""
        self.num_characters += len(new)
        if self.has_stopped:
            return ""
        text = self._held + new
        found = [place for place in map(text.find, self._stop) if place >= 0]
        if found:
            self.has_stopped, self._held = True, ""
            return text[: min(found)]
        # Characters at the end that may be the beginning of a stop text.
        places = ((stop, count) for stop in self._stop for count in range(1, min(len(text) + 1, len(stop))))
        certain = len(text) - max((count for stop, count in places if text.endswith(stop[:count])), default=0)
        self._held = text[certain:]
        return text[:certain]


AnyQuestion = TypeVar("AnyQuestion", CompletionQuestion, ChatQuestion)
Reply = dict[str, Json]
"""A JSON object, without the optional fields that the request does not ask for."""


@dataclass
class ChoicePart:
    """Newly sampled part of a response, or all of it, with a log-probability for each token."""

    index: int
    text: str = ""  # that can no longer change
    tokens: list[int] = field(default_factory=list)  # with the one that ended the response
    log_probs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)  # characters of the response before each token
    finish_reason: str | None = None
    is_first: bool = False  # whether nothing of the response was sent before

    def extend(self, other: ChoicePart) -> None:
        """Append the next part of the same response."""
        self.text += other.text
        self.tokens += other.tokens
        self.log_probs += other.log_probs
        self.offsets += other.offsets
        self.finish_reason = other.finish_reason


class Composer(ABC, Generic[AnyQuestion]):
    """Composes the reply to one request from the tokens that the engine samples.

    Attributes:
        question: The request.
        prompts: Token ids of each prompt.
        id: Name of the reply.
    """

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, question: AnyQuestion, prompts: Sequence[list[int]], tokenizer: Tokenizer) -> None:
        """Start an empty reply to a question, whose prompts are given as token ids."""
        self.question: AnyQuestion = question
        self.prompts, self._tokenizer = prompts, tokenizer
        self._texts = [TextStream(tokenizer, question.stop_texts) for _ in range(len(prompts) * question.n)]
        self.id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._begun: set[int] = set()
        self._num_tokens = 0

    def take(self, delta: Delta) -> ChoicePart:
        """Turn new tokens of a response into a part of the reply; `delta.request` is the index of the prompt.

        Raises:
            ApiError: The engine canceled the response.
        """
        if delta.finish_reason == "aborted":
            raise ApiError(503, "the engine has given up the response: ask again")
        index = delta.request * self.question.n + delta.sibling
        stream, part = self._texts[index], ChoicePart(index, is_first=index not in self._begun)
        self._begun.add(index)
        self._num_tokens += len(delta.tokens)
        for token, log_prob in zip(delta.tokens, delta.log_probs, strict=True):
            part.offsets.append(stream.num_characters)
            part.text += stream.add(token)
            part.tokens.append(token)
            part.log_probs.append(log_prob)
        if delta.finish_reason is not None:
            part.text += stream.finish()
            part.finish_reason = "stop" if stream.has_stopped else delta.finish_reason
        return part

    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        """Compose the whole reply from the parts of all responses."""
        choices = [ChoicePart(index, is_first=True) for index in range(len(self._texts))]
        for part in parts:
            choices[part.index].extend(part)
        return self._reply(self.kind, [self._choice(choice) for choice in choices]) | {"usage": self._usage()}

    async def events(self, parts: AsyncIterator[ChoicePart]) -> AsyncIterator[bytes]:
        """Compose a streamed reply from its parts, as server-sent events; an error ends it."""
        for reply in self._first_chunks():
            yield event(reply)
        has_tokens = self.question.wants_log_probs or self.question.return_token_ids
        try:
            async for part in parts:
                if part.text or (has_tokens and part.tokens) or part.finish_reason is not None:
                    yield event(self._chunk(self._choice(part, is_chunk=True)))
        except ApiError as error:
            yield event(error.to_json())
            return
        if self.question.wants_usage:
            yield event(self._reply(self.chunk_kind, []) | {"usage": self._usage()})
        yield b"data: [DONE]\n\n"

    def _first_chunks(self) -> list[Reply]:
        """Compose the chunks of a streamed reply that come before the first token."""
        return []

    def _usage(self) -> Json:
        """Count the tokens so far; a prompt counts once, however many responses it has."""
        num_prompt_tokens = sum(map(len, self.prompts))
        return {
            "prompt_tokens": num_prompt_tokens,
            "completion_tokens": self._num_tokens,
            "total_tokens": num_prompt_tokens + self._num_tokens,
        }

    def _reply(self, kind: str, choices: list[Reply]) -> Reply:
        return {
            "id": self.id,
            "object": kind,
            "created": self._created,
            "model": self.question.model,
            "choices": choices,
        }

    def _chunk(self, choice: Reply) -> Reply:
        """Compose a chunk, in which the usage is null if the last chunk has it."""
        reply = self._reply(self.chunk_kind, [choice])
        return reply | {"usage": None} if self.question.wants_usage else reply

    def _choice(self, part: ChoicePart, *, is_chunk: bool = False) -> Reply:
        """Write a part as a choice, on request with token ids: the prompt's once for each response."""
        log_probs = self._log_probs(part) if self.question.wants_log_probs else None
        choice = {"index": part.index, **self._content(part, is_chunk=is_chunk), "logprobs": log_probs}
        choice["finish_reason"] = part.finish_reason
        if self.question.return_token_ids:
            choice["token_ids"] = part.tokens
            if part.is_first:
                choice["prompt_token_ids"] = self.prompts[part.index // self.question.n]
        return choice

    @abstractmethod
    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:
        """Write the text of a part in the format of the endpoint."""

    @abstractmethod
    def _log_probs(self, part: ChoicePart) -> Json:
        """Write the log-probabilities of a part in the format of the endpoint."""


class CompletionComposer(Composer[CompletionQuestion]):
    """Composes replies of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:  # noqa: ARG002
        return {"text": part.text}

    def _log_probs(self, part: ChoicePart) -> Json:
        return {
            "tokens": [self._tokenizer.decode([token]) for token in part.tokens],
            "token_logprobs": part.log_probs,
            "top_logprobs": None,
            "text_offset": part.offsets,
        }


class ChatComposer(Composer[ChatQuestion]):
    """Composes replies of `/v1/chat/completions`.

    Attributes:
        calls: Calls of tools in the format of OpenAI's API, by the index of the choice.
    """

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def __init__(self, question: ChatQuestion, prompts: Sequence[list[int]], tokenizer: Tokenizer) -> None:
        super().__init__(question, prompts, tokenizer)
        self.calls: dict[int, Sequence[Mapping[str, Json]]] = {}

    @override
    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        return super().whole(parts) | self._prompt()

    @override
    def _first_chunks(self) -> list[Reply]:
        """Begin each choice with its role."""
        begin: Json = {"role": "assistant", "content": ""}
        choices: list[Reply] = [{"index": i, "delta": begin, "finish_reason": None} for i in range(self.question.n)]
        first, *others = map(self._chunk, choices)
        return [first | self._prompt(), *others]

    def _prompt(self) -> Reply:
        """Return the prompt's tokens, if they are asked for, next to the choices, as vLLM does for chats."""
        return {"prompt_token_ids": self.prompts[0]} if self.question.return_token_ids else {}

    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:
        calls = self.calls.get(part.index)
        if is_chunk and calls:
            numbered: list[Json] = [{"index": place, **call} for place, call in enumerate(calls)]
            return {"delta": {"content": part.text or None, "tool_calls": numbered}}
        if is_chunk:
            return {"delta": {"content": part.text} if part.text else {}}
        message: Reply = {"role": "assistant", "content": part.text}
        return {"message": message | ({"content": part.text or None, "tool_calls": [*calls]} if calls else {})}

    def _log_probs(self, part: ChoicePart) -> Json:
        content: list[Json] = []
        for token, log_prob in zip(part.tokens, part.log_probs, strict=True):
            text = self._tokenizer.decode([token])
            whole = None if REPLACEMENT in text else list(text.encode())  # not of a part of a character
            content.append({"token": text, "logprob": log_prob, "bytes": whole, "top_logprobs": []})
        return {"content": content, "refusal": None}
