"""What a stage is given besides its rows."""

from __future__ import annotations

from collections.abc import Callable, MutableMapping, MutableSequence, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from leaderless.config import Recipe
from leaderless.config.guards import GuardAction
from leaderless.data.encode import Tokenizer
from leaderless.data.transport import ProcessGroup
from leaderless.observability.events import GuardEvent
from leaderless.observability.metrics import Metrics
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import PlannedNode
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.rollout.engine import RolloutEngine
from leaderless.training.engine import TrainEngine, ValueEngine

Grader = Callable[[Sequence[RewardInput], Sequence[str | None]], list[Graded]]
"""Computes rewards: the responses, and the source of each."""


@dataclass(frozen=True)
class ModelRole:
    """A language model on the ranks of a node.

    Attributes:
        train_engine: Scores and trains it.
        rollout_engine: Generates with its weights; None where no node does.
    """

    train_engine: TrainEngine
    rollout_engine: RolloutEngine | None


@dataclass(frozen=True)
class StageContext:
    """The recipe, the ranks and the tools of a node.

    Attributes:
        recipe: What the user set.
        node: Name, stage and layout.
        step: From 1.
        process_group: The ranks of the node.
        metrics: Takes what the stage reports.
        run_directory: Where the run writes.
        tokenizer: Of the policy.
        model: Of the node's role; None for a node without one.
        grade: Computes the recipe's rewards.
        state: What the node remembers from step to step, the same on all of its ranks; checkpoints hold it.
        events: Takes what guards say, the same on all ranks of the node.
        num_roll_backs: How often the run has rolled back.
        progress: Told a fraction between 0 and 1 of the node's work.
    """

    recipe: Recipe
    node: PlannedNode
    step: int
    process_group: ProcessGroup
    metrics: Metrics
    run_directory: RunDirectory
    tokenizer: Tokenizer
    model: ModelRole | ValueEngine | None
    grade: Grader
    state: MutableMapping[str, float] = field(default_factory=dict)
    events: MutableSequence[GuardEvent] = field(default_factory=list)
    num_roll_backs: int = 0
    progress: Callable[[float], None] = field(default=lambda fraction: None)  # noqa: ARG005

    @property
    def role(self) -> ModelRole:
        """The language model of the node's role."""
        assert isinstance(self.model, ModelRole), f"node '{self.node.name}' has no role with a language model"
        return self.model

    @property
    def critic(self) -> ValueEngine:
        """The value model of the node's role."""
        assert self.model is not None, f"node '{self.node.name}' has no role"
        assert not isinstance(self.model, ModelRole), f"the role of node '{self.node.name}' is no value model"
        return self.model

    def report_event(self, guard: str, value: float, limit: float | None, action: GuardAction) -> None:
        """Tell the run what a guard says; all ranks of the node do so alike.

        Args:
            guard: Its setting.
            value: That was seen.
            limit: That it broke; None where the value has to be finite.
            action: That follows.
        """
        node = self.node.node
        self.events.append(
            GuardEvent(self.step, guard, value, limit, action, self.node.name, node.role or "", self.num_roll_backs)
        )

    def sum(self, values: Tensor) -> Tensor:
        """The sum over the rows of all ranks, each row counted once however many ranks hold it.

        Args:
            values: This rank's sum, of the same shape on every rank.
        """
        layout = self.node.layout
        counted = values if layout.is_first_of_shard(self.process_group.rank) else torch.zeros_like(values)
        return self.process_group.sum(counted, f"a sum in node '{self.node.name}'")

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, each once.

        Args:
            rows: [n, ...], with an n of its own on each rank.
        """
        layout = self.node.layout
        counted = rows if layout.is_first_of_shard(self.process_group.rank) else rows[:0]
        return torch.cat(self.process_group.gather(counted, f"rows in node '{self.node.name}'"))
