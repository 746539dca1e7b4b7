"""Programs by name, and an episode that one of them leads, with a deadline and a checked end.

find the program -> call it with a `Chat` -> wait while it asks -> check its reward
|
address, opened if it runs in another process: leaderless.serving
"""

from __future__ import annotations

import asyncio
import inspect
from collections.abc import Awaitable, Callable, Mapping
from functools import partial
from typing import cast

from typing_extensions import override

from leaderless.base.named_functions import check_options, is_function_name, load_callable, load_own
from leaderless.base.values import Json, is_finite_number
from leaderless.config import RecipeError
from leaderless.config.environment import EnvironmentConfig
from leaderless.config.failures import FailureKind
from leaderless.config.packaged_files import server_refusal
from leaderless.environments.guarded_environment import EnvironmentFailure, call, failure_of
from leaderless.environments.programs.chat import Admission, Chat, ProgramEndpoint
from leaderless.environments.programs.conversations import AskRefusedError
from leaderless.environments.protocol import ONLY_AGENT, EpisodeFailed, Task
from leaderless.environments.user_functions import call_user

SERVER = "leaderless.serving.api.conversations:EpisodeServer"
"""Class of the server behind the address; it is imported where a program in another process asks for one."""


class LazyEndpoint(ProgramEndpoint):
    """Opens when the first program asks for an address, in the event loop of that moment."""

    def __init__(self) -> None:
        self._server: ProgramEndpoint | None = None

    @override
    def admit(self, chat: Chat) -> Admission:
        """Open the server if it is not open yet, and admit a chat.

        Raises:
            RuntimeError: A package is missing.
        """
        if self._server is None:
            if problem := server_refusal():
                raise RuntimeError(f"an address of the policy {problem}")
            self._server = cast("Callable[[], ProgramEndpoint]", load_own(SERVER))()
        return self._server.admit(chat)

    @override
    def dismiss(self, chat: Chat) -> None:
        if self._server is not None:
            self._server.dismiss(chat)

    @override
    async def close(self) -> None:
        if self._server is not None:
            await self._server.close()
            self._server = None


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
        """Play nothing yet; `timeout_s` may pass between two answers of the policy."""
        self._solve, self._name, self._timeout_s = solve, name, timeout_s

    async def make(self) -> None:
        """Check what the program needs, if it has a method `check`.

        Raises:
            EnvironmentFailure: Something is missing.
        """
        check = getattr(self._solve, "check", None)
        if check is not None:
            await call(check, self._timeout_s, f"a check of {self._name}")

    async def play(self, task: Task, chat: Chat) -> Mapping[str, Json]:
        """Play an episode, and return an object with its `reward`.

        A program that ends with an error because the policy has used up a limit of the episode is worth what it has
        posted, or 0: so much has the policy been rewarded so far. It is not if it says itself, by an `EpisodeFailed`
        with a kind, that it cannot be judged.

        Raises:
            EnvironmentFailure: The program failed, took too long, or gave no reward.
        """
        running = asyncio.ensure_future(call_user(self._bound(task, chat), f"program {self._name}"))
        try:
            found = await self._watched(running, chat)
        except Exception as error:
            failure = self._failure_of(error)
            is_said = isinstance(error, EpisodeFailed) and error.kind is not None  # not what a limit has led to
            if chat.overflow is None or not chat.num_answers or failure.kind != "environment" or is_said:
                raise failure from error
            found = {"reward": 0.0 if chat.reward is None else chat.reward}
        finally:
            running.cancel()
            await asyncio.wait({running}, timeout=_LEAVING_S)
            await chat.close()
        result: Mapping[str, Json] = found if isinstance(found, Mapping) else {"reward": cast("Json", found)}
        problem, reward = "", result.get("reward")
        if not is_finite_number(reward):
            problem = f"gave the reward {reward!r:.80}: it must be a finite number"
        elif not chat.num_answers:
            problem = "has not asked the policy anything, so there is nothing to train"
        if problem:
            raise EnvironmentFailure("environment", f"{self._name} {problem}")
        return result

    def _failure_of(self, error: Exception) -> EnvironmentFailure:
        if isinstance(error, EnvironmentFailure):
            return error
        if isinstance(error, AskRefusedError):
            kind: FailureKind = "infrastructure" if error.code == "aborted" else "environment"
            return EnvironmentFailure(kind, f"{self._name}: {error}")
        return failure_of(error, self._name)

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
                    "deadline",
                    f"{self._name} has neither asked anything nor ended for {self._timeout_s:g} s: raise "
                    "environment.act_timeout_s, or give what it waits for a time limit of its own",
                )
            await asyncio.wait({running}, timeout=left_s)
        return running.result()


BUILT_IN: Mapping[str, str] = {
    "command": "leaderless.environments.programs.command:Command",
    "harbor": "leaderless.environments.adapters.harbor_tasks:Harbor",
    "verifiers": "leaderless.environments.adapters.verifiers_tasks:Verifiers",
}
"""Programs that come with the package, each as `module:Class` of a `Solve`, whose arguments are the options."""


def program_maker(config: EnvironmentConfig) -> Callable[[], ProgramEnvironment] | None:
    """A function that makes the program of one episode; None if the recipe names no program but an environment.

    Raises:
        RecipeError: The program cannot be used.
    """
    is_own = config.type not in BUILT_IN
    if is_own and not is_function_name(config.type):
        return None
    found = load_callable(BUILT_IN.get(config.type, config.type), "environment.type", "class or function")
    if is_own and isinstance(found, type):
        return None
    if is_own:
        name = config.type.rpartition(":")[2]
        try:
            inspect.signature(found).bind("task", "chat", **config.options)
        except TypeError as error:
            reason = f"{name}{inspect.signature(found)} must be callable as {name}(task, chat, **options): {error}"
            raise RecipeError.at("environment.type", reason) from error
        solve = cast("Solve", partial(found, **config.options))
    else:
        name = f"the program '{config.type}'"
        check_options(found, config.options, "environment.options")
        solve = cast("Solve", found(**config.options))
    if config.isolation == "process":
        raise RecipeError.at(
            "environment.isolation",
            f"is 'process', but {name} is a program: use type=command, which has a process of its own",
        )
    if not (is_own and is_async(solve)) and (problem := server_refusal()):
        other = f"; or let {name} be `async`, and ask with `await chat.ask(...)`" if is_own else ""
        raise RecipeError.at("environment.type", f"{problem}{other}")
    return partial(ProgramEnvironment, solve, name, config.act_timeout_s)
