"""Parts of a plan: nodes in their places, edges, loops and channels, models, and sizes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leaderless.config import Recipe
from leaderless.config.layout import Stragglers
from leaderless.planner.entries import (
    Action,
    Load,
    Reshard,
    SyncWeights,
    flat,
)
from leaderless.planner.layout import Layout, all_ranks
from leaderless.planner.workflow import EPISODE_IDS, Node, StageSpec
from leaderless.planner.workflow.stage_spec import AnyUse

EdgeKind = Literal["local", "reshard", "channel"]


@dataclass(frozen=True)
class PlannedNode:
    """A node in its place.

    Attributes:
        node: Name, stage, role and what it comes after.
        spec: Contract of its stage.
        layout: Layout that it runs on.
        reads: Node that provides each column that it reads or carries, by column.
        writes: Columns that it writes.
        row_set: Rows that it works on.
        row_set_after: Rows of its output.
        max_staleness: Most optimizer steps between the weights that sampled its rows and its role's own.
        quadratic_tokens: Length at which attention costs its model as much as all matrix products; 0 for a node without
            a model, or with one of unknown size.
    """

    node: Node
    spec: StageSpec
    layout: Layout
    reads: Mapping[str, str]
    writes: tuple[str, ...]
    row_set: str
    row_set_after: str
    max_staleness: int = 0
    quadratic_tokens: int = 0

    def settings_of(self, recipe: Recipe) -> Recipe:
        """The recipe with the settings that hold for the node."""
        return self.spec.settings_of(recipe, self.node)

    def is_graded_ahead(self, recipe: Recipe) -> bool:
        """Whether other processes compute the node's rewards while its ranks generate, if these do continuously."""
        if self.node.run != "reward" or recipe.environment is not None or not recipe.run.reward_processes:
            return False
        if self.node.judges:
            return False  # the engines of judges are used by all ranks of the node together
        return bool(self.settings_of(recipe).reward.options())

    @property
    def uses(self) -> tuple[tuple[str, AnyUse], ...]:
        """The roles of the node, and their uses."""
        return tuple((role, self.spec.roles[name]) for name, role in self.node.roles)

    @property
    def name(self) -> str:
        """Name of the node."""
        return self.node.name

    @property
    def needs_whole_groups(self) -> bool:
        """Whether all samples of a prompt, or of an episode, which is never of two prompts, must be on one rank."""
        return self.spec.needs_whole_groups or (self.spec.needs_whole_episodes and EPISODE_IDS in self.reads)


@dataclass(frozen=True)
class Edge:
    """The columns that go from one node, or `data`, to another in each step.

    Nothing moves on a `local` edge: both ends hold the same rows on the same ranks. A `reshard` sends columns to other
    ranks of the loop, a `channel` to another loop. `max_bytes` is the size of the columns over all ranks when every
    sequence is as long as it may be.
    """

    source: str
    target: str
    columns: tuple[str, ...]
    kind: EdgeKind
    max_bytes: int


@dataclass(frozen=True)
class Loop:
    """Nodes that go through iterations together, with a counter of their own.

    Nodes that no channel separates are in one loop, so a plan without channels is one loop and its iterations are the
    steps of the run.

    Attributes:
        name: Name of its first node.
        nodes: Its nodes, in order.
        ranks: Ranks that its entries run on, ascending; two loops have no common ranks.
        schedule: All chain entries of an iteration in the order of every rank; a rank executes those it takes part in.
        lag: Iterations that it is ahead of the loop that trains the role it generates with; 0 if it is the same loop.
        is_continuous: Whether its ranks work on several iterations at once, each on its own.
        stragglers: Treatment of groups that are not finished when training needs rows, where `is_continuous`.
        helpers: Its ranks that use the device of a rank that trains, each with the latter.
    """

    name: str
    nodes: tuple[str, ...]
    ranks: tuple[int, ...]
    schedule: tuple[Action, ...]
    lag: int = 0
    is_continuous: bool = False
    stragglers: Stragglers = "wait"
    helpers: tuple[tuple[int, int], ...] = ()

    @property
    def portions(self) -> tuple[int, ...]:
        """How its ranks divide the prompts of an iteration, in proportion; empty where it loads none."""
        loads = (entry for entry in flat(self.schedule) if isinstance(entry, Load))
        return next((load.portions or (1,) * load.layout.dp for load in loads), ())

    @property
    def fixed_lag(self) -> int:
        """Iterations that it is ahead in every step; 0 if it trains, or if its ranks are ahead as it comes."""
        return 0 if self.is_continuous else self.lag

    @property
    def pace(self) -> str:
        """How its iterations follow those that train, for people."""
        if not self.lag:
            return "trains: its iterations are the steps"
        ahead = f"{self.lag} iteration{'s' * (self.lag != 1)} ahead"
        return f"at most {ahead}, continuously" if self.is_continuous else ahead


