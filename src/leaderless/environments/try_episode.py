"""Plays one episode, by a person, at random or by a model, and shows what happens. Imports no torch."""

from __future__ import annotations

import math
import os
import string
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Protocol

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config.environment import EnvironmentConfig
from leaderless.environments.guarded_environment import GuardedEnvironment, messages_of
from leaderless.environments.protocol import Message, Task
from leaderless.environments.tools.calls import Call, CallResult, Tool, ToolCalls, read_call, result_messages
from leaderless.environments.tools.toolbox import Toolbox
from leaderless.environments.user_functions import call_user

MAX_WORDS = 5
_LETTERS = string.ascii_letters + string.digits + string.punctuation


class Trier(Protocol):
    """A policy."""

    async def say(self, agent: str, told: Sequence[Message]) -> ToolCalls | None:
        """Answer of an agent to the messages since it spoke last; None to end the episode."""


class Audience(Protocol):
    """Whoever watches."""

    def told(self, agent: str, messages: Sequence[Message]) -> None:
        """An agent gets messages."""

    def said(self, agent: str, said: ToolCalls) -> None:
        """An agent has said something."""

    def answered(self, result: CallResult) -> None:
        """A tool has answered."""

    def rewarded(self, rewards: Mapping[str, float]) -> None:
        """Agents are rewarded."""


@dataclass
class TriedEpisode:
    """How an episode went.

    Attributes:
        end: Reason why it is over: `done`, `max_turns` or `left`.
        num_turns: Number of messages of the policy.
        rewards: Sum of the rewards of each agent.
    """

    end: str
    num_turns: int
    rewards: dict[str, float]


async def try_episode(
    config: EnvironmentConfig,
    world: GuardedEnvironment,
    toolbox: Toolbox,
    task: Task,
    seed: str,
    trier: Trier,
    audience: Audience,
) -> TriedEpisode:
    """Play an episode in an environment, which is closed afterwards by the caller.

    Raises:
        EnvironmentFailure: The environment or a tool has failed.
    """
    agent, rewards = world.agents[0], dict.fromkeys(world.agents, 0.0)
    waiting: dict[str, list[Message]] = {agent: messages_of(await world.reset(task, seed), sees_images=config.images)}
    for turn in range(config.max_turns):
        told = waiting.pop(agent, [])
        audience.told(agent, told)
        said = await trier.say(agent, told)
        if said is None:
            return TriedEpisode("left", turn, rewards)
        audience.said(agent, said)
        if said.calls:
            results = await toolbox.run(said.calls, config.tool_timeout_s)
            for result in results:
                audience.answered(result)
            waiting[agent] = result_messages(results)
            continue
        answer = await world.act(said.content)
        given = answer.rewards_for(agent)
        for name, value in given.items():
            rewards[name] += value
        audience.rewarded(given)
        if answer.done:
            return TriedEpisode("done", turn + 1, rewards)
        agent = answer.next_after(agent)
        waiting.setdefault(agent, []).extend(messages_of(answer.observation, sees_images=config.images))
    return TriedEpisode("max_turns", config.max_turns, rewards)


class HumanPlayer(Trier):
    """A policy that types lines; `/name {"argument": 1}` calls a tool."""

    def __init__(self, file: int, ask: Callable[[str], None]) -> None:
        """Read nothing yet; `ask` shows whose turn it is."""
        self._file, self._ask, self._buffer = file, ask, b""

    @override
    async def say(self, agent: str, told: Sequence[Message]) -> ToolCalls | None:
        """Read a line; the end of the input ends the episode."""
        self._ask(agent)
        line = await call_user(self._line, "keyboard")
        return None if line is None else typed(str(line))

    def _line(self) -> str | None:
        """The next line; unlike `input`, a thread that waits in it does not disturb the end of the process."""
        while b"\n" not in self._buffer:
            found = os.read(self._file, 4096)
            if not found:
                rest, self._buffer = self._buffer, b""
                return rest.decode("utf-8", "replace") or None
            self._buffer += found
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line.decode("utf-8", "replace")


def typed(line: str) -> ToolCalls:
    """Message that a person has typed."""
    if not line.startswith("/"):
        return ToolCalls(line)
    name, _, text = line[1:].strip().partition(" ")
    return ToolCalls("", [read_call({"name": name, "arguments": text or "{}"})])


class Chance(Trier):
    """A policy that says random words, or calls tools with random arguments."""

    def __init__(self, tools: Sequence[Tool], rng: Random) -> None:
        self._tools, self._rng = tools, rng

    @override
    async def say(self, agent: str, told: Sequence[Message]) -> ToolCalls | None:
        rng = self._rng
        if self._tools and rng.random() < 0.5:
            tool = rng.choice(self._tools)
            arguments = random_value(tool.parameters, tool.parameters.get("$defs", {}), rng)
            assert isinstance(arguments, Mapping)
            return ToolCalls("", [Call(tool.name, arguments)])
        return ToolCalls(" ".join(random_word(rng) for _ in range(rng.randint(1, MAX_WORDS))))


def random_word(rng: Random) -> str:
    """A few printable characters; often a number, which many environments ask for."""
    return str(rng.randint(0, 9)) if rng.random() < 0.3 else "".join(rng.choices(_LETTERS, k=rng.randint(1, 8)))


def random_value(schema: Json, definitions: Json, rng: Random) -> Json:
    """A value that fits a JSON schema, in its types, choices and bounds."""
    if not isinstance(schema, Mapping):
        return random_word(rng)
    if isinstance(reference := schema.get("$ref"), str) and isinstance(definitions, Mapping):
        return random_value(definitions.get(reference.rpartition("/")[2]), definitions, rng)
    if "const" in schema:
        return schema["const"]
    for key in ("enum", "anyOf", "oneOf"):
        if isinstance(choices := schema.get(key), Sequence) and choices:
            chosen = rng.choice(choices)
            return chosen if key == "enum" else random_value(chosen, definitions, rng)
    return _of_type(schema, definitions, rng)


def _of_type(schema: Mapping[str, Json], definitions: Json, rng: Random) -> Json:
    match schema.get("type"):
        case "integer" | "number" as kind:
            low, high = _bounds(schema)
            if kind == "number":
                return rng.uniform(low, high)
            first = math.floor(low) + 1 if "exclusiveMinimum" in schema else math.ceil(low)
            last = math.ceil(high) - 1 if "exclusiveMaximum" in schema else math.floor(high)
            return rng.randint(first, max(first, last))
        case "boolean":
            return rng.random() < 0.5
        case "null":
            return None
        case "array":
            return [random_value(schema.get("items"), definitions, rng) for _ in range(rng.randint(0, 2))]
        case "object":
            properties, required = schema.get("properties"), schema.get("required", ())
            assert isinstance(required, Sequence)
            known = properties.items() if isinstance(properties, Mapping) else ()
            chosen = (pair for pair in known if pair[0] in required or rng.random() < 0.5)
            return {name: random_value(inner, definitions, rng) for name, inner in chosen}
        case _:
            return random_word(rng)


def _bounds(schema: Mapping[str, Json]) -> tuple[float, float]:
    """The least and the largest value of a number; from -10 to 10, or 10 from the one that is given, by default."""
    low = schema.get("minimum", schema.get("exclusiveMinimum"))
    high = schema.get("maximum", schema.get("exclusiveMaximum"))
    if not isinstance(low, int | float):
        low = -10 if not isinstance(high, int | float) else min(-10, high - 10)
    if not isinstance(high, int | float):
        high = max(10, low + 10)
    return low, high
