"""The tools of one episode: reads calls, runs them at the same time, and answers each."""

from __future__ import annotations

import asyncio
import json
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import replace

from leaderless.base.values import is_finite_number
from leaderless.config import nearest
from leaderless.config.failures import FailureKind
from leaderless.environments.guarded_environment import EnvironmentFailure, failure_of
from leaderless.environments.tools.calls import (
    Call,
    CallResult,
    Refusal,
    Tool,
    ToolTurn,
    WrongArgumentsError,
    typed_arguments,
)
from leaderless.environments.tools.formats import Reader, read_hermes
from leaderless.environments.tools.function_tool import ToolError
from leaderless.environments.user_functions import call_user, time_limit

MAX_NAME = 64
"""Characters of an unknown tool's name that are repeated to the policy."""


class Toolbox:
    """The tools of one episode.

    Args:
        tools: Tools, each with a name of its own.
        reader: Reader of the format in which the policy writes calls, as attribute `parse`.
        max_result_characters: Most characters of a result that the policy gets; the middle of a longer one is left
            out.
        closers: Functions that release what the tools hold; they may be `async`.
        told: Kinds of failures that the policy reads as the result of its call; any other ends the episode.
    """

    def __init__(
        self,
        tools: Iterable[Tool],
        reader: Reader = read_hermes,
        max_result_characters: int = 4000,
        closers: Sequence[Callable[[], object]] = (),
        told: frozenset[FailureKind] = frozenset(),
    ) -> None:
        self.tools, self.parse, self._told = {tool.name: tool for tool in tools}, reader, told
        self._max_result_characters, self._closers = max_result_characters, closers

    async def run(self, calls: Sequence[Call], timeout_s: float) -> list[CallResult]:
        """Answer calls, in their order. They run at the same time, except for calls of one owner.

        Raises:
            EnvironmentFailure: A tool took too long, or has failed in a way that the policy is not told.
        """
        lanes: dict[int, list[int]] = {}
        for place, call in enumerate(calls):
            tool = self.tools.get(call.name)
            owner = tool.owner if tool else None
            lanes.setdefault(place if owner is None else -id(owner), []).append(place)
        results: dict[int, CallResult] = {}

        async def run_lane(places: Sequence[int]) -> None:
            for place in places:
                results[place] = await self._answer(calls[place], timeout_s)

        ends = await asyncio.gather(*map(run_lane, lanes.values()), return_exceptions=True)
        for end in ends:  # the first in the order of the calls, so that the cause does not depend on speed
            if end is not None:
                raise end
        return [results[place] for place in range(len(calls))]

    def has_steps(self, calls: Sequence[Call]) -> bool:
        """Whether a call is a step of the environment."""
        return any(call.name in self.tools and self.tools[call.name].is_step for call in calls)

    async def close(self, timeout_s: float) -> None:
        """Release what the tools hold. An error says nothing about the episode, which is over."""
        for closer in self._closers:
            with suppress(Exception):
                async with time_limit(timeout_s, "closing of tools"):
                    await call_user(closer, "closing of tools")

    async def _answer(self, call: Call, timeout_s: float) -> CallResult:
        begin = time.monotonic()
        try:
            return await self._called(call, timeout_s)
        except EnvironmentFailure as failure:
            if failure.kind not in self._told:
                raise
            refused = self._refusal(call, str(failure), "failed", time.monotonic() - begin)
            return replace(refused, kind=failure.kind)

    async def _called(self, call: Call, timeout_s: float) -> CallResult:
        if call.problem:
            usage = ", ".join(tool.usage for tool in self.tools.values())
            return self._refusal(call, f"The call cannot be read: {call.problem}. Tools: {usage}.", "malformed")
        tool = self.tools.get(call.name)
        if tool is None:
            name = call.name if len(call.name) <= MAX_NAME else f"{call.name[:MAX_NAME]}…"
            return self._refusal(call, f"There is no tool '{name}'{nearest(name, self.tools)}.", "unknown_tool")
        try:
            prepared = tool.prepare(typed_arguments(call, tool.parameters))
        except WrongArgumentsError as error:
            return self._refusal(call, f"{tool.name}: {error}. Use {tool.usage}.", "wrong_arguments")
        except Exception as error:
            raise failure_of(error, f"the schema of tool '{tool.name}'", "tool") from error
        begin = time.monotonic()
        try:
            async with time_limit(None if tool.limits_itself else timeout_s, f"the tool '{tool.name}'"):
                value = await tool.call(prepared)
            if isinstance(value, ToolTurn) and tool.is_step:
                return self._step(call, value, time.monotonic() - begin)
            text = _text_of(value)
        except ToolError as error:
            is_whole, seconds = not tool.limits_itself, time.monotonic() - begin
            return self._refusal(call, str(error), "tool_error", seconds, is_whole=is_whole)
        except EnvironmentFailure:
            raise
        except TimeoutError as error:
            if time.monotonic() - begin < timeout_s:  # the tool's own
                raise failure_of(error, f"the tool '{tool.name}'", "tool") from error
            raise EnvironmentFailure(
                "deadline",
                f"the tool '{tool.name}' took more than {timeout_s:g} s (environment.tool_timeout_s): raise the limit, "
                f"or give the tool a limit of its own that ends in a ToolError",
            ) from error
        except Exception as error:
            raise failure_of(error, f"the tool '{tool.name}'", "tool") from error
        text = text if tool.limits_itself else self._cut(text)
        return CallResult(call.name, call.arguments, text, time.monotonic() - begin)

    def _step(self, call: Call, turn: ToolTurn, seconds: float) -> CallResult:
        """The result of a call that was a step of the environment."""
        if not is_finite_number(turn.reward):
            problem = f"the tool '{call.name}' has the reward {turn.reward!r}: it must be a finite number"
            raise EnvironmentFailure("environment", problem)
        if turn.is_refused:
            refused = self._refusal(call, turn.text, "tool_error", seconds)
            return replace(refused, reward=turn.reward, done=turn.done)
        text = self._cut(turn.text)
        return CallResult(call.name, call.arguments, text, seconds, reward=turn.reward, done=turn.done)

    def _refusal(
        self, call: Call, text: str, refusal: Refusal, seconds: float = 0.0, *, is_whole: bool = True
    ) -> CallResult:
        text = text if text.startswith("Error") else f"Error: {text}"
        return CallResult(call.name, call.arguments, self._cut(text) if is_whole else text, seconds, refusal)

    def _cut(self, text: str) -> str:
        """A text without its middle if it is too long, and without halves of characters, which no tokenizer takes."""
        surplus = len(text) - self._max_result_characters
        if surplus > 0:
            half = self._max_result_characters // 2
            end = len(text) - (self._max_result_characters - half)
            text = f"{text[:half]}\n[... {surplus:,} characters left out ...]\n{text[end:]}"
        return text.encode("utf-8", "replace").decode("utf-8")


def _text_of(value: object) -> str:
    """A result as a text."""
    if isinstance(value, str):
        return value
    try:
        return json.dumps(value, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise TypeError(
            f"returned {type(value).__name__}: {error}; a tool must return str or what JSON can hold"
        ) from error
