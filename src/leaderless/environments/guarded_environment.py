"""An episode's environment as the player calls it: with deadlines, and with errors that name the cause. No torch."""

from __future__ import annotations

import signal
from collections.abc import Awaitable, Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from functools import partial
from random import Random
from socket import gaierror
from typing import TYPE_CHECKING, Any, Protocol, TypeVar, cast
from urllib.error import URLError

from typing_extensions import override

from leaderless.base.values import is_finite_number
from leaderless.config.failures import FailureKind
from leaderless.data.prompts.images import other_than_text
from leaderless.environments.pictures import with_files
from leaderless.environments.protocol import ONLY_AGENT, Environment, EpisodeFailed, Message, Observation, Task, Turn
from leaderless.environments.user_functions import call_user, time_limit
from leaderless.rewards.sandbox.messages import SandboxError

if TYPE_CHECKING:
    from leaderless.environments.tools.calls import Tool
    from leaderless.environments.tools.function_tool import FunctionTool, ToolOwner
    from leaderless.environments.tools.served_tools import EnvironmentTool

Result = TypeVar("Result")
_BROKEN_CONNECTIONS = frozenset(
    {
        ("aiohttp", "ClientConnectionError"),
        ("anthropic", "APIConnectionError"),
        ("httpx", "NetworkError"),
        ("httpx", "RemoteProtocolError"),
        ("httpx2", "NetworkError"),
        ("httpx2", "RemoteProtocolError"),
        ("openai", "APIConnectionError"),
        ("requests", "ConnectionError"),
        ("urllib3", "ProtocolError"),
    }
)
"""Errors of libraries, by package and name, that say that a server cannot be reached and are no `ConnectionError`."""


class EnvironmentFailure(Exception):  # noqa: N818 - the end of an episode, not of the program
    """Why an episode has failed.

    Attributes:
        kind: Kind of the failure.
    """

    def __init__(self, kind: FailureKind, text: str) -> None:
        super().__init__(text)
        self.kind: FailureKind = kind


class GuardedEnvironment(Protocol):
    """One episode's environment."""

    agents: tuple[str, ...]

    async def reset(self, task: Task, seed: str) -> Observation:
        """Begin; `seed` decides all randomness."""

    async def act(self, text: str) -> Turn:
        """Answer what an agent has said."""

    async def bind(self, tool: FunctionTool | EnvironmentTool) -> Tool:
        """A tool of the recipe as one of this episode, with the object whose method it is."""

    async def close(self) -> None:
        """Release everything."""


class ThreadEnvironment(GuardedEnvironment):
    """An environment that is an object of this process; its methods that are not `async` run in threads."""

    def __init__(
        self,
        make: Callable[[], Environment],
        timeout_s: float,
        agents: Sequence[str] = (ONLY_AGENT,),
        *,
        shows_images: bool = False,
    ) -> None:
        """Make nothing yet; the constructor is called in a thread, too, and images in what is shown become files."""
        self._make, self._timeout_s, self.agents = make, timeout_s, tuple(agents)
        self._shows_images = shows_images
        self._environment: Environment | None = None
        self._objects: dict[ToolOwner, object] = {}

    async def make(self) -> Environment:
        """Make the environment, unless it was made before.

        Raises:
            EnvironmentFailure: It cannot be made.
        """
        if self._environment is None:
            self._environment = await call(self._make, self._timeout_s, "the constructor of the environment")
        return self._environment

    @override
    async def reset(self, task: Task, seed: str) -> Observation:
        environment, rng = await self.make(), Random(seed)  # noqa: S311
        what = f"{type(environment).__name__}.reset"
        shown: Observation = await call(partial(environment.reset, task, rng), self._timeout_s, what)
        return await self._with_files(shown, what)

    @override
    async def act(self, text: str) -> Turn:
        environment = await self.make()
        what = f"{type(environment).__name__}.act"
        turn = checked(await call(partial(environment.act, text), self._timeout_s, what), what, self.agents)
        return replace(turn, observation=await self._with_files(turn.observation, what))

    async def _with_files(self, shown: Observation, what: str) -> Observation:
        """Observation of a method with images as files, which a thread makes."""
        if isinstance(shown, str) or not self._shows_images:
            return shown
        return await call(partial(with_files, shown), self._timeout_s, f"an image of {what}")

    @override
    async def bind(self, tool: FunctionTool | EnvironmentTool) -> Tool:
        home = tool.home
        if home is None:
            return tool
        if home.is_environment:
            return tool.of_instance(await self.make())
        if home not in self._objects:
            what = f"the constructor of the tool {home.kind.__name__}"
            self._objects[home] = await call(lambda: home.kind(**home.options), self._timeout_s, what, "tool")
        return tool.of_instance(self._objects[home])

    @override
    async def close(self) -> None:
        """Close all objects. An error says nothing about the episode, which has ended."""
        for held in (*self._objects.values(), self._environment):
            close = getattr(held, "close", None)
            if callable(close) and getattr(type(held), "close", None) is not Environment.close:
                with suppress(EnvironmentFailure):
                    await call(close, self._timeout_s, f"{type(held).__name__}.close")


