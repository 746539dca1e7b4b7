"""What is sent back, in the words of OpenAI's API: whole, or piece by piece."""

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
    """What the model says, or a piece of it."""

    role: str | None = None
    content: str | None = None


class Choice(BaseModel):
    """One response, or a piece of it; which fields it has depends on what was asked."""

    index: int
    text: str | None = None
    message: ReplyMessage | None = None
    delta: ReplyMessage | None = None
    logprobs: TextLogProbs | ChatLogProbs | None = None
    finish_reason: str | None
    token_ids: list[int] | None = None
    prompt_token_ids: list[int] | None = None


class Usage(BaseModel):
    """Numbers of tokens; those of a prompt count once, however many responses it has."""

    prompt_tokens: int
    completion_tokens: int
    total_tokens: int


class Reply(BaseModel):
    """What is sent back, or a piece of it."""

    id: str
    object: str
    created: int
    model: str
    choices: list[Choice]
    usage: Usage | None = None
    prompt_token_ids: list[int] | None = None

    def to_json(self) -> str:
        """Without the fields that do not belong to it."""
        return self.model_dump_json(exclude_unset=True)


@dataclass
class Piece:
    """What a response has gained, or all of it.

    Attributes:
        index: Of the choice.
        text: Certain by now.
        tokens: As sampled, the one that ended the response included.
        log_probs: Of each token.
        offsets: Characters of the response before each token.
        finish_reason: Why it has ended; None while it has not.
        is_first: Nothing of the response has been sent before.
    """

    index: int
    text: str = ""
    tokens: list[int] = field(default_factory=list)
    log_probs: list[float] = field(default_factory=list)
    offsets: list[int] = field(default_factory=list)
    finish_reason: str | None = None
    is_first: bool = False

    def extend(self, other: Piece) -> None:
        """Add what came next.

        Args:
            other: Of the same response.
        """
        self.text += other.text
        self.tokens += other.tokens
        self.log_probs += other.log_probs
        self.offsets += other.offsets
        self.finish_reason = other.finish_reason


