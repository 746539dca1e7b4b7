"""Tools described by a JSON schema, and environments that learn from a server which tools they have. No torch."""

from __future__ import annotations

from abc import abstractmethod
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import ClassVar

from leaderless.base.values import Json
from leaderless.environments.protocol import Environment
from leaderless.environments.tools.calls import Tool, ToolTurn, WrongArgumentsError
from leaderless.environments.tools.function_tool import ToolOwner


def schema_problems(value: Json, schema: Mapping[str, Json]) -> str:
    """Description of what a JSON schema refuses in a value, for the policy; empty if nothing."""
    from jsonschema.validators import validator_for

    problems = validator_for(schema)(schema).iter_errors(value)
    return "; ".join(
        f"{'.'.join(map(str, problem.absolute_path))}: {problem.message}".removeprefix(": ") for problem in problems
    )


@dataclass(frozen=True)
class SchemaTool(Tool):
    """A tool whose arguments are checked by the schema that its server gives."""

    def prepare(self, arguments: Mapping[str, Json]) -> Mapping[str, object]:
        """Check arguments by the schema."""
        if problems := schema_problems(arguments, self.parameters):
            raise WrongArgumentsError(problems)
        return arguments


@dataclass(frozen=True)
class ToolFacts:
    """A tool as a server describes it; the arguments are those of a `Tool`."""

    name: str
    description: str
    parameters: Mapping[str, Json]


class ServedEnvironment(Environment):
    """An environment whose tools are known to its server alone."""

    @classmethod
    @abstractmethod
    def list_tools(cls, options: Mapping[str, Json]) -> Sequence[ToolFacts]:
        """The tools of the environment with these options, which may be none.

        Raises:
            RecipeError: The server does not say.
        """

    @abstractmethod
    async def call_tool(self, name: str, arguments: Mapping[str, Json]) -> ToolTurn:
        """The answer to a call, which may have a reward, or end the episode."""


@dataclass(frozen=True)
class EnvironmentTool(SchemaTool):
    """A tool of a `ServedEnvironment`.

    Attributes:
        home: Class of the environment.
        instance: Environment of the episode; None as long as there is none.
    """

    is_step: ClassVar[bool] = True
    home: ToolOwner
    instance: ServedEnvironment | None = None

    @property
    def owner(self) -> object | None:
        """The environment, which is asked one thing after the other."""
        return self.instance

    def of_instance(self, instance: object) -> EnvironmentTool:
        """The same tool of an object."""
        assert isinstance(instance, ServedEnvironment)
        return replace(self, instance=instance)

    async def call(self, arguments: Mapping[str, object]) -> object:
        """Call the tool of the episode's environment."""
        assert self.instance is not None, "a tool of an episode has its environment"
        return await self.instance.call_tool(self.name, arguments)  # type: ignore[arg-type]


def served_tools(kind: type[Environment] | None, options: Mapping[str, Json]) -> list[EnvironmentTool]:
    """The tools that the server of an environment has; none of any other environment, or of a program.

    Raises:
        RecipeError: The server does not say.
    """
    if kind is None or not issubclass(kind, ServedEnvironment):
        return []
    home = ToolOwner(kind, options, is_environment=True)
    return [EnvironmentTool(one.name, one.description, one.parameters, home) for one in kind.list_tools(options)]
