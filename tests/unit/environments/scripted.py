"""An engine that says what a script says, and environments, for tests of episodes."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping, Sequence
from random import Random

import numpy as np

from leaderless.config.environment import EnvironmentConfig
from leaderless.config.rollout import SamplingConfig
from leaderless.distributed.weights.stream import WeightStream
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.engine_scheduler import SharedEngineScheduler
from leaderless.environments.episode import Episode, EpisodePosition
from leaderless.environments.guarded_environment import ThreadEnvironment
from leaderless.environments.player import play_all
from leaderless.environments.protocol import ONLY_AGENT, Environment, Observation, Task, Turn
from leaderless.rollout.engine import Delta, Request, SamplingParams

Script = Callable[[Request], Sequence[int]]
"""Function that decides which tokens answer a request."""


def could_be(token: int) -> bytes:
    """What the engine could have said in place of a token, as bytes of int32; empty for anything."""
    return np.arange(token, token + token % 4, dtype=np.int32).tobytes()


class ScriptedEngine:
    """See `RolloutEngine`. It needs a step for each token, and records what it is asked."""

    policy_version: int | None = 3

    def __init__(self, script: Script) -> None:
        self.script = script
        self.requests: list[Request] = []
        self.forgotten: list[int] = []
        self.aborted: list[int] = []
        self._left: dict[int, list[int]] = {}
        self._params: dict[int, SamplingParams] = {}

    def wake(self, reload: Callable[[], None]) -> None: ...
    def load_weights(self, weights: WeightStream, *, keep_cache: bool = True) -> None: ...
    def sleep(self, *, keep_weights: bool) -> None: ...
    def close(self) -> None: ...

    def submit(self, request: Request, params: SamplingParams) -> int:
        self.requests.append(request)
        number = len(self.requests)
        self._left[number], self._params[number] = list(self.script(request)), params
        return number

    def step(self) -> list[Delta]:
        deltas: list[Delta] = []
        for number, tokens in list(self._left.items()):
            token, limit = tokens.pop(0), self._params[number].max_tokens
            self._params[number] = self._params[number].limited_to(limit - 1)
            reason = "stop" if not tokens else "length" if limit == 1 else None
            if reason:
                del self._left[number]
            deltas.append(Delta(number, 0, (token,), (-0.5,), reason, 3, support=[could_be(token)]))
        return deltas

    def abort(self, request: int) -> None:
        self.aborted.append(request)
        self._left.pop(request, None)

    def forget(self, conversation: int) -> None:
        self.forgotten.append(conversation)


class Count(Environment):
    """The policy is to say the number of its turn; it is rewarded for each right one, and 3 turns are enough."""

    def __init__(self, delay_s: float = 0.0) -> None:
        self.delay_s = delay_s

    def reset(self, task: Task, rng: Random) -> Observation:
        self.turn, self.noise = 0, rng.random()
        return f"{task['text']}:"

    def act(self, text: str) -> Turn:
        time.sleep(self.delay_s * self.noise)
        self.turn += 1
        return Turn(f"<{self.turn}>", reward=float(text.strip() == str(self.turn)), done=self.turn == 3)


class AsyncCount(Count):
    """The same, with coroutines."""

    async def reset(self, task: Task, rng: Random) -> Observation:  # type: ignore[override]
        await asyncio.sleep(0)
        return super().reset(task, rng)

    async def act(self, text: str) -> Turn:  # type: ignore[override]
        await asyncio.sleep(self.delay_s)
        return super().act(text)


def play(
    engine: ScriptedEngine,
    make: Callable[[], Environment],
    writer: ChatWriter,
    tasks: Sequence[Mapping[str, str]] = ({"text": "a"},),
    max_tokens: int = 100,
    **settings: object,
) -> tuple[list[Episode], SharedEngineScheduler]:
    """Play an episode of each task."""
    config = EnvironmentConfig.model_validate({"type": "x:Y", **settings})
    params = SamplingParams(SamplingConfig(), 8, (), 5)
    places = [EpisodePosition(100 + n, f"5/{n}", task, writer, params) for n, task in enumerate(tasks)]

    def open_world() -> ThreadEnvironment:
        return ThreadEnvironment(make, config.act_timeout_s, getattr(make, "agents", (ONLY_AGENT,)))

    return play_all(engine, config, open_world, places, max_tokens, lambda _: None)
