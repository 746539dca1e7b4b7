"""The parts of a worker, and the position of its run."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from leaderless.config import Recipe
from leaderless.data.dataset import Dataset, TrainingSet
from leaderless.distributed.transport import Transport
from leaderless.observability.clock import Clock
from leaderless.observability.console import Display
from leaderless.observability.episode_files import EpisodeJournal
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Action, Plan, flat
from leaderless.rewards.pool import RewardPool
from leaderless.stages.context import Clients
from leaderless.worker.asynchronous.async_state import RemainingPrompts
from leaderless.worker.build.judging import Judging
from leaderless.worker.build.roles import Roles
from leaderless.worker.device_sharing import DeviceSharing
from leaderless.worker.evaluate.evaluator import Evaluator, JudgeHelper, make_evaluator
from leaderless.worker.evaluate.preferences import PreferenceEvaluator
from leaderless.worker.supervision.failure import note_place


@dataclass(frozen=True)
class Parts:
    """Everything that one rank needs to train.

    Attributes:
        recipe: Settings of the user.
        plan: Plan in force.
        transport: Connection to the other ranks.
        roles: Models of this rank.
        rewards: Rewards that grade responses.
        sets: Datasets to train on.
        held_out: Held-out rows, if the run evaluates.
        directory: Folder of the run.
        episodes: Journal of the episodes of this rank.
        display: Console of the run.
        turns: Device of this rank.
        desk: Clients of the policy, if the run has some.
    """

    recipe: Recipe
    plan: Plan
    transport: Transport
    roles: Roles
    rewards: RewardPool
    sets: Sequence[TrainingSet]
    held_out: Dataset | None
    directory: RunDirectory
    episodes: EpisodeJournal
    display: Display
    turns: DeviceSharing
    desk: Clients | None = None

    @cached_property
    def judging(self) -> Judging:
        """Graders of responses, and judges that are models of the plan."""
        return Judging(self.recipe, self.plan, self.transport, self.roles, self.rewards)

    @cached_property
    def evaluator(self) -> Evaluator | PreferenceEvaluator | JudgeHelper | None:
        """The evaluator of a rank with the model that answers held-out prompts, or with judges that it asks."""
        if self.held_out is None:
            return None
        return make_evaluator(self.recipe, self.plan, self.held_out, self.judging)

    @cached_property
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

    def progress(self, name: str, done: float | str = "") -> None:
        """Show what is done, and how much of it, as text or as a fraction between 0 and 1."""
        self.transport.activity.show(f"step {self.transport.activity.step}: {name}", done)


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
