"""A model as the policy of an episode that is tried out."""

from __future__ import annotations

from collections.abc import Sequence

from typing_extensions import override

from leaderless.data.prompts.images import PromptImage
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.engine_scheduler import SharedEngineScheduler
from leaderless.environments.episode_runner import noise_id
from leaderless.environments.protocol import Message
from leaderless.environments.tools.calls import ToolCalls
from leaderless.environments.tools.formats import Reader
from leaderless.environments.try_episode import Trier
from leaderless.rollout.engine import Request, SamplingParams


class ModelTrier(Trier):
    """A model as the policy; each agent has its own conversation."""

    def __init__(
        self,
        pump: SharedEngineScheduler,
        writer: ChatWriter,
        reader: Reader | None,
        params: SamplingParams,
        max_tokens: int,
    ) -> None:
        """Say nothing yet; without tools there is no reader, and `run` of the engine is in progress."""
        self._pump, self._writer, self._reader = pump, writer, reader
        self._params, self._max_tokens = params, max_tokens
        self._contexts: dict[str, list[int]] = {}
        self._seen: dict[str, list[PromptImage]] = {}
        self._said: dict[str, list[int]] = {}
        self._num_turns = 0

    @override
    async def say(self, agent: str, told: Sequence[Message]) -> ToolCalls | None:
        """Sample an answer; a conversation that has become too long ends the episode."""
        context, seen = self._contexts.setdefault(agent, []), self._seen.setdefault(agent, [])
        if told or not context:
            tokens = self._writer.add(told, self._said[agent]) if context else self._writer.begin(told)[1]
            seen += [image.moved(len(context)) for image in self._writer.images(told, tokens)]
            context += tokens
        room = self._max_tokens - len(context)
        if room < 1:
            return None
        request = Request([*context], [noise_id(0, 0, self._num_turns)], images=tuple(seen))
        completion = await self._pump.ask(request, self._params.limited_to(room))
        self._num_turns += 1
        self._said[agent] = list(completion.tokens)
        context += completion.tokens
        found = self._reader(self._writer.text(completion.tokens, is_plain=False)) if self._reader else None
        return found if found and found.calls else ToolCalls(self._writer.text(completion.tokens))
