"""The parts of a worker, and the position of its run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from leaderless.config import Recipe
from leaderless.data.dataset import Dataset, TrainingSet
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import Transport
from leaderless.observability.clock import Clock
from leaderless.observability.console import Display
from leaderless.observability.episode_files import EpisodeJournal
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Action, Plan, flat
from leaderless.stages.context import Clients
from leaderless.worker.asynchronous.async_state import RemainingPrompts
from leaderless.worker.build.judging import JudgeHelper, Judging
from leaderless.worker.build.memory_bounds import MemoryBounds
from leaderless.worker.build.roles import Roles
from leaderless.worker.device_sharing import DeviceSharing
from leaderless.worker.evaluate.evaluator import Evaluator
from leaderless.worker.evaluate.preferences import PreferenceEvaluator
from leaderless.worker.supervision.failure import note_place


@dataclass(frozen=True)
class Parts:
    """Everything that one rank needs to train.

    Only ranks with the model that answers held-out prompts evaluate, and those whose judges they ask.
    """

    recipe: Recipe
    plan: Plan
    transport: Transport
    roles: Roles
    sets: Sequence[TrainingSet]
    evaluator: Evaluator | PreferenceEvaluator | JudgeHelper | None
    held_out: Dataset | None
    tokenizer: Tokenizer
    judging: Judging
    directory: RunDirectory
    episodes: EpisodeJournal
    display: Display
    memory: MemoryBounds
    turns: DeviceSharing
    desk: Clients | None = None

    @property
    def clock(self) -> Clock:
        """The clock of this rank."""
        return self.turns.clock

    @cached_property
    def _places(self) -> dict[Action, int]:
        return {action: place for place, action in enumerate(flat(self.plan.schedule))}

    def begin(self, step: int, name: str, action: Action | None = None) -> None:
        """Show what is done now, to people and to the watchdog: an entry of the schedule, or what comes after all."""
        place = self._places[action] if action is not None else len(self._places)
        self.transport.activity.begin(step, name, place)
        note_place(self.transport.rank, step, name)
        self.display.activity(name)

    def progress(self, name: str, fraction: float | None = None) -> None:
        """Show what is done, and which fraction of it, between 0 and 1."""
        self.transport.activity.beat()
        self.display.activity(name, fraction)


@dataclass
class Progress:
    """Position of a loop of a run; checkpoints hold all of it.

    Attributes:
        nodes: State of each node of this rank.
        step: Number of the newest iteration of the loop, done or in progress: the step, in the loop that trains.
        trained: Number of the training iteration whose weights this loop has: the last step, where it trains.
        data_position: Number of prompts taken from the data.
        remaining: Prompts that this rank has yet to begin, if it generates continuously and not from the beginning.
        seconds_before: Seconds that earlier starts took.
    """

    nodes: dict[str, dict[str, float]]
    step: int = 0
    trained: int = 0
    data_position: int = 0
    remaining: RemainingPrompts | None = None
    seconds_before: float = 0.0
    _begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, with earlier starts."""
        return self.seconds_before + time.monotonic() - self._begin
