"""Environments of OpenEnv, served by the package itself: `python -m tests.fakes.openenv_served NAME PORT SESSIONS`."""

from __future__ import annotations

import os
import random
import sys
import time
from typing import Any

import uvicorn
from fastmcp import FastMCP
from openenv.core.env_server import Action, Environment, Observation, State, create_fastapi_app
from openenv.core.env_server.mcp_environment import MCPEnvironment
from openenv.core.env_server.mcp_types import CallToolAction, CallToolObservation


class Guess(Action):
    text: str


class Move(Action):
    column: int
    is_sure: bool = False


class Hint(Observation):
    hint: str


class Board(Observation):
    board: list[int]
    legal: list[int]


class Guessing(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        super().__init__()
        self._state = State()

    def reset(self, seed: int | None = None, episode_id: str | None = None, high: int = 8, **kwargs: Any) -> Hint:
        self._number, self._state = random.Random(seed).randint(1, high), State(episode_id=episode_id)
        return Hint(hint=f"1 to {high}")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._state.step_count += 1
        if action.text == "boom":
            raise ValueError("boom")
        if action.text == "sleep":
            time.sleep(60)
        if action.text == "die":
            os._exit(1)
        said = int(action.text)
        hint = "right" if said == self._number else "higher" if said < self._number else "lower"
        return Hint(hint=hint, reward=float(said == self._number), done=said == self._number)

    @property
    def state(self) -> State:
        return self._state


class Moving(Environment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Board:
        return Board(board=[0, 0, 0], legal=[0, 1, 2])

    def step(self, action: Move, timeout_s: float | None = None, **kwargs: Any) -> Board:
        return Board(board=[0, 0, action.column], legal=[], reward=float(action.column), done=True)

    @property
    def state(self) -> State:
        return State()


class Adding(MCPEnvironment):
    SUPPORTS_CONCURRENT_SESSIONS = True

    def __init__(self) -> None:
        server, self._count = FastMCP("adding"), 0

        @server.tool
        def add(a: int, b: int) -> int:
            """Add two numbers."""
            if a == 13:
                raise ValueError("unlucky")
            self._count += 1
            return a + b

        super().__init__(server)

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Observation:
        self._count = 0
        return Observation(metadata={"question": "Add twice."})

    async def step_async(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        found = await super().step_async(action, timeout_s, **kwargs)
        if isinstance(found, CallToolObservation):
            found.reward, found.done = 0.5, self._count >= 2
        return found

    def _step_impl(self, action: Action, timeout_s: float | None = None, **kwargs: Any) -> Observation:
        return Observation(done=True)

    @property
    def state(self) -> State:
        return State(step_count=self._count)


class Letters(Environment):
    """Rewards the share of a letter in the first of two messages, and in the second one."""

    SUPPORTS_CONCURRENT_SESSIONS = True

    def reset(self, seed: int | None = None, episode_id: str | None = None, **kwargs: Any) -> Hint:
        self._count = 0
        return Hint(hint="say a:")

    def step(self, action: Guess, timeout_s: float | None = None, **kwargs: Any) -> Hint:
        self._count += 1
        share = action.text.count("a") / max(1, len(action.text))
        return Hint(hint=f"{share:.1f} again:", reward=share, done=self._count == 2)

    @property
    def state(self) -> State:
        return State(step_count=self._count)


KINDS: dict[str, Any] = {
    "guess": (Guessing, Guess, Hint),
    "letters": (Letters, Guess, Hint),
    "moves": (Moving, Move, Board),
    "tools": (Adding, CallToolAction, CallToolObservation),
}

if __name__ == "__main__":
    name, port, sessions = sys.argv[1:]
    app = create_fastapi_app(*KINDS[name], max_concurrent_envs=int(sessions))
    uvicorn.run(app, host="127.0.0.1", port=int(port), log_level="error")
