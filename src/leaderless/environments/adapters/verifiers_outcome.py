"""Worth of an episode that a server of verifiers has played, or the kind of its failure. No torch, and no package."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from leaderless.base.values import Json
from leaderless.config.failures import FailureKind
from leaderless.environments.protocol import EpisodeFailed

if TYPE_CHECKING:
    from verifiers.v1.episode import WireEpisode
    from verifiers.v1.trace import Error, WireTrace

_KINDS: Mapping[str, FailureKind] = {
    "InterceptionError": "infrastructure",
    "ProviderError": "infrastructure",
    "SandboxError": "sandbox",
    "ToolsetError": "tool",
    "TunnelError": "infrastructure",
}
"""Kinds of the errors of verifiers; any other is the environment's."""
_REFUSED = range(400, 500)
"""Statuses with which the policy's address refuses a question: the program is wrong, and not the connection."""


def outcome_of(episode: WireEpisode, model: str, *, is_cut: bool) -> Mapping[str, Json]:
    """The reward of an episode, with the rewards and metrics that it is made of.

    Args:
        episode: Record of the server.
        model: Name of the model that the policy was.
        is_cut: Whether a limit of the recipe was reached. That its program failed is then a consequence.

    Raises:
        EpisodeFailed: The episode failed, or has no reward, or not one alone.
    """
    trace = _only_trace(episode, model)
    if episode.is_timeout or (trace is not None and trace.is_timeout):
        where = "env.timeout" if episode.is_timeout or trace is None else f"env.{trace.agent.name}.timeout"
        what = trace.stop_condition if trace is not None and trace.is_timeout else "episode_timeout"
        raise EpisodeFailed(f"verifiers: {what}: raise {where} of the server", "deadline")
    if trace is not None and not trace.ok:
        raise _failure(trace.errors, is_cut=is_cut)
    if trace is None or not episode.ok:
        raise _failure(episode.errors, is_cut=is_cut)
    rewards = {name: reward for name, reward in trace.rewards.items() if reward is not None}
    if not rewards or len(rewards) < len(trace.rewards):
        missing = ", ".join(name for name in trace.rewards if name not in rewards)
        raise EpisodeFailed(
            f"verifiers: a task of type {trace.task.type} has no reward{f' {missing}' if missing else ''}: give its "
            "class a method with @vf.reward, or plug a judge",
            "environment",
        )
    return {
        "reward": sum(reward.score * reward.weight for reward in rewards.values()),
        "rewards": {name: reward.score for name, reward in rewards.items()},
        "metrics": {name: value for name, value in trace.metrics.items() if value is not None},
        "stop": trace.stop_condition,
    }


def _only_trace(episode: WireEpisode, model: str) -> WireTrace | None:
    """The trace of the agent that the policy was; None if the episode ended before there was one.

    Raises:
        EpisodeFailed: There are several, or none asks the policy.
    """
    played = [trace for trace in episode.traces if trace.agent.config.model == model]
    names = ", ".join(f"'{trace.agent.name}'" for trace in played)
    if len(played) > 1:
        raise EpisodeFailed(
            f"verifiers: the policy plays {len(played)} agents of an episode ({names}), but an episode has one reward: "
            "give the others a model and a client of their own at the server (env.AGENT.model, env.AGENT.client)",
            "environment",
        )
    if episode.traces and not played:
        raise EpisodeFailed(
            "verifiers: no agent of the environment asks the policy: leave out env.AGENT.model of one at the server",
            "environment",
        )
    if played and not played[0].agent.trainable:
        raise EpisodeFailed(
            f"verifiers: the policy plays the agent {names}, which the environment does not train: give it a model and "
            "a client of its own at the server",
            "environment",
        )
    return played[0] if played else None


def _failure(errors: Sequence[Error], *, is_cut: bool) -> EpisodeFailed:
    """The failure of the last error."""
    if not errors:
        return EpisodeFailed("verifiers: the episode failed without an error: see the log of the server", "environment")
    error = errors[-1]
    is_refused = error.type == "ProviderError" and error.status_code in _REFUSED
    kind = "environment" if is_refused else _KINDS.get(error.type, "environment")
    is_consequence = is_cut and (is_refused or error.type == "HarnessError")
    return EpisodeFailed(f"verifiers: {error.type}: {error.message}", None if is_consequence else kind)
