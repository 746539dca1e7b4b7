"""The policy as a program of an episode asks it."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from random import Random
from typing import TYPE_CHECKING, NamedTuple, Protocol

from leaderless.base.values import Json
from leaderless.config import RecipeError
from leaderless.environments.episode import Said, Trace
from leaderless.environments.programs.conversations import (
    OUT_OF_TOKENS,
    AskRefusedError,
    Context,
    Lines,
    ProgramConversations,
    call_of,
    checked,
    number_of,
)
from leaderless.environments.protocol import Message
from leaderless.environments.tools.formats import Reader, find_reader

if TYPE_CHECKING:
    from leaderless.environments.chat_writer import ChatWriter
    from leaderless.environments.engine_scheduler import EngineScheduler
    from leaderless.rollout.engine import Completion, SamplingParams


@dataclass(frozen=True)
class ChatAnswer:
    """Answer of the policy.

    Attributes:
        content: Its text, without calls of tools.
        tool_calls: Its calls of tools in the format of OpenAI's API.
        finish_reason: Reason why it ended: `stop`, `length` or `tool_calls`.
        tokens: Token ids as they were sampled, with the end token.
        log_probs: Log-probability of each token.
        prompt_tokens: Token ids of the context.
    """

    content: str
    tool_calls: Sequence[Mapping[str, Json]]
    finish_reason: str
    tokens: Sequence[int]
    log_probs: Sequence[float]
    prompt_tokens: Sequence[int]

    @property
    def message(self) -> Message:
        """The answer as a message, to be put behind those that were asked."""
        message: dict[str, Json] = {"role": "assistant", "content": self.content}
        return message | ({"tool_calls": list(self.tool_calls)} if self.tool_calls else {})


class Admission(NamedTuple):
    """How a program in another process reaches the policy in an episode.

    Attributes:
        base_url: Address of the episode.
        api_key: Key to be sent there.
        shared_url: Address of all episodes of this process, for servers that keep a client for each address.
        model: Name of the model by which a request to the shared address names the episode; it holds the key.
    """

    base_url: str
    api_key: str
    shared_url: str
    model: str


class ProgramEndpoint(Protocol):
    """The address at which programs in other processes reach the policy."""

    def admit(self, chat: Chat) -> Admission:
        """The ways to an episode, which work from now on."""

    def dismiss(self, chat: Chat) -> None:
        """Answer nothing more for an episode."""

    async def close(self) -> None:
        """Stop listening."""


@dataclass(frozen=True)
class Rules:
    """Rules for what a program may ask.

    Attributes:
        number: Unique number of the try of the episode; with the seed and the context it decides what is sampled.
        seed: Seed of the program's random numbers.
        params: Distribution from which the policy samples, and the limits of one answer.
        max_tokens: Most tokens of a conversation, from its beginning.
        max_turns: Most answers.
        tool_format: Format in which the policy writes calls of tools; `auto` for that of the chat template.
        limits: Settings that `max_tokens` is the sum of, for errors.
    """

    number: str
    seed: str
    params: SamplingParams
    max_tokens: int
    max_turns: int
    tool_format: str
    limits: str = "data.max_prompt_tokens + environment.max_episode_tokens"


class Chat:
    """The policy in one episode.

    Attributes:
        rng: Source of random numbers; the same in all episodes of a prompt's group.
        trace: Messages of the episode.
        overflow: The first question that was refused because a limit of the episode was reached; None if none was.
        seconds: Seconds in which the policy was asked.
        reward: Reward that a program has posted; None if it has posted none.
    """

    def __init__(
        self, rules: Rules, writer: ChatWriter, trace: Trace, pump: EngineScheduler, doorway: ProgramEndpoint
    ) -> None:
        self.rules, self.writer, self.rng = rules, writer, Random(rules.seed)  # noqa: S311 - no secret
        self.trace, self._pump, self._doorway = trace, pump, doorway
        self._conversations = ProgramConversations(trace, writer)
        self._lines = Lines(rules.number, pump)
        self._asked: dict[tuple[int, ...], int] = {}
        self._readers: dict[str, Reader] = {}
        self._images: set[str] = set()
        self._num_turns = 0
        self._admission: Admission | None = None
        self._under_way: set[asyncio.Task[ChatAnswer]] = set()
        self._is_closed = False
        self._last_s = time.monotonic()
        self.overflow: AskRefusedError | None = None
        self.seconds = 0.0
        self.reward: Json = None

    @property
    def base_url(self) -> str:
        """Address at which programs reach the policy in the format of OpenAI's API."""
        return self.admission.base_url

    @property
    def api_key(self) -> str:
        """Key that they have to send there."""
        return self.admission.api_key

    @property
    def admission(self) -> Admission:
        """How programs in other processes reach the policy."""
        if self._admission is None:
            self._admission = self._doorway.admit(self)
        return self._admission

    @property
    def num_answers(self) -> int:
        """Number of answers of the policy so far."""
        return sum(node.said is not None for node in self.trace.nodes)

    @property
    def idle_s(self) -> float:
        """Seconds since the policy has last answered; 0 while it is asked."""
        return 0.0 if self._under_way else time.monotonic() - self._last_s

    async def ask(
        self,
        messages: str | Sequence[Message],
        *,
        tools: Sequence[Json] = (),
        max_tokens: int | None = None,
        stop: Sequence[str] = (),
        template: Mapping[str, Json] | None = None,
    ) -> ChatAnswer:
        """Let the policy answer messages.

        Messages that were asked before, and its answers to them, are continued; several questions may be asked at once.

        Args:
            messages: The conversation so far, or the text of its first message.
            tools: Schemas of the tools that it may call, in the format of OpenAI's API.
            max_tokens: Most tokens of the answer; the recipe's limits hold as well.
            stop: Further texts that end the answer.
            template: Further arguments of the chat template.

        Raises:
            AskRefusedError: The messages cannot be written, or a limit of the episode is reached.
        """
        self._check_open()
        said = [{"role": "user", "content": messages}] if isinstance(messages, str) else messages
        sees_images = self.writer.reader is not None
        messages = [checked(message, sees_images=sees_images, known=self._images) for message in said]
        if not messages or messages[-1]["role"] == "assistant":
            raise AskRefusedError("messages must end with a message of another role than 'assistant'")
        key, form, writer = json.dumps(tools, sort_keys=True), self.rules.tool_format, self.writer
        try:
            if tools and key not in self._readers:  # it takes some renderings of the chat template
                self._readers[key] = find_reader(form, writer.tokenizer, tools, is_chat=writer.is_chat)
            context = self._conversations.of_messages(messages, tools, template or {})
        except RecipeError as error:
            raise AskRefusedError(str(error)) from error
        return await self._guarded(context, max_tokens, tuple(stop), self._readers.get(key), tools)

    async def complete(
        self, prompt: str | Sequence[int], *, max_tokens: int | None = None, stop: Sequence[str] = ()
    ) -> ChatAnswer:
        """Let the policy continue a text or token ids; see `ask`."""
        self._check_open()
        if not prompt:
            raise AskRefusedError("prompt is empty: give at least one token")
        count = len(self.writer.tokenizer)
        unknown = () if isinstance(prompt, str) else [token for token in prompt if not 0 <= token < count]
        if unknown:  # it has no embedding, on which the engine would fail
            raise AskRefusedError(f"prompt has token {unknown[0]}, but the model knows {count} tokens")
        context = self._conversations.of_prompt(prompt)
        if not context.tokens:
            raise AskRefusedError("prompt has no tokens: give a text that the tokenizer does not leave out")
        return await self._guarded(context, max_tokens, tuple(stop), None)

    def _check_open(self) -> None:
        """Refuse questions after the end of the episode, whose trace is complete."""
        if self._is_closed:
            raise AskRefusedError("the episode is over: wait for all answers before it ends")

    async def close(self) -> None:
        """Cancel what is asked, and answer nothing more."""
        self._is_closed = True
        if self._admission is not None:
            self._doorway.dismiss(self)
        tasks = list(self._under_way)
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        self._lines.close()

    async def _guarded(
        self,
        context: Context,
        max_tokens: int | None,
        stop: tuple[str, ...],
        reader: Reader | None,
        tools: Sequence[Json] = (),
    ) -> ChatAnswer:
        """Ask in a task, which is canceled with the episode."""
        begin = time.monotonic()
        task = asyncio.ensure_future(self._answer(context, self._params(context, max_tokens, stop), reader, tools))
        self._under_way.add(task)
        try:
            return await task
        finally:
            task.cancel()
            self._under_way.discard(task)
            self._last_s = time.monotonic()
            self.seconds += self._last_s - begin

    def _params(self, context: Context, max_tokens: int | None, stop: tuple[str, ...]) -> SamplingParams:
        rules, length = self.rules, len(context.tokens)
        if self._num_turns >= rules.max_turns:
            raise self._over(
                f"the policy has answered {self._num_turns} times, and may do so {rules.max_turns} times in an episode "
                "(environment.max_turns): raise it, or ask less",
                "max_turns",
            )
        room = rules.max_tokens - length
        if room < 1:
            raise self._over(
                f"the conversation has {length} tokens, and may have {rules.max_tokens} ({rules.limits}): raise them, "
                "or ask with less",
                OUT_OF_TOKENS,
            )
        self._num_turns += 1
        limited = rules.params.limited_to(min(room, max_tokens or room))
        return replace(limited, stop=(*limited.stop, *(text for text in stop if text not in limited.stop)))

    def _over(self, text: str, code: str) -> AskRefusedError:
        refusal = AskRefusedError(text, code)
        self.overflow = self.overflow or refusal
        return refusal

    async def _answer(
        self, context: Context, params: SamplingParams, reader: Reader | None, tools: Sequence[Json]
    ) -> ChatAnswer:
        from leaderless.rollout.engine import Request  # it imports torch, which plans do without

        key = tuple(context.tokens)
        again = self._asked[key] = self._asked.get(key, -1) + 1
        # It depends on the context, and not on the order of questions asked at once.
        noise = number_of(f"{self.rules.number}/{again}/{','.join(map(str, key))}")
        line, num_known = self._lines.take(context.end)
        try:
            request = Request(context.tokens, [noise], conversation=line, images=context.end.seen())
            completion = await self._pump.ask(request, params, num_known)
        except RecipeError as error:
            raise AskRefusedError(str(error)) from error
        if completion.finish_reason == "aborted":
            raise AskRefusedError("the engine has given up the answer: ask again", "aborted")
        answer = self._written(completion, context.tokens, reader, params.stop, tools)
        facts = Said(
            completion.log_probs,
            completion.policy_versions,
            self.num_answers,
            is_truncated=completion.is_truncated,
            temperature=params.distribution.temperature,
            experts=completion.experts,
            support=completion.support,
        )
        said = self._conversations.answer(context, completion.tokens, checked(answer.message), facts)
        self._lines.free(line, said)
        return answer

    def _written(
        self,
        completion: Completion,
        prompt: Sequence[int],
        reader: Reader | None,
        stop: Sequence[str],
        tools: Sequence[Json],
    ) -> ChatAnswer:
        """An answer as the program is given it."""
        content = _before(self.writer.text(completion.tokens), stop)
        calls: list[Mapping[str, Json]] = []
        if reader is not None:
            read = reader(self.writer.text(completion.tokens, is_plain=False))
            # What cannot be read is no call in OpenAI's API; the program sees the text, and says what is wrong with it.
            if read.calls and not any(call.problem for call in read.calls):
                content = read.content
                first = number_of(",".join(map(str, (*prompt, *completion.tokens))))
                numbered = enumerate(read.calls, first)
                calls = [call_of(f"call_{number:x}", call, tools) for number, call in numbered]
        reason: str = completion.finish_reason or "stop"
        if calls and reason == "stop":
            reason = "tool_calls"
        return ChatAnswer(content, calls, reason, completion.tokens, completion.log_probs, prompt)


def _before(text: str, stop: Sequence[str]) -> str:
    """A text without the stop text that has ended it."""
    found = [place for place in map(text.find, stop) if place >= 0]
    return text[: min(found)] if found else text