class Composer(ABC, Generic[AnyQuestion]):
    """Makes the reply to one request of what the engine adds to its responses."""

    kind: ClassVar[str]
    chunk_kind: ClassVar[str]
    prefix: ClassVar[str]

    def __init__(self, question: AnyQuestion, prompts: Sequence[list[int]], tokenizer: Tokenizer) -> None:
        """Begin with nothing.

        Args:
            question: What the client asked.
            prompts: Token ids of each prompt.
            tokenizer: Of the model.
        """
        self.question: AnyQuestion = question
        self.prompts, self._tokenizer = prompts, tokenizer
        self._texts = [TextStream(tokenizer, question.stop_texts) for _ in range(len(prompts) * question.n)]
        self._id, self._created = f"{self.prefix}-{uuid.uuid4().hex}", int(time.time())
        self._begun: set[int] = set()
        self._num_tokens = 0

    def take(self, delta: Delta) -> Piece:
        """What a response has gained.

        Args:
            delta: From the engine; `request` is the place of the prompt.

        Raises:
            ApiError: The engine has given the response up.
        """
        if delta.finish_reason == "aborted":
            raise ApiError(503, "the engine has given up the response: ask again")
        index = delta.request * self.question.n + delta.sibling
        stream, piece = self._texts[index], Piece(index, is_first=index not in self._begun)
        self._begun.add(index)
        self._num_tokens += len(delta.tokens)
        for token, log_prob in zip(delta.tokens, delta.log_probs, strict=True):
            piece.offsets.append(stream.num_characters)
            piece.text += stream.add(token)
            piece.tokens.append(token)
            piece.log_probs.append(log_prob)
        if delta.finish_reason is not None:
            piece.text += stream.finish()
            piece.finish_reason = "stop" if stream.has_stopped else delta.finish_reason
        return piece

    def says_something(self, piece: Piece) -> bool:
        """Whether a piece is worth sending.

        Args:
            piece: What a response has gained.
        """
        has_tokens = bool(piece.tokens) and (self.question.wants_log_probs or self.question.return_token_ids)
        return bool(piece.text) or has_tokens or piece.finish_reason is not None

    def whole(self, pieces: Sequence[Piece]) -> Reply:
        """The reply at once.

        Args:
            pieces: All that has been taken.
        """
        choices = [Piece(index) for index in range(len(self._texts))]
        for piece in pieces:
            choices[piece.index].extend(piece)
        for choice in choices:
            choice.is_first = True
        return self._reply(self.kind, [self._choice(choice) for choice in choices], self.usage())

    def chunk(self, piece: Piece) -> Reply:
        """A part of a streamed reply.

        Args:
            piece: What a response has gained.
        """
        return self._counted(self._reply(self.chunk_kind, [self._choice(piece, is_chunk=True)]))

    def first_chunks(self) -> list[Reply]:
        """What a streamed reply begins with, before any token is there."""
        return []

    def last_chunks(self) -> list[Reply]:
        """What a streamed reply ends with."""
        return [self._reply(self.chunk_kind, [], self.usage())] if self.question.wants_usage else []

    def usage(self) -> Usage:
        """The tokens so far."""
        num_prompt_tokens = sum(map(len, self.prompts))
        return Usage(
            prompt_tokens=num_prompt_tokens,
            completion_tokens=self._num_tokens,
            total_tokens=num_prompt_tokens + self._num_tokens,
        )

    @abstractmethod
    def _choice(self, piece: Piece, *, is_chunk: bool = False) -> Choice:
        """A piece as the endpoint writes it."""

    def _counted(self, chunk: Reply) -> Reply:
        """A chunk that is not the last one; its usage is null where the last one has it."""
        return chunk.model_copy(update={"usage": None}) if self.question.wants_usage else chunk

    def _reply(self, kind: str, choices: list[Choice], usage: Usage | None = None) -> Reply:
        reply = Reply(id=self._id, object=kind, created=self._created, model=self.question.model, choices=choices)
        return reply if usage is None else reply.model_copy(update={"usage": usage})

    def _with_tokens(self, choice: Choice, piece: Piece) -> Choice:
        """With token ids, where they are asked for; those of the prompt once for each response."""
        if not self.question.return_token_ids:
            return choice
        update: dict[str, list[int]] = {"token_ids": piece.tokens}
        if piece.is_first:
            update["prompt_token_ids"] = self.prompts[piece.index // self.question.n]
        return choice.model_copy(update=update)


class CompletionComposer(Composer[CompletionQuestion]):
    """For `/v1/completions`."""

    kind, chunk_kind, prefix = "text_completion", "text_completion", "cmpl"

    def _choice(self, piece: Piece, *, is_chunk: bool = False) -> Choice:  # noqa: ARG002
        log_probs = None
        if self.question.wants_log_probs:
            log_probs = TextLogProbs(
                tokens=[self._tokenizer.decode([token]) for token in piece.tokens],
                token_logprobs=piece.log_probs,
                top_logprobs=None,
                text_offset=piece.offsets,
            )
        choice = Choice(index=piece.index, text=piece.text, logprobs=log_probs, finish_reason=piece.finish_reason)
        return self._with_tokens(choice, piece)


class ChatComposer(Composer[ChatQuestion]):
    """For `/v1/chat/completions`."""

    kind, chunk_kind, prefix = "chat.completion", "chat.completion.chunk", "chatcmpl"

    def whole(self, pieces: Sequence[Piece]) -> Reply:
        """See `Composer`."""
        return self._with_prompt(super().whole(pieces))

    def first_chunks(self) -> list[Reply]:
        """See `Composer`. Who speaks is said first."""
        begin = ReplyMessage(role="assistant", content="")
        choices = [Choice(index=index, delta=begin, finish_reason=None) for index in range(self.question.n)]
        first, *others = [self._counted(self._reply(self.chunk_kind, [choice])) for choice in choices]
        return [self._with_prompt(first), *others]

    def _with_prompt(self, reply: Reply) -> Reply:
        """A chat has one prompt, and vLLM returns its tokens beside the choices."""
        is_wanted = self.question.return_token_ids
        return reply.model_copy(update={"prompt_token_ids": self.prompts[0]}) if is_wanted else reply

    def _choice(self, piece: Piece, *, is_chunk: bool = False) -> Choice:
        log_probs = None
        if self.question.wants_log_probs:
            pairs = zip(piece.tokens, piece.log_probs, strict=True)
            log_probs = ChatLogProbs(content=[self._log_prob(*pair) for pair in pairs], refusal=None)
        if is_chunk:
            said = ReplyMessage(content=piece.text) if piece.text else ReplyMessage()
            choice = Choice(index=piece.index, delta=said, logprobs=log_probs, finish_reason=piece.finish_reason)
        else:
            said = ReplyMessage(role="assistant", content=piece.text)
            choice = Choice(index=piece.index, message=said, logprobs=log_probs, finish_reason=piece.finish_reason)
        return self._with_tokens(choice, piece)

    def _log_prob(self, token: int, log_prob: float) -> TokenLogProb:
        text = self._tokenizer.decode([token])
        whole = None if REPLACEMENT in text else list(text.encode())
        return TokenLogProb(token=text, logprob=log_prob, bytes=whole, top_logprobs=[])
