"""Environments of OpenEnv by the addresses of their servers. Imports no torch."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from random import Random

from typing_extensions import override

from leaderless.base.values import Json
from leaderless.config import RecipeError, nearest
from leaderless.environments.adapters.openenv_client import OpenEnvServer, OpenEnvSession
from leaderless.environments.protocol import EpisodeFailed, Observation, Task, Turn
from leaderless.environments.tools.calls import ToolTurn, usage_of
from leaderless.environments.tools.served_tools import ServedEnvironment, ToolFacts, schema_problems
from leaderless.rewards.judges.verdicts import objects_in

AS_JSON = "json"
"""Value of the option `action` for actions that the policy writes as JSON objects."""
_FACTS = frozenset({"done", "reward", "metadata"})
"""Fields that all observations have, which are no part of what is observed."""
_REFUSED = frozenset({"execution_error", "invalid_args", "tool_not_found"})
"""Errors of tools that the policy is told, as those of other servers' tools."""


class OpenEnv(ServedEnvironment):
    """An environment that a server of OpenEnv runs, with a session of its own for each episode.

    A message of the policy is an action: the text itself for one with a single text, else the last JSON object in it.
    An action that the server's schema refuses is answered with what is wrong, and the world stands still. If the
    server's actions are calls of tools, the policy is offered the tools, each call is a step, and a message without
    calls ends the episode.
    """

    def __init__(
        self,
        url: str,
        *,
        action: str | None = None,
        observation: str | Sequence[str] | None = None,
        instructions: str | None = None,
        reset: Mapping[str, Json] | None = None,
        state: bool = False,
        token_variable: str | None = None,
        wait_s: float = 30.0,
    ) -> None:
        """Ask the server for its schemas.

        Args:
            url: Address of the server, such as `http://127.0.0.1:8000`.
            action: Field of actions that gets the policy's message, or `json` for actions that the policy writes as
                JSON objects; by default the only field that an action must have if it is a text, else `json`.
            observation: Field of observations that the policy is shown, or several, which are shown as JSON; by default
                the text of an observation that is nothing else, else all of it.
            instructions: Text before the first observation; by default a description of the actions if they are JSON.
            reset: Further arguments of each reset, before those in the task's column `reset`.
            state: Whether an episode's record gets the state in which the server has ended it.
            token_variable: Environment variable whose value is sent as a bearer token.
            wait_s: Seconds that an episode waits for a session if the server has no free one.

        Raises:
            RecipeError: The server is no OpenEnv server of this version, or has no such fields.
            EpisodeFailed: The server cannot be reached.
        """
        server = OpenEnvServer.of(url, token_variable)
        schemas = server.schemas()
        self._action = schemas["action"]
        self._field = "" if _is_call(self._action) else _action_field(self._action, action)
        names = [observation] if isinstance(observation, str) else list(observation or ())
        _check_fields(names, schemas.get("observation", {}))
        self._shown, self._has_one = names, isinstance(observation, str)
        self._instructions = self._default_instructions() if instructions is None else instructions
        self._reset, self._keeps_state, self._unrewarded = dict(reset or {}), state, 0.0
        self._session = OpenEnvSession(server, wait_s)
        self._is_over = False

    @override
    async def reset(self, task: Task, rng: Random) -> Observation:
        """Begin an episode; a number in the task's column `seed` decides how, else the episode's random numbers."""
        seed, own = task.get("seed"), task.get("reset")
        arguments = {
            "seed": seed if isinstance(seed, int) else rng.getrandbits(31),
            **self._reset,
            **(own if isinstance(own, Mapping) else {}),
        }
        begun = await self._session.begin(arguments)
        if begun.done:
            raise EpisodeFailed("the server ends the episode with its reset: there is nothing to do in it")
        self._unrewarded = begun.reward
        shown = self._text(begun.observation)
        if not self._instructions:
            return shown
        if isinstance(shown, str):
            return f"{self._instructions}\n{shown}".rstrip()
        return [{"role": "system", "content": self._instructions}, *shown]

    @override
    async def act(self, text: str) -> Turn:
        """Take the action that a message is; without calls of tools, where actions are such, the episode is over."""
        if not self._field:
            return Turn(reward=self._earned(0.0), done=True, info=await self._end())
        found: Mapping[str, object] | None = {self._field: text}
        if self._field == AS_JSON:
            found = next(objects_in(text), None)
            if found is None:
                return Turn(f"There is no JSON object in the message. {self._usage()}")
        if problem := schema_problems(found, self._action):  # type: ignore[arg-type]
            return Turn(f"The action is refused: {problem}. {self._usage()}")
        answer = await self._session.step(found)  # type: ignore[arg-type]
        info = await self._end() if answer.done else {}
        return Turn(self._text(answer.observation), self._earned(answer.reward), answer.done, info=info)

    @classmethod
    @override
    def list_tools(cls, options: Mapping[str, Json]) -> Sequence[ToolFacts]:
        """The tools of the server; none if its actions are others."""
        world = cls(**options)  # type: ignore[arg-type]
        if world._field:
            return ()
        with ThreadPoolExecutor(1) as thread:  # notebooks have an event loop of their own in this one
            try:
                found = thread.submit(asyncio.run, world._listed()).result()
            except EpisodeFailed as error:
                raise RecipeError.at("environment.options.url", str(error)) from error
        return [ToolFacts(str(one["name"]), str(one["description"]), _mapping(one["input_schema"])) for one in found]

    @override
    async def call_tool(self, name: str, arguments: Mapping[str, Json]) -> ToolTurn:
        """Call a tool as a step."""
        if self._is_over:
            return ToolTurn("the episode is over", done=True, is_refused=True)
        action: dict[str, Json] = {"type": "call_tool", "tool_name": name, "arguments": dict(arguments)}
        answer = await self._session.step(action)
        self._is_over = answer.done
        reward, error = self._earned(answer.reward), answer.observation.get("error")
        if not isinstance(error, Mapping):
            return ToolTurn(_result_text(answer.observation), reward, answer.done)
        kind, reason = error.get("error_type"), str(error.get("message"))
        if kind in _REFUSED:
            return ToolTurn(reason, reward, answer.done, is_refused=True)
        raise EpisodeFailed(
            f"its server reports {kind}: {reason}", "deadline" if kind == "timeout" else "infrastructure"
        )

    @override
    async def close(self) -> None:
        """End the session."""
        await self._session.close()

    async def _listed(self) -> Sequence[Mapping[str, Json]]:
        try:
            return await self._session.list_tools()
        finally:
            await self._session.close()

    async def _end(self) -> Mapping[str, Json]:
        """Facts for the record at the end of the episode."""
        return {"state": await self._session.state()} if self._keeps_state else {}

    def _earned(self, reward: float) -> float:
        """A reward, with that of the reset if nobody has got it yet."""
        earned, self._unrewarded = reward + self._unrewarded, 0.0
        return earned

    def _text(self, observation: Mapping[str, Json]) -> Observation:
        """An observation as the policy reads it."""
        rest = {name: value for name, value in observation.items() if name not in _FACTS}
        kept = {name: observation.get(name) for name in self._shown} if self._shown else rest
        kept = kept or {**_mapping(observation.get("metadata"))}  # where environments with tools put what they ask
        only = next(iter(kept.values())) if len(kept) == 1 else None
        if isinstance(only, str):
            return only
        if self._has_one and isinstance(only, list) and all(isinstance(one, dict) and "role" in one for one in only):
            return only
        return json.dumps(only if self._has_one else kept, ensure_ascii=False) if kept else ""

    def _default_instructions(self) -> str:
        return self._usage() if self._field == AS_JSON else ""

    def _usage(self) -> str:
        """How an action is written."""
        if self._field != AS_JSON:
            return "Answer with a text."
        fields = {name: one for name, one in _mapping(self._action.get("properties")).items() if name != "metadata"}
        usage = usage_of({"properties": fields, "required": self._action.get("required", ())})
        return f"Answer with a JSON object that has the fields {usage}."


