"""Protocol that users implement: an environment, which answers what the policy says. Imports no torch."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Awaitable, Mapping, Sequence
from dataclasses import dataclass, field
from random import Random

from leaderless.base.values import Json
from leaderless.config.failures import FAILURE_KINDS, FailureKind

Message = Mapping[str, Json]
"""A message of a chat: `role`, `content`, and what else the model's chat template knows, such as `tool_calls`."""
Observation = str | Sequence[Message]
"""Input of an agent: the text of a message, or several messages. A first observation may begin with a message of
the role `system`."""
Task = Mapping[str, Json]
"""The row of the dataset that an episode is about, with all of its columns."""
ONLY_AGENT = ""
"""Name of the agent of environments that have one."""


class EpisodeFailed(Exception):  # noqa: N818 - a plain word for users
    """The episode cannot be judged. What is done then depends on the kind of the failure; see `FailuresConfig`.

    Args:
        reason: Reason, for people.
        kind: Kind of the failure; by default, whose code has raised it: the environment's or a tool's.

    Attributes:
        kind: The kind; None for the default.

    Raises:
        ValueError: There is no such kind, or an environment cannot say that it is one.
    """

    def __init__(self, reason: str = "", kind: FailureKind | None = None) -> None:
        super().__init__(reason)
        if kind not in {None, *FAILURE_KINDS} - {"policy", "grader"}:
            remedy = {
                "policy": "for what the policy does wrong return a reward, which teaches it",
                "grader": "a grader is a reward of the recipe, which raises an error of any type",
            }.get(str(kind), "leave it out, or use environment, tool, sandbox, deadline or infrastructure")
            raise ValueError(f"EpisodeFailed has kind={kind!r}: {remedy}")
        self.kind = kind


@dataclass(frozen=True)
class Turn:
    """Answer of an environment to an agent.

    Attributes:
        observation: Observation for the agent that acts next; empty when the episode is over.
        reward: Reward of what was just said, for the agent that said it, or rewards by the names of agents.
        done: Whether the episode is over.
        agent: Agent that acts next, in environments with several; by default, the one that has just acted.
        info: Further facts for the episode's record.
    """

    observation: Observation = ""
    reward: float | Mapping[str, float] = 0.0
    done: bool = False
    agent: str | None = None
    info: Mapping[str, Json] = field(default_factory=dict)

    def next_after(self, agent: str) -> str:
        """The agent that acts after one has acted."""
        return agent if self.agent is None else self.agent

    def rewards_for(self, agent: str) -> Mapping[str, float]:
        """Rewards by the names of agents, if one has acted."""
        return self.reward if isinstance(self.reward, Mapping) else {agent: self.reward}


class Environment(ABC):
    """One episode's world. Each episode has an object of its own, which may keep whatever it likes.

    Methods may be `async`. Methods marked with `@tool` are offered to the policy: calls are answered before `act` is
    asked. Whatever a method raises makes the episode fail: by default it is then absent from training, and counted.

    Options of the recipe's `environment.options` are arguments of the constructor.
    """

    needs_own_process: bool = False
    """Whether episodes run in processes of their own, as for libraries that use global random numbers."""
    agents: Sequence[str] = (ONLY_AGENT,)
    """Names of the agents, of which the first acts first."""

    @abstractmethod
    def reset(self, task: Task, rng: Random) -> Observation | Awaitable[Observation]:
        """Begin an episode, and return the first agent's input.

        Args:
            task: Row of the dataset.
            rng: Source of all randomness in the episode. All episodes of a prompt's group get the same random numbers.
        """

    def act(self, text: str) -> Turn | Awaitable[Turn]:  # noqa: ARG002
        """Answer what the agent has said; by default this was its final answer, which the recipe's rewards grade.

        Args:
            text: Text of the agent's message, without special tokens.
        """
        return Turn(done=True)

    def close(self) -> Awaitable[None] | None:
        """Release what the episode holds. It is called once, also after an error."""
        return None
