"""Episodes to be played, and episodes that were played."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from leaderless.base.values import Json
from leaderless.environments.answer_recorder import RecordedAnswer
from leaderless.environments.chat_writer import ChatWriter
from leaderless.environments.episode_trace import Said, Trace
from leaderless.environments.protocol import Task
from leaderless.environments.tools import CallResult
from leaderless.rollout.engine import SamplingParams


@dataclass(frozen=True)
class Spoken:
    """Messages of an episode that is continued.

    Attributes:
        context: Token ids that it followed on.
        tokens: Its own token ids.
        said: Facts about it; its reward is found again.
    """

    context: Sequence[int]
    tokens: Sequence[int]
    said: Said


@dataclass(frozen=True)
class EpisodePosition:
    """An episode to play.

    Attributes:
        number: Unique number; with the seed it decides what is sampled.
        seed: Seed of the environment's random numbers.
        task: Row of the dataset.
        writer: Writer of its messages.
        params: Distribution from which the policy samples, and the limits of one message.
        agents: Agents that the policy plays; the episode ends when another one is to act. None if it plays all.
        history: Messages of other agents so far, in the order of the turns.
    """

    number: int
    seed: str
    task: Task
    writer: ChatWriter
    params: SamplingParams
    agents: frozenset[str] | None = None
    history: Sequence[Spoken] = ()


@dataclass
class Episode:
    """Episode that was played.

    Attributes:
        trace: Everything that was said.
        agents: Names of the environment's agents.
        cause: Word by which a failed episode is counted; empty if it did not fail.
        error: Reason why it failed, for people.
        is_cut: Whether it ended at a limit.
        is_led: Whether a program led it.
        attempts: Number of times that it was tried.
        seconds: Seconds in the model, in the environment and in tools, by these names.
        calls: Results of all calls of tools.
        info: Facts that the environment has noted.
        place: Place that was to be played; None if it was not played here.
        answers: Answers of the environment.
    """

    trace: Trace = field(default_factory=Trace)
    agents: tuple[str, ...] = ()
    cause: str = ""
    error: str = ""
    is_cut: bool = False
    is_led: bool = False
    attempts: int = 1
    seconds: dict[str, float] = field(default_factory=lambda: {"model": 0.0, "environment": 0.0, "tools": 0.0})
    calls: list[CallResult] = field(default_factory=list)
    info: dict[str, Json] = field(default_factory=dict)
    place: EpisodePosition | None = None
    answers: list[RecordedAnswer] = field(default_factory=list)
