"""An engine for many conversations at once: it is stepped whenever one of them waits for it."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from typing_extensions import override

from leaderless.config import RecipeError
from leaderless.observability.clock import Clock
from leaderless.rollout.engine import Completion, Request, RolloutEngine, SamplingParams

BEAT_S = 1.0
"""Seconds between signs of life while no conversation waits for the engine."""


class EngineScheduler(Protocol):
    """Sampler of the policy's answers."""

    async def ask(self, request: Request, params: SamplingParams, known_tokens: int = 0) -> Completion:
        """Sample one response. If the caller is canceled, it is aborted.

        Args:
            request: Prompt with one sample id.
            params: Distribution and limits.
            known_tokens: Tokens at the beginning of the prompt that were read or sampled before in the conversation.

        Raises:
            RecipeError: The engine refuses the prompt, as one with tokens that stand for images which are not there.
        """

    def forget(self, conversation: int) -> None:
        """Release what is kept of a conversation."""


@dataclass
class _Asked:
    completion: Completion
    answer: asyncio.Future[Completion]
    known_tokens: int


class SharedEngineScheduler(EngineScheduler):
    """Steps an engine in the event loop of those that ask it, so that neither needs a thread.

    Attributes:
        busy_s: Seconds that the engine has worked.
        known_tokens: Tokens of prompts that the engine had read or sampled before, in the same conversation.
        cached_tokens: Those of them whose keys and values it still had; it may have more of other conversations.
        num_drafted: Tokens that it has drafted, of responses that have ended.
        num_accepted: Those of them that the model has accepted.
    """

    def __init__(
        self, engine: RolloutEngine, beat: Callable[[], None] = lambda: None, clock: Clock | None = None
    ) -> None:
        """Drive an engine that is awake and has weights; `beat` is called as a sign of life."""
        self._engine, self._beat, self._clock = engine, beat, clock or Clock()
        self._asked: dict[int, _Asked] = {}
        self._has_work = asyncio.Event()
        self.busy_s = 0.0
        self.known_tokens = self.cached_tokens = self.num_drafted = self.num_accepted = 0

    @override
    async def ask(self, request: Request, params: SamplingParams, known_tokens: int = 0) -> Completion:
        try:
            number = self._engine.submit(request, params)
        except ValueError as error:
            raise RecipeError.at("", f"the policy cannot be asked: {error}") from error
        self.known_tokens += known_tokens
        answer: asyncio.Future[Completion] = asyncio.get_running_loop().create_future()
        self._asked[number] = _Asked(Completion(), answer, known_tokens)
        self._has_work.set()
        try:
            return await answer
        except asyncio.CancelledError:
            if self._asked.pop(number, None) is not None:
                self._engine.abort(number)
            raise

    @override
    def forget(self, conversation: int) -> None:
        self._engine.forget(conversation)

    async def run(self) -> None:
        """Step the engine until canceled.

        Raises:
            Exception: The engine has failed; everyone who waits gets the error, too.
        """
        while True:
            if not self._asked:
                self._has_work.clear()
                try:
                    # `asyncio.wait_for` may lose a cancellation that comes at the same time as the work.
                    async with asyncio.timeout(BEAT_S):
                        await self._has_work.wait()
                except TimeoutError:
                    self._beat()
                continue
            self._step()
            self._beat()
            await asyncio.sleep(0)

    def _step(self) -> None:
        begin = time.perf_counter()
        with self._clock.doing("generate"):
            deltas = self._engine.step()
        self.busy_s += time.perf_counter() - begin
        for delta in deltas:
            asked = self._asked.get(delta.request)
            if asked is None:
                continue  # aborted
            self.cached_tokens += min(delta.cached_tokens, asked.known_tokens)
            self.num_drafted += delta.num_drafted
            self.num_accepted += delta.num_accepted
            asked.completion.add(delta)
            if delta.finish_reason is not None:
                del self._asked[delta.request]
                if not asked.answer.done():
                    asked.answer.set_result(asked.completion)
