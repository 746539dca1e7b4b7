"""The context of a stage: everything that it receives except its rows."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterable, Mapping, MutableMapping, MutableSequence, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from typing import Protocol, TypeVar, cast

import torch
from torch import Tensor

from leaderless.config import Recipe
from leaderless.config.run import GuardAction
from leaderless.data.batch import Batch
from leaderless.data.prompts.encode import Tokenizer
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.clock import Clock
from leaderless.observability.episode_files import EpisodeJournal
from leaderless.observability.events import GuardEvent
from leaderless.observability.metrics import Metrics
from leaderless.observability.proof_log import RowSum
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import PlannedNode
from leaderless.planner.workflow.stage_spec import AnyUse, RoleUse
from leaderless.rewards.pool import Graded
from leaderless.rewards.protocol import RewardInput
from leaderless.rollout.engine import RolloutEngine
from leaderless.rollout.weight_sources import Serving
from leaderless.training.engine import TrainEngine, ValueEngine

Grader = Callable[[Sequence[RewardInput], Sequence[str | None]], list[Graded]]
"""Function that computes rewards, given the responses and the source of each."""


class Generated(Protocol):
    """Responses or episodes that were begun in earlier iterations, or in this one, and are finished."""

    def samples(self, prompts: Batch, context: StageContext) -> Batch:
        """The samples of some prompts, which leave the engine."""


class Clients(Protocol):
    """The clients of an online run, who ask this rank."""

    def close(self) -> None:
        """Answer those who wait with an error, and listen no more."""


@dataclass(frozen=True)
class ModelRole:
    """A language model on the ranks of a node.

    Attributes:
        trainer: Engine that scores and trains it; None on ranks that only generate.
        serving: Engine that generates, with the source of its weights; None if nothing is generated.
    """

    trainer: TrainEngine | None
    serving: Serving | None

    @property
    def train_engine(self) -> TrainEngine:
        """The engine that scores and trains the model."""
        assert self.trainer is not None, "ranks that only generate can neither score nor train"
        return self.trainer

    def generating(self) -> AbstractContextManager[RolloutEngine]:
        """The engine that generates, with the newest weights. All ranks of the node use it together."""
        assert self.serving is not None, "the planner gives an engine to roles that generate"
        return self.serving.phase()

    @property
    def policy_version(self) -> int:
        """Number of optimizer steps that led to the weights that this rank scores, trains or generates with."""
        if self.trainer is not None:
            return self.trainer.policy_version
        assert self.serving is not None, "a role has a trainer or an engine that generates"
        return self.serving.policy_version

    def limited_to(self, use: AnyUse, what: str, gate: UpdateGate) -> ModelRole:
        """The same model for a stage that declares one use of it; other uses raise a RuntimeError that names `what`."""
        trainer = None if self.trainer is None else limited(self.trainer, use, what, gate)
        if use in {"generate", "judge"} or self.serving is None:
            return ModelRole(trainer, self.serving)
        return ModelRole(trainer, limited(self.serving, use, what, gate))


@dataclass(frozen=True)
class StageContext:
    """The recipe, the ranks and the tools of a node.

    Attributes:
        recipe: Resolved recipe.
        node: Planned node: `node.name`, its stage, role and columns, and `node.layout`, the ranks that it runs on.
        step: Number of the step, from 1.
        process_group: Ranks of the node, for collectives; `process_group.rank` is this one.
        metrics: Collector of the numbers that the stage reports.
        run_directory: Folder of the run and its files.
        tokenizer: Tokenizer of the policy.
        model: Model of the node's main role; None for a node without a role.
        grade: Function that computes the recipe's rewards.
        state: Numbers that the node keeps from step to step, the same on all of its ranks; they are checkpointed.
        events: Events reported by guards, the same on all ranks of the node.
        num_roll_backs: Number of times that the run has rolled back.
        agents: Roles that sample responses: the column `agent` holds places in it.
        models: Models of the node's roles, by the names that the stage declares.
        tokenizers: Tokenizers of judges, and of teachers that are asked by text, by role.
        episodes: Journal of the episodes of this rank; None if there is none.
        source: Responses or episodes that are finished, where they are generated continuously, or the clients of an
            online run, on ranks that they ask; None elsewhere.
        clock: Clock of the rank: `with context.clock.doing("environment")` says what time is spent on.
        progress: Function that takes the finished fraction of the node's work, for the progress line, or a text to show
            in place of the node's name; it is a sign of life, too.
        facts: Additional facts for the trace, next to the node's rows and tokens.
        recorded: Sums of what is written into the folder of the run, for its proof, by `RECORDED` and `LINES`.
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
    agents: Sequence[str] = ()
    models: Mapping[str, ModelRole | ValueEngine] = field(default_factory=dict)
    tokenizers: Mapping[str, Tokenizer] = field(default_factory=dict)
    episodes: EpisodeJournal | None = None
    source: Generated | Clients | None = None
    clock: Clock = field(default_factory=Clock)
    progress: Callable[[float | str], None] = field(default=lambda done: None)  # noqa: ARG005
    facts: MutableMapping[str, object] = field(default_factory=dict)
    recorded: MutableMapping[str, RowSum] = field(default_factory=dict)

    @property
    def role(self) -> ModelRole:
        """The language model of the node's role."""
        assert isinstance(self.model, ModelRole), f"node '{self.node.name}' has no role with a language model"
        return self.model

    def language_model(self, name: str) -> ModelRole:
        """The language model of one of the node's roles, by the name that the stage declares."""
        found = {key: model for key, model in self.models.items() if isinstance(model, ModelRole)}
        if name not in found:
            raise self._undeclared(f"language model '{name}'", found)
        return found[name]

    def value_model(self, name: str) -> ValueEngine:
        """The value model of one of the node's roles, by the name that the stage declares."""
        found = {key: model for key, model in self.models.items() if not isinstance(model, ModelRole)}
        if name not in found:
            raise self._undeclared(f"value model '{name}'", found)
        return found[name]

    def _undeclared(self, what: str, known: Iterable[str]) -> KeyError:
        return KeyError(f"node '{self.node.name}' declares no {what} (known: {', '.join(known) or 'none'})")

    @property
    def critic(self) -> ValueEngine:
        """The value model of the node's role."""
        assert self.model is not None, f"node '{self.node.name}' has no role"
        assert not isinstance(self.model, ModelRole), f"the role of node '{self.node.name}' is no value model"
        return self.model

    def report_event(self, guard: str, value: float, limit: float | None, action: GuardAction) -> None:
        """Report that a guard was violated, in the same way on all ranks of the node.

        Args:
            guard: Setting of the guard.
            value: Observed value.
            limit: Limit that the value violates; None if the value has to be finite.
            action: Action to take.
        """
        node = self.node.node
        self.events.append(
            GuardEvent(self.step, guard, value, limit, action, self.node.name, node.role or "", self.num_roll_backs)
        )

    def sum(self, values: Tensor) -> Tensor:
        """The sum of a tensor over the node's ranks; ranks that hold the same rows count once."""
        layout = self.node.layout
        counted = values if layout.represents(self.process_group.rank) else torch.zeros_like(values)
        return self.process_group.sum(counted, f"a sum in node '{self.node.name}'")

    def gather(self, rows: Tensor) -> Tensor:
        """The rows of all ranks, each once, from tensors [n, ...] in which n may differ between ranks."""
        layout = self.node.layout
        counted = rows if layout.represents(self.process_group.rank) else rows[:0]
        return torch.cat(self.process_group.gather(counted, f"rows in node '{self.node.name}'"))


