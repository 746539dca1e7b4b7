"""What a worker is built from, and where its run is."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property

from leaderless.config import Recipe
from leaderless.data.dataset import TrainingSet
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import Transport
from leaderless.observability.console import Display
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Action, Plan, flat
from leaderless.stages.context import Grader
from leaderless.supervision.failure import note_place
from leaderless.worker.evaluation import Evaluator
from leaderless.worker.roles import Roles


@dataclass(frozen=True)
class Parts:
    """Everything that one rank needs to train.

    Attributes:
        recipe: All settings.
        plan: Plan of the run, the same on every rank.
        transport: Process groups of the plan.
        roles: Models.
        sets: Training prompts.
        evaluator: Held-out prompts, on ranks that hold the model that answers them.
        tokenizer: Tokenizer of the policy.
        grade: Function that computes rewards.
        directory: Folder of the run.
        display: What a person sees, on the first rank.
    """

    recipe: Recipe
    plan: Plan
    transport: Transport
    roles: Roles
    sets: Sequence[TrainingSet]
    evaluator: Evaluator | None
    tokenizer: Tokenizer
    grade: Grader
    directory: RunDirectory
    display: Display

    @cached_property
    def _places(self) -> dict[Action, int]:
        return {action: place for place, action in enumerate(flat(self.plan.schedule))}

    def begin(self, step: int, name: str, action: Action | None = None) -> None:
        """Show what is done now, and let the watchdog know.

        Args:
            step: Step of the run.
            name: Name of what is done.
            action: Entry of the schedule; None for what comes after all entries.
        """
        place = self._places[action] if action is not None else len(self._places)
        self.transport.activity.begin(step, name, place)
        note_place(self.transport.rank, step, name)
        self.display.activity(name)

    def progress(self, name: str, fraction: float) -> None:
        """Show how much of something is done.

        Args:
            name: Name of what is done.
            fraction: Share that is done, between 0 and 1.
        """
        self.transport.activity.beat()
        self.display.activity(name, fraction)


@dataclass
class Progress:
    """Where a run is; checkpoints hold all of it.

    Attributes:
        nodes: What each node of this rank remembers from step to step.
        step: Steps that are done, or the one under way.
        data_position: Prompts taken from the data.
        seconds_before: Seconds that earlier starts have taken.
    """

    nodes: dict[str, dict[str, float]]
    step: int = 0
    data_position: int = 0
    seconds_before: float = 0.0
    _begin: float = field(default_factory=time.monotonic)

    @property
    def seconds(self) -> float:
        """Seconds that the run has taken, earlier starts included."""
        return self.seconds_before + time.monotonic() - self._begin
