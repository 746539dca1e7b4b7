"""Replies in the format of OpenAI's API, whole or streamed in parts."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.rollout.engine import Delta
from leaderless.serving.api.detokenizer import REPLACEMENT, TextStream
from leaderless.serving.api.errors import ApiError
from leaderless.serving.api.requests import ChatQuestion, CompletionQuestion

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

    def has_content(self, part: ChoicePart) -> bool:
        """Check whether a part has content to send."""
        has_tokens = bool(part.tokens) and (self.question.wants_log_probs or self.question.return_token_ids)
        return bool(part.text) or has_tokens or part.finish_reason is not None

    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        """Compose the whole reply from the parts of all responses."""
        choices = [ChoicePart(index, is_first=True) for index in range(len(self._texts))]
        for part in parts:
            choices[part.index].extend(part)
        return self._reply(self.kind, [self._choice(choice) for choice in choices]) | {"usage": self._usage()}

    def chunk(self, part: ChoicePart) -> Reply:
        """Compose a chunk of a streamed reply."""
        return self._chunk(self._choice(part, is_chunk=True))

    def first_chunks(self) -> list[Reply]:
        """Compose the chunks of a streamed reply that come before the first token."""
        return []

    def last_chunks(self) -> list[Reply]:
        """Compose the chunks that end a streamed reply."""
        return [self._reply(self.chunk_kind, []) | {"usage": self._usage()}] if self.question.wants_usage else []

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
    """Composes replies of `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    @override
    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        return super().whole(parts) | self._prompt()

    @override
    def first_chunks(self) -> list[Reply]:
        """Begin each choice with its role."""
        begin: Json = {"role": "assistant", "content": ""}
        choices: list[Reply] = [{"index": i, "delta": begin, "finish_reason": None} for i in range(self.question.n)]
        first, *others = map(self._chunk, choices)
        return [first | self._prompt(), *others]

    def _prompt(self) -> Reply:
        """Return the prompt's tokens, if they are asked for, next to the choices, as vLLM does for chats."""
        return {"prompt_token_ids": self.prompts[0]} if self.question.return_token_ids else {}

    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:
        if is_chunk:
            return {"delta": {"content": part.text} if part.text else {}}
        return {"message": {"role": "assistant", "content": part.text}}

    def _log_probs(self, part: ChoicePart) -> Json:
        pairs = zip(part.tokens, part.log_probs, strict=True)
        return {"content": [self._log_prob(token, log_prob) for token, log_prob in pairs], "refusal": None}

    def _log_prob(self, token: int, log_prob: float) -> Json:
        """Write the log-probability of a token; its bytes are null if it is a part of a character."""
        text = self._tokenizer.decode([token])
        whole = None if REPLACEMENT in text else list(text.encode())
        return {"token": text, "logprob": log_prob, "bytes": whole, "top_logprobs": []}
