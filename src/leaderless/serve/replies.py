"""Replies in the format of OpenAI's API, whole or streamed in parts."""

from __future__ import annotations

import time
import uuid
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import ClassVar, Generic, TypeVar

from pydantic import BaseModel

from leaderless.data.encode import Tokenizer
from leaderless.rollout.engine import Delta
from leaderless.serve.errors import ApiError
from leaderless.serve.questions import ChatQuestion, CompletionQuestion
from leaderless.serve.text import REPLACEMENT, TextStream

AnyQuestion = TypeVar("AnyQuestion", CompletionQuestion, ChatQuestion)


class TextLogProbs(BaseModel):
    """Log-probabilities in a completion; `text_offset` counts characters of the response."""

    tokens: list[str]
    token_logprobs: list[float]
    top_logprobs: None
    text_offset: list[int]


class TokenLogProb(BaseModel):
    """Log-probability of one token in a chat; `bytes` is null for a part of a character."""

    token: str
    logprob: float
    bytes: list[int] | None
    top_logprobs: list[TokenLogProb]


class ChatLogProbs(BaseModel):
    """Log-probabilities in a chat."""

    content: list[TokenLogProb]
    refusal: None


class ReplyMessage(BaseModel):
    """A message of the model, or a part of it."""

    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    """One response or a part of it; its fields depend on the request."""

    index: int
    text: str | None = None
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    logprobs: TextLogProbs | ChatLogProbs | None = None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(BaseModel):
    """Token counts; the tokens of a prompt count once, however many responses it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Reply(BaseModel):
    """A reply or a part of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None

    def to_json(self) -> str:
        """Serialize only the fields that were set."""
        return self.model_dump_json(exclude_unset=True)