def _mapping(value: Json) -> Mapping[str, Json]:
    return value if isinstance(value, Mapping) else {}


def _is_call(schema: Mapping[str, Json]) -> bool:
    """Whether actions are calls of tools."""
    return {"tool_name", "arguments"} <= set(_mapping(schema.get("properties")))


def _action_field(schema: Mapping[str, Json], name: str | None) -> str:
    """The field of actions that gets a message, or `json`.

    Raises:
        RecipeError: There is no such field.
    """
    properties = _mapping(schema.get("properties"))
    if name is None:
        required = schema.get("required")
        only = required[0] if isinstance(required, list) and len(required) == 1 else None
        is_text = isinstance(only, str) and _mapping(properties.get(only)).get("type") == "string"
        return str(only) if is_text and "enum" not in _mapping(properties.get(str(only))) else AS_JSON
    if name != AS_JSON and name not in properties:
        known = ", ".join(field for field in properties if field != "metadata")
        raise RecipeError.at(
            "environment.options.action", f"is '{name}'{nearest(name, properties)}; an action has the fields {known}"
        )
    return name


def _check_fields(names: Sequence[str], schema: Mapping[str, Json]) -> None:
    """Refuse fields that observations do not have, if they say which they have.

    Raises:
        RecipeError: There is no such field.
    """
    known = _mapping(schema.get("properties"))
    for name in names:
        if known and not schema.get("additionalProperties") and name not in known:
            text = f"has '{name}'{nearest(name, known)}; an observation has the fields {', '.join(known)}"
            raise RecipeError.at("environment.options.observation", text)


def _result_text(observation: Mapping[str, Json]) -> str:
    """The result of a tool as the policy reads it."""
    result = observation.get("result")
    data = result.get("data", result) if isinstance(result, Mapping) else result
    return data if isinstance(data, str) else json.dumps(data, ensure_ascii=False)