async def call(
    function: Callable[[], Result | Awaitable[Result]], timeout_s: float, what: str, kind: FailureKind = "environment"
) -> Result:
    """Call a user's function, in a thread unless it is a coroutine function, and wait for its result.

    A thread that takes longer is left behind: it cannot be ended, but does not keep the process alive.

    Raises:
        EnvironmentFailure: It raised an error or took too long.
    """
    try:
        async with time_limit(timeout_s, what) as limit:
            return cast("Result", await call_user(function, what))
    except TimeoutError as error:
        if not limit.expired():  # the user's own
            raise failure_of(error, what, kind) from error
        remedy = "raise environment.act_timeout_s, or give the call a time limit of its own"
        raise EnvironmentFailure("deadline", f"{what} has not answered within {timeout_s:g} s: {remedy}") from error
    except EnvironmentFailure:
        raise
    except Exception as error:
        raise failure_of(error, what, kind) from error


def failure_of(error: Exception, what: str, kind: FailureKind = "environment") -> EnvironmentFailure:
    """The failure of an episode in which a user's function raised an error; `kind` is that of its own errors."""
    if isinstance(error, EpisodeFailed):
        return EnvironmentFailure(error.kind or kind, f"{what} gave up: {error}")
    return EnvironmentFailure(kind_of(error, kind), f"{what} raised {type(error).__name__}: {error}")


def kind_of(error: Exception, kind: FailureKind) -> FailureKind:
    """The kind of an error that a user's function raised: its own, unless it lost a connection or a sandbox."""
    if isinstance(error, SandboxError):
        return "sandbox"
    reason = error.reason if isinstance(error, URLError) else error
    is_broken = isinstance(reason, ConnectionError | gaierror) or any(
        (found.__module__.partition(".")[0], found.__name__) in _BROKEN_CONNECTIONS for found in type(error).__mro__
    )
    return "infrastructure" if is_broken else kind


def kind_of_end(code: int) -> FailureKind:
    """The kind of a failure in which a process has ended by itself, or was killed from outside, as for its memory."""
    return "infrastructure" if code in {-signal.SIGKILL, -signal.SIGTERM, 128 + signal.SIGKILL} else "environment"


def messages_of(observation: Observation, *, sees_images: bool = False) -> list[Message]:
    """An observation as messages, which may have images if the policy sees them; a text is one of the user.

    Raises:
        EnvironmentFailure: It is neither a text nor messages, or a message holds what the policy does not read.
    """
    if isinstance(observation, str):
        return [{"role": "user", "content": observation}]
    messages: list[Any] = list(observation) if isinstance(observation, list | tuple) else [None]
    if not all(isinstance(one, dict) and isinstance(one.get("role"), str) and "content" in one for one in messages):
        raise EnvironmentFailure(
            "environment",
            f"an observation must be a text, or a list of messages with 'role' and 'content', not {observation!r:.80}",
        )
    if medium := next(filter(None, map(partial(other_than_text, has_images=sees_images), messages)), None):
        remedy = "describe it in words"
        if medium == "an image":
            remedy += ", or set environment.images for a model that sees them"
        reads = "text and images" if sees_images else "text"
        raise EnvironmentFailure(
            "environment", f"an observation holds {medium}, but the policy reads only {reads}: {remedy}"
        )
    return messages


def checked(turn: object, what: str, agents: tuple[str, ...]) -> Turn:
    """Answer of an environment, if it is well-formed.

    Raises:
        EnvironmentFailure: It is no `Turn`, a reward is not finite, facts have no names, or an agent is unknown.
    """
    if not isinstance(turn, Turn):
        raise EnvironmentFailure("environment", f"{what} returned {type(turn).__name__}: it must return a Turn")
    info: object = turn.info
    problem, known = "", ", ".join(agents)
    if not isinstance(info, Mapping):
        problem = f"returned the info {info!r:.80}: it must be a dict of facts by name"
    for agent, reward in () if problem else turn.rewards_for(agents[0]).items():
        if not is_finite_number(reward):
            problem = f"returned the reward {reward!r}: it must be a finite number"
        elif agent not in agents:
            problem = f"rewards the agent '{agent}', which is none of {known}"
        if problem:
            break
    if not problem and turn.agent is not None and turn.agent not in agents:
        problem = f"lets the agent '{turn.agent}' act, which is none of {known}"
    if problem:
        raise EnvironmentFailure("environment", f"{what} {problem}")
    return turn