@dataclass
class ChoicePart:
    """Newly sampled part of a response, or all of it.

    Attributes:
        index: Index of the choice.
        text: Text that can no longer change.
        tokens: Sampled token ids, including the one that ended the response.
        log_probs: Log-probability of each token.
        offsets: Number of characters of the response before each token.
        finish_reason: Reason why the response ended; None while it continues.
        is_first: Whether nothing of the response was sent before.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_first: bool = False

    def extend(self, other: ChoicePart) -> None:
        """Append the next part.

        Args:
            other: Part of the same response.
        """
        self.text += other.text
        self.tokens += other.tokens
        self.log_probs += other.log_probs
        self.offsets += other.offsets
        self.finish_reason = other.finish_reason


class Composer(ABC, Generic[AnyQuestion]):
    """Composes the reply to one request from the tokens that the engine samples."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, question: AnyQuestion, prompts: Sequence[list[int]], tokenizer: Tokenizer) -> None:
        """Start an empty reply.

        Args:
            question: Request of the client.
            prompts: Token ids of each prompt.
            tokenizer: Tokenizer of the model.
        """
        self.question: AnyQuestion = question
        self.prompts, self._tokenizer = prompts, tokenizer
        self._texts = [TextStream(tokenizer, question.stop_texts) for _ in range(len(prompts) * question.n)]
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._begun: set[int] = set()
        self._num_tokens = 0

    def take(self, delta: Delta) -> ChoicePart:
        """Turn new tokens of a response into a part of the reply.

        Args:
            delta: Tokens from the engine; `request` is the index of the prompt.

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
        """Check whether a part has content to send.

        Args:
            part: Part of a response.
        """
        has_tokens = bool(part.tokens) and (self.question.wants_log_probs or self.question.return_token_ids)
        return bool(part.text) or has_tokens or part.finish_reason is not None

    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        """Compose the whole reply.

        Args:
            parts: Parts of all responses.
        """
        choices = [ChoicePart(index) for index in range(len(self._texts))]
        for part in parts:
            choices[part.index].extend(part)
        for choice in choices:
            choice.is_first = True
        return self._reply(self.kind, [self._choice(choice) for choice in choices], self.usage())

    def chunk(self, part: ChoicePart) -> Reply:
        """Compose a chunk of a streamed reply.

        Args:
            part: Part of a response.
        """
        return self._counted(self._reply(self.chunk_kind, [self._choice(part, is_chunk=True)]))

    def first_chunks(self) -> list[Reply]:
        """Compose the chunks of a streamed reply that come before the first token."""
        return []

    def last_chunks(self) -> list[Reply]:
        """Compose the chunks that end a streamed reply."""
        return [self._reply(self.chunk_kind, [], self.usage())] if self.question.wants_usage else []

    def usage(self) -> Usage:
        """Count the tokens so far."""
        num_prompt_tokens = sum(map(len, self.prompts))
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt_tokens + self._num_tokens,
        )

    @abstractmethod
    def _choice(self, part: ChoicePart, *, is_chunk: bool = False) -> Choice:
        """Write a part in the format of the endpoint."""

    def _counted(self, chunk: Reply) -> Reply:
        """Set the usage of a chunk that is not the last one to null, if the last one has it."""
        return chunk.model_copy(update={"usage": None}) if self.question.wants_usage else chunk

    def _reply(self, kind: str, choices: list[Choice], usage: Usage | None = None) -> Reply:
        reply = Reply(id=self._id, object=kind, created=self._created, model=self.question.model, choices=choices)
        return reply if usage is None else reply.model_copy(update={"usage": usage})

    def _with_tokens(self, choice: Choice, part: ChoicePart) -> Choice:
        """Add token ids on request, those of the prompt once for each response."""
        if not self.question.return_token_ids:
            return choice
        update: dict[str, list[int]] = {"token_ids": part.tokens}
        if part.is_first:
            update["prompt_token_ids"] = self.prompts[part.index // self.question.n]
        return choice.model_copy(update=update)


class CompletionComposer(Composer[CompletionQuestion]):
    """Composes replies of `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, part: ChoicePart, *, is_chunk: bool = False) -> Choice:  # noqa: ARG002
        log_probs = None
        if self.question.wants_log_probs:
            log_probs = TextLogProbs(
                tokens=[self._tokenizer.decode([token]) for token in part.tokens],
                token_logprobs=part.log_probs,
                top_logprobs=None,
                text_offset=part.offsets,
            )
        choice = Choice(index=part.index, text=part.text, logprobs=log_probs, finish_reason=part.finish_reason)
        return self._with_tokens(choice, part)


class ChatComposer(Composer[ChatQuestion]):
    """Composes replies of `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, parts: Sequence[ChoicePart]) -> Reply:
        """See `Composer`."""
        return self._with_prompt(super().whole(parts))

    def first_chunks(self) -> list[Reply]:
        """See `Composer`. The role comes first."""
        begin = ReplyMessage(role="assistant", content="")
        choices = [Choice(index=index, delta=begin, finish_reason=None) for index in range(self.question.n)]
        first, *others = [self._counted(self._reply(self.chunk_kind, [choice])) for choice in choices]
        return [self._with_prompt(first), *others]

    def _with_prompt(self, reply: Reply) -> Reply:
        """Add the prompt's tokens next to the choices, as vLLM does for chats."""
        is_wanted = self.question.return_token_ids
        return reply.model_copy(update={"prompt_token_ids": self.prompts[0]}) if is_wanted else reply

    def _choice(self, part: ChoicePart, *, is_chunk: bool = False) -> Choice:
        log_probs = None
        if self.question.wants_log_probs:
            pairs = zip(part.tokens, part.log_probs, strict=True)
            log_probs = ChatLogProbs(content=[self._log_prob(*pair) for pair in pairs], refusal=None)
        if is_chunk:
            said = ReplyMessage(content=part.text) if part.text else ReplyMessage()
            choice = Choice(index=part.index, delta=said, logprobs=log_probs, finish_reason=part.finish_reason)
        else:
            said = ReplyMessage(role="assistant", content=part.text)
            choice = Choice(index=part.index, message=said, logprobs=log_probs, finish_reason=part.finish_reason)
        return self._with_tokens(choice, part)

    def _log_prob(self, token: int, log_prob: float) -> TokenLogProb:
        text = self._tokenizer.decode([token])
        whole = None if REPLACEMENT in text else list(text.encode())
        return TokenLogProb(token=text, logprob=log_prob, bytes=whole, top_logprobs=[])
