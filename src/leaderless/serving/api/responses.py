"""Replies, whole or streamed in parts: what all APIs share, and the format of OpenAI's completions and chats."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import ClassVar, Generic, TypeVar

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.data.prompts.encode import Tokenizer
from leaderless.rollout.engine import Delta
from leaderless.rollout.shaping import PromptScores, Ranked
from leaderless.serving.api.chat_requests import ChatQuestion
from leaderless.serving.api.requests import CompletionQuestion
from leaderless.serving.api.text_stream import REPLACEMENT, AnswerText, CallReader, TextStream
from leaderless.serving.http_server import ApiError, event

AnyQuestion = TypeVar("AnyQuestion", CompletionQuestion, ChatQuestion)
Reply = dict[str, Json]
"""A JSON object, without the optional fields that the request does not ask for."""


@dataclass
class ChoicePart:
    """Newly sampled part of a response, or all of it, with a log-probability for each token."""

    index: int
    text: str = ""  # that can no longer change
    tokens: list[int] = field(default_factory=list)  # with the one that ended the response
    log_probs: list[float | None] = field(default_factory=list)  # None for the first token of a prompt
    likely: list[Ranked] = field(default_factory=list)  # likeliest tokens in place of each, if they are asked for
    offsets: list[int] = field(default_factory=list)  # characters of the response before each token
    finish_reason: str | None = None
    is_first: bool = False  # whether nothing of the response was sent before
    calls: Sequence[Mapping[str, Json]] = ()  # of tools, at the end, in the format of OpenAI's API
    stopped_by: str | None = None  # stop text of the request that has ended the response
    num_echoed: int = 0  # first tokens that are those of the prompt

    @property
    def shown_text(self) -> str:
        """The text, without white space alone before calls, which some clients may not send back."""
        return self.text if self.text.strip() or not self.calls else ""

    def extend(self, other: ChoicePart) -> None:
        """Append the next part of the same response."""
        self.text += other.text
        self.tokens += other.tokens
        self.log_probs += other.log_probs
        self.likely += other.likely
        self.offsets += other.offsets
        self.num_echoed += other.num_echoed
        self.finish_reason, self.calls, self.stopped_by = other.finish_reason, other.calls, other.stopped_by


class Composer(ABC, Generic[AnyQuestion]):
    """Composes the reply to one request from the tokens that the engine samples.

    Attributes:
        question: The request.
        prompts: Token ids of each prompt.
        id: Name of the reply.
    """

    prefix: ClassVar[str]

    def __init__(
        self,
        question: AnyQuestion,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,
        reader: CallReader | None = None,
    ) -> None:
        """Start an empty reply to a question.

        Args:
            question: The request.
            prompts: Token ids of each prompt.
            tokenizer: Tokenizer of the model.
            reader: Reader of calls of tools; None if none are read here.
        """
        self.question: AnyQuestion = question
        self.prompts, self._tokenizer = prompts, tokenizer
        self._texts = [AnswerText(tokenizer, question.stop_texts, reader) for _ in range(len(prompts) * question.n)]
        self.id, self._created = f"{self.prefix}{uuid.uuid4().hex}", int(time.time())
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
        answer, part = self._texts[index], ChoicePart(index, is_first=index not in self._begun)
        self._begun.add(index)
        self._num_tokens += len(delta.tokens)
        part.likely += delta.likely or [()] * len(delta.tokens)
        for token, log_prob in zip(delta.tokens, delta.log_probs, strict=True):
            part.offsets.append(answer.stream.num_characters)
            part.text += answer.add(token)
            part.tokens.append(token)
            part.log_probs.append(log_prob)
        if delta.finish_reason is not None:
            part.text += answer.finish()
            part.calls, part.stopped_by = answer.calls, answer.stream.stopped_by
            part.finish_reason = "stop" if answer.stream.has_stopped else delta.finish_reason
            if part.calls and part.finish_reason == "stop":
                part.finish_reason = "tool_calls"
        return part

    def choices(self, parts: Sequence[ChoicePart]) -> list[ChoicePart]:
        """Put the parts of each response together."""
        choices = [ChoicePart(index, is_first=True) for index in range(len(self._texts))]
        for part in parts:
            choices[part.index].extend(part)
        return choices

    async def shown(self, parts: AsyncIterator[ChoicePart]) -> AsyncIterator[ChoicePart]:
        """Parts of a single response, in which white space waits for the first text, or for the end; see above."""
        held, has_begun = "", False
        async for part in parts:
            text = held + part.text
            has_begun = has_begun or bool(text.strip())
            is_certain = has_begun or (part.finish_reason is not None and not part.calls)
            held = "" if is_certain else text
            yield replace(part, text=text if is_certain else "")

    @abstractmethod
    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        """Compose the whole reply from the parts of all responses."""

    @abstractmethod
    def events(self, parts: AsyncIterator[ChoicePart]) -> AsyncIterator[bytes]:
        """Compose a streamed reply from its parts, as server-sent events; an error ends it."""


class OpenAIComposer(Composer[AnyQuestion]):
    """Composes replies that have choices."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]

    @override
    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        choices = [self._choice(choice) for choice in self.choices(parts)]
        return self._reply(self.kind, choices) | {"usage": self._usage()}

    @override
    async def events(self, parts: AsyncIterator[ChoicePart]) -> AsyncIterator[bytes]:
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
            choice["token_ids"] = part.tokens[part.num_echoed :]
            if part.is_first:
                choice["prompt_token_ids"] = self.prompts[part.index // self.question.n]
        return choice

    @abstractmethod
    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:
        """Write the text of a part in the format of the endpoint."""

    @abstractmethod
    def _log_probs(self, part: ChoicePart) -> Json:
        """Write the log-probabilities of a part in the format of the endpoint."""


class CompletionComposer(OpenAIComposer[CompletionQuestion]):
    """Composes replies of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl-"

    def __init__(
        self,
        question: CompletionQuestion,
        prompts: Sequence[list[int]],
        tokenizer: Tokenizer,
        reader: CallReader | None = None,
    ) -> None:
        super().__init__(question, prompts, tokenizer, reader)
        self._scores: dict[int, PromptScores] = {}
        self._lengths: dict[int, int] = {}  # of echoed prompts, by the index of the choice

    @override
    def take(self, delta: Delta) -> ChoicePart:
        if delta.prompt is not None:
            self._scores[delta.request] = delta.prompt
            return ChoicePart(delta.request * self.question.n + delta.sibling)
        part = super().take(delta)
        echoed = self._echoed(delta.request, part.index) if self.question.echo and part.is_first else None
        length = self._lengths.get(part.index, 0)
        part.offsets = [length + offset for offset in part.offsets]
        if echoed is None:
            return part
        echoed.extend(part)
        return echoed

    def _echoed(self, prompt: int, index: int) -> ChoicePart:
        """A prompt as the first part of a response."""
        part, stream = ChoicePart(index, is_first=True), TextStream(self._tokenizer, ())
        for token in self.prompts[prompt]:
            part.offsets.append(stream.num_characters)
            part.text += stream.add(token)
        part.text += stream.finish()
        part.tokens, self._lengths[index] = [*self.prompts[prompt]], len(part.text)
        part.num_echoed = len(part.tokens)
        scores = self._scores.get(prompt, PromptScores([], []))
        missing = len(part.tokens) - len(scores.log_probs)
        part.log_probs, part.likely = [None] * missing + [*scores.log_probs], [()] * missing + [*scores.likely]
        return part

    def _content(self, part: ChoicePart, *, is_chunk: bool) -> Reply:  # noqa: ARG002
        return {"text": part.text}

    def _log_probs(self, part: ChoicePart) -> Json:
        likely: list[Json] = []
        for token, log_prob, ranked in zip(part.tokens, part.log_probs, part.likely, strict=True):
            found = dict(ranked) | ({} if log_prob is None else {token: log_prob})
            by_text: dict[str, Json] = {}
            # Parts of characters have the same text: the likeliest stands for all, so that clients see what is greedy.
            for one, score in sorted(found.items(), key=lambda item: -item[1]):
                by_text.setdefault(self._tokenizer.decode([one]), score)
            likely.append(by_text or None)
        return {
            "tokens": [self._tokenizer.decode([token]) for token in part.tokens],
            "token_logprobs": part.log_probs,
            "top_logprobs": likely if self.question.num_likely else None,
            "text_offset": part.offsets,
        }


class ChatComposer(OpenAIComposer[ChatQuestion]):
    """Composes replies of `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl-"

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
        calls = part.calls
        if is_chunk and calls:
            numbered: list[Json] = [{"index": place, **call} for place, call in enumerate(calls)]
            return {"delta": {"content": part.text or None, "tool_calls": numbered}}
        if is_chunk:
            return {"delta": {"content": part.text} if part.text else {}}
        message: Reply = {"role": "assistant", "content": part.text}
        return {"message": message | ({"content": part.text or None, "tool_calls": [*calls]} if calls else {})}

    def _log_probs(self, part: ChoicePart) -> Json:
        return {"content": token_log_probs(self._tokenizer, part), "refusal": None}


def token_log_probs(tokenizer: Tokenizer, part: ChoicePart, begin: int = 0) -> list[Json]:
    """Write the log-probabilities of the tokens of a part, from one of them on, in the format of OpenAI's chats."""
    content: list[Json] = []
    for token, log_prob, ranked in list(zip(part.tokens, part.log_probs, part.likely, strict=True))[begin:]:
        likely: list[Json] = [_scored(tokenizer, one, score) for one, score in ranked]
        content.append(_scored(tokenizer, token, log_prob) | {"top_logprobs": likely})
    return content


def _scored(tokenizer: Tokenizer, token: int, log_prob: float | None) -> Reply:
    text = tokenizer.decode([token])
    whole = None if REPLACEMENT in text else list(text.encode())  # not of a part of a character
    return {"token": text, "logprob": log_prob, "bytes": whole}
