"""An episode that a program leads, with a deadline and a checked end."""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from typing import cast

from leaderless.base.values import Json, is_finite_number
from leaderless.environments.guarded_environment import ENVIRONMENT, OVERFLOW, TIMEOUT, EnvironmentFailure, failure_of
from leaderless.environments.programs.chat import Chat
from leaderless.environments.programs.messages import AskRefusedError
from leaderless.environments.protocol import ONLY_AGENT, Task
from leaderless.environments.user_threads import call_user

Solve = Callable[[Task, Chat], Awaitable[object] | object]
"""Function that a user writes: it plays the episode of a task, and returns its reward, or an object with `reward`."""

_LEAVING_S = 5.0
"""Seconds that a canceled program has to clean up."""


def is_async(solve: Solve) -> bool:
    """Whether a program is a coroutine function, or an object that is called like one."""
    return inspect.iscoroutinefunction(solve) or inspect.iscoroutinefunction(getattr(solve, "__call__", None))  # noqa: B004


class ProgramEnvironment:
    """One episode that a program leads.

    Attributes:
        agents: Names of the agents, of which there is one.
    """

    agents = (ONLY_AGENT,)

    def __init__(self, solve: Solve, name: str, timeout_s: float) -> None:
        """Play nothing yet.

        Args:
            solve: The program.
            name: Its name, for errors.
            timeout_s: Seconds that it may take between two answers of the policy.
        """
        self._solve, self._name, self._timeout_s = solve, name, timeout_s

    async def play(self, task: Task, chat: Chat) -> Mapping[str, Json]:
        """Play an episode, and return an object with its `reward`.

        Raises:
            Failure: The program failed, took too long, or gave no reward.
        """
        running = asyncio.ensure_future(call_user(self._bound(task, chat), f"program {self._name}"))
        try:
            found = await self._watched(running, chat)
        except EnvironmentFailure:
            raise
        except AskRefusedError as error:
            raise EnvironmentFailure(
                OVERFLOW if error is chat.overflow else ENVIRONMENT, f"{self._name}: {error}"
            ) from error
        except Exception as error:
            raise failure_of(error, self._name) from error
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=_LEAVING_S)
            await chat.close()
        return self._checked(found, chat)

    async def close(self) -> None:
        """Release nothing: the program has ended."""

    def _bound(self, task: Task, chat: Chat) -> Callable[[], object]:
        """The program as a function without arguments."""
        if not is_async(self._solve):
            _ = chat.base_url  # it will run in a thread, from where nothing can be opened
            return lambda: self._solve(task, chat)

        async def solve() -> object:
            return await cast("Awaitable[object]", self._solve(task, chat))

        return solve

    async def _watched(self, running: asyncio.Future[object], chat: Chat) -> object:
        """Wait for the program, as long as it asks something or takes not too long."""
        while not running.done():
            left_s = self._timeout_s - chat.idle_s
            if left_s <= 0:
                raise EnvironmentFailure(
                    TIMEOUT,
                    f"{self._name} has neither asked anything nor ended for {self._timeout_s:g} s: raise "
                    "environment.act_timeout_s, or give what it waits for a time limit of its own",
                )
            await asyncio.wait({running}, timeout=left_s)
        return running.result()

    def _checked(self, found: object, chat: Chat) -> Mapping[str, Json]:
        result: Mapping[str, Json] = found if isinstance(found, Mapping) else {"reward": cast("Json", found)}
        reward = result.get("reward")
        if not is_finite_number(reward):
            raise EnvironmentFailure(
                ENVIRONMENT, f"{self._name} gave the reward {reward!r:.80}: it must be a finite number"
            )
        if not chat.num_answers:
            raise EnvironmentFailure(
                ENVIRONMENT, f"{self._name} has not asked the policy anything, so there is nothing to train"
            )
        return result