@dataclass
class UpdateGate:
    """Holds stages back from changing weights while these are written.

    Attributes:
        lock: Lock that a stage takes before it changes weights: who has it finds them as they are.
        is_passed: Whether weights may have changed since the last border between two steps.
    """

    lock: threading.Lock = field(default_factory=threading.Lock)
    is_passed: bool = True


Engine = TypeVar("Engine")

NEEDS: dict[str, RoleUse] = {
    "log_probs": "score",
    "values": "score",
    "likeliest_words": "score",
    "teaching": "score",
    "forward": "train",
    "passes": "train",
    "optimizer_step": "train",
    "discard_gradient": "train",
    "state": "train",
    "state_loaded": "train",
    "phase": "generate",
    "submit": "generate",
    "step": "generate",
}
"""Use that a stage has to declare for a method of an engine. Training includes scoring."""
CHANGES = {"optimizer_step", "state", "state_loaded", "improve"}
"""Methods of engines through which stages change weights."""


def limited(engine: Engine, use: AnyUse, what: str, gate: UpdateGate) -> Engine:
    """An engine whose methods for other uses raise a RuntimeError.

    Args:
        engine: Engine of any kind.
        use: Use that the stage declares.
        what: Role and node, for the error.
        gate: Gate to pass before weights change.
    """
    return cast(Engine, _Limited(engine, use, what, gate))


class _Limited:
    """Hands on everything to an engine, except what needs another use."""

    def __init__(self, engine: object, use: AnyUse, what: str, gate: UpdateGate) -> None:
        self._engine, self._use, self._what, self._gate = engine, use, what, gate

    def __getattr__(self, name: str) -> object:
        needed = NEEDS.get(name)
        if needed is not None and needed != self._use and (needed, self._use) != ("score", "train"):
            raise RuntimeError(
                f"{self._what} is declared to be used to {self._use}, and `{name}` needs '{needed}': declare it with "
                f'@stage(roles={{NAME: "{needed}"}})'
            )
        if name in CHANGES:
            with self._gate.lock:
                self._gate.is_passed = True
        return getattr(self._engine, name)