@dataclass(frozen=True)
class Channel:
    """Link of two loops, or of two iterations of one loop: rows or weights, some iterations of them in flight.

    Attributes:
        name: `rollout->policy` for rows, after the two loops; `policy=>rollout` for weights, after the role and the
            first node that uses the copy.
        kind: Content.
        source: Loop that pushes.
        target: Loop that pulls. Surplus groups are rows that a loop keeps for its own next iteration.
        capacity: Most iterations in flight: pushed, and not pulled yet.
        max_staleness: Most optimizer steps between the weights that sampled a row and those that are trained with it.
        reshards: Transfers of one iteration, in order, if it carries rows to other ranks.
        sync: Transfer of one iteration if it carries weights.
        max_bytes: Most bytes of rows that a rank pushes in one iteration; weights have the size of their model.
    """

    name: str
    kind: Literal["rows", "weights"]
    source: str
    target: str
    capacity: int
    max_staleness: int
    reshards: tuple[Reshard, ...] = ()
    sync: SyncWeights | None = None
    max_bytes: int = 0

    def feeds(self, taker: RoleInstance) -> bool:
        """Whether it carries weights to an instance."""
        sync = self.sync
        return sync is not None and (sync.role, sync.target_layout) == (taker.role, taker.layout)

    @property
    def transfers(self) -> tuple[Reshard | SyncWeights, ...]:
        """Transfers of one iteration, in order."""
        return self.reshards if self.sync is None else (self.sync,)

    @property
    def source_ranks(self) -> tuple[int, ...]:
        """The ranks that push, ascending."""
        return all_ranks(*(transfer.source_layout for transfer in self.transfers))

    @property
    def target_ranks(self) -> tuple[int, ...]:
        """The ranks that pull, ascending."""
        return all_ranks(*(transfer.target_layout for transfer in self.transfers))


@dataclass(frozen=True)
class RoleInstance:
    """A model of a role on the ranks of a layout.

    A trained instance has an optimizer; every other one is frozen or follows it. An instance scores if a node uses it
    that neither trains it nor generates with it. It is only an engine if it does nothing but generate, and a trained
    instance sends its weights. A critic is a value model instead of a language model. `num_updates` are the optimizer
    steps of the whole run. `engine` generates with it; where nodes do, their engines have a layout of their own, on the
    same ranks. A judge generates no samples, but says what samples are worth. One that teaches scores each pass of a
    student on the same ranks right before it.
    """

    role: str
    layout: Layout
    engine_layout: Layout | None
    is_trained: bool
    scores: bool
    is_critic: bool
    num_updates: int
    engine: str
    is_engine_only: bool = False
    is_judge: bool = False
    teaches: bool = False

    @property
    def has_engine(self) -> bool:
        """Whether nodes generate with it, samples or judgments."""
        return self.engine_layout is not None

    @property
    def generates(self) -> bool:
        """Whether nodes sample with it."""
        return self.has_engine and not self.is_judge

    @property
    def serving_layout(self) -> Layout:
        """Layout of its engines; where only held-out prompts are answered, each rank has one."""
        return self.engine_layout or self.layout.flat


def answering(instances: Sequence[RoleInstance], role: str | None = None) -> RoleInstance:
    """The model that answers: of a role, or of all, the first that generates, else the first that is trained.

    A critic or a judge cannot answer, and is returned only where there is nothing else.
    """
    able = [instance for instance in instances if not (instance.is_critic or instance.is_judge)]
    found = [instance for instance in able if role in {None, instance.role}]
    found = sorted(found, key=lambda instance: (not instance.generates, not instance.is_trained))
    return (*found, *instances)[0]


@dataclass(frozen=True)
class BatchSizes:
    """Sizes that follow from the recipe's `batch` section. Repeated nodes load the prompts of a step in each round.

    Attributes:
        prompts_per_step: Prompts (rows, for supervised fine-tuning) of a step, over all ranks.
        samples_per_step: Training sequences of a step, over all ranks.
        prompts_per_update: Prompts for one optimizer step, at most.
        samples_per_update: Training sequences for one optimizer step, at most.
        max_prompts_per_rank: Most prompts that one shard loads in a step.
        optimizer_steps: Optimizer steps of the whole run, for a role that is trained in each of its steps.
        micro_batch_tokens: Most tokens of one pass of a rank; for `auto`, the most to begin with.
        adapts_to_memory: Whether `micro_batch_tokens` is `auto`.
    """

    prompts_per_step: int
    samples_per_step: int
    prompts_per_update: int
    samples_per_update: int
    max_prompts_per_rank: int
    optimizer_steps: int
    micro_batch_tokens: int
    adapts_to_memory: bool
