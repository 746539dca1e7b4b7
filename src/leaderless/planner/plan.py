"""The plan: what every rank does, in order, and what is sent between ranks."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Literal

from leaderless.config import Recipe
from leaderless.config.channels import Stragglers
from leaderless.config.layout import LayoutConfig
from leaderless.planner.entries import (
    Action,
    Load,
    Pull,
    Push,
    Repeat,
    Reshard,
    RunNode,
    SyncWeights,
    Windowed,
    flat,
)
from leaderless.planner.layout import Layout, all_ranks, format_ranks
from leaderless.planner.model_size import ModelSize
from leaderless.workflow import EPISODE_IDS, Node, StageSpec
from leaderless.workflow.stage import RoleUse

if TYPE_CHECKING:
    from leaderless.planner.memory import MemoryEstimate

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
        max_staleness: Most optimizer steps between the weights that sampled its rows and those of its role.
    """

    node: Node
    spec: StageSpec
    layout: Layout
    reads: Mapping[str, str]
    writes: tuple[str, ...]
    row_set: str
    row_set_after: str
    max_staleness: int = 0

    def settings_of(self, recipe: Recipe) -> Recipe:
        """The recipe with the settings that hold for the node."""
        return self.spec.settings_of(recipe, self.node)

    def is_graded_ahead(self, recipe: Recipe) -> bool:
        """Whether other processes compute the node's rewards while its ranks generate, if these do continuously."""
        if self.node.run != "reward" or recipe.environment is not None or not recipe.run.reward_processes:
            return False
        return bool(self.settings_of(recipe).reward.options())

    @property
    def uses(self) -> tuple[tuple[str, RoleUse], ...]:
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
        ranks: Ranks that its entries run on, ascending; those of two loops are disjoint.
        schedule: All chain entries of an iteration in the order of every rank; a rank executes those it takes part in.
        lag: Iterations that it is ahead of the loop that trains the role it generates with; 0 if it is the same loop.
        is_continuous: Whether its ranks work on several iterations at once, each on its own.
        stragglers: What happens then to groups that are not finished when training needs rows.
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
    def pace(self) -> str:
        """How its iterations follow those that train, for people."""
        if not self.lag:
            return "trains: its iterations are the steps"
        ahead = f"{self.lag} iteration{'s' * (self.lag != 1)} ahead"
        return f"at most {ahead}, continuously" if self.is_continuous else ahead


@dataclass(frozen=True)
class Channel:
    """What joins two loops, or two iterations of one loop: rows or weights, some iterations of them in flight.

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

    @property
    def transfers(self) -> tuple[Reshard | SyncWeights, ...]:
        """What is sent of one iteration, in order."""
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
    same ranks.
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

    @property
    def generates(self) -> bool:
        """Whether nodes generate with it."""
        return self.engine_layout is not None

    @property
    def serving_layout(self) -> Layout:
        """Layout of its engines; where only held-out prompts are answered, each rank has one."""
        return self.engine_layout or self.layout.flat


def answering(instances: Sequence[RoleInstance], role: str | None = None) -> RoleInstance:
    """The model that answers: of a role, or of all, the first that generates, else the first that is trained.

    A critic cannot answer, and is returned only where there is nothing else.
    """
    found = [instance for instance in instances if role in {None, instance.role} and not instance.is_critic]
    found = sorted(found, key=lambda instance: (not instance.generates, not instance.is_trained))
    return (*found, *instances)[0]


def trained_instance(plan: Plan, role: str) -> RoleInstance | None:
    """The instance of a role that is trained; None for a role that is not."""
    return next((one for one in plan.instances if one.role == role and one.is_trained), None)


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


@dataclass(frozen=True)
class Plan:
    """What the planner makes of a recipe, its workflow and a cluster; the same object on every rank.

    Attributes:
        recipe_name: Name of the run.
        workflow: Name of the workflow.
        world_size: Number of ranks.
        nodes: The nodes that run, in order.
        pruned: Nodes that do not run, because no node reads what they write.
        edges: The columns between nodes.
        loops: Loops that the nodes form, the one that generates first.
        channels: Links between loops, and between iterations of one.
        instances: The models and where they are.
        batch: Derived batch sizes.
        sizes: Size of each role's model; None where it is not known.
        memory: Estimated bytes of the fullest rank by what they are for; None when a model's size is not known.
        recipe_hash: Hash of the resolved recipe.
        engine: Engine that generates where the recipe leaves it open.
        layout: The section `layout` that it is made for: the recipe's, or what has replaced it while the run goes on.
        profile_hash: Hash of the profile by which the layouts were chosen; empty if they were written.
    """

    recipe_name: str
    workflow: str
    world_size: int
    nodes: tuple[PlannedNode, ...]
    pruned: tuple[str, ...]
    edges: tuple[Edge, ...]
    loops: tuple[Loop, ...]
    channels: tuple[Channel, ...]
    instances: tuple[RoleInstance, ...]
    batch: BatchSizes
    sizes: Mapping[str, ModelSize | None]
    memory: MemoryEstimate | None
    recipe_hash: str
    engine: str
    layout: Mapping[str, LayoutConfig]
    profile_hash: str = ""

    def __getitem__(self, name: str) -> PlannedNode:
        return next(node for node in self.nodes if node.name == name)

    def ranks_of(self, action: Action) -> tuple[int, ...]:
        """The ranks that take part in a chain entry."""
        match action:
            case RunNode(node):
                return self[node].layout.ranks
            case Load(layout, _):
                return layout.ranks
            case Push(channel):
                return self.channel(channel).source_ranks
            case Pull(channel):
                return self.channel(channel).target_ranks
            case _:
                return action.ranks

    def channel(self, name: str) -> Channel:
        """The channel of a name."""
        return next(channel for channel in self.channels if channel.name == name)

    def loop_of(self, rank: int) -> Loop:
        """The loop that a rank walks."""
        return next(loop for loop in self.loops if rank in loop.ranks)

    @property
    def helpers(self) -> Mapping[int, int]:
        """Ranks that use the device of another one, with the latter."""
        return {rank: owner for loop in self.loops for rank, owner in loop.helpers}

    @property
    def is_continuous(self) -> bool:
        """Whether a loop generates continuously."""
        return any(loop.is_continuous for loop in self.loops)

    @property
    def leading(self) -> Loop:
        """The loop whose iterations are the steps of the run: the one that trains what others generate with."""
        return next(loop for loop in self.loops if not loop.lag)

    @property
    def schedule(self) -> tuple[Action, ...]:
        """The chain entries of all loops, those of one loop after those of another."""
        return tuple(action for loop in self.loops for action in loop.schedule)

    @property
    def repeat(self) -> Repeat | None:
        """The entry that repeats others, if there is one."""
        return next((action for action in self.schedule if isinstance(action, Repeat)), None)

    @property
    def windowed(self) -> Windowed | None:
        """The entry that runs others window by window, if there is one."""
        return next((action for action in self.schedule if isinstance(action, Windowed)), None)

    @property
    def agents(self) -> tuple[str, ...]:
        """Roles that sample responses, in order: the column `agent` holds places in it."""
        return tuple(dict.fromkeys(x.node.role for x in self.nodes if x.spec.samples and x.node.role))

    def chain(self, rank: int) -> tuple[Action, ...]:
        """What one rank does in each iteration of its loop, in order."""
        return self._part_of(rank, self.loop_of(rank).schedule)

    def _part_of(self, rank: int, actions: Sequence[Action]) -> tuple[Action, ...]:
        """The entries that a rank takes part in, inside repetitions and windows too."""
        part: list[Action] = []
        for action in actions:
            if rank not in self.ranks_of(action):
                continue
            match action:
                case Repeat():
                    part.append(replace(action, body=self._part_of(rank, action.body)))
                case Windowed():
                    kept = [place for place, inner in enumerate(action.body) if rank in self.ranks_of(inner)]
                    body = tuple(action.body[place] for place in kept)
                    part.append(replace(action, body=body, delays=tuple(action.delays[place] for place in kept)))
                case _:
                    part.append(action)
        return tuple(part)

    def chains(self) -> dict[tuple[int, ...], tuple[Action, ...]]:
        """All chains, each under the ranks that share it."""
        members: dict[tuple[int, ...], list[int]] = {}
        taking_part = [frozenset(self.ranks_of(action)) for action in flat(self.schedule)]
        for rank in range(self.world_size):
            key = tuple(index for index, ranks in enumerate(taking_part) if rank in ranks)
            members.setdefault(key, []).append(rank)
        return {tuple(ranks): self.chain(ranks[0]) for ranks in members.values()}

    def to_json(self) -> dict[str, object]:
        """The plan as JSON-able values, ranks as ranges."""
        repeat = self.repeat and {
            "nodes": list(self.repeat.nodes),
            "ranks": format_ranks(self.repeat.ranks),
            "groups": self.repeat.num_groups,
            "max_rounds": self.repeat.max_rounds,
        }
        return {
            "recipe": self.recipe_name,
            "workflow": self.workflow,
            "world_size": self.world_size,
            "hash": self.hash(),
            "batch": asdict(self.batch),
            "nodes": [
                {
                    **asdict(node.node),
                    "layout": str(node.layout),
                    "reads": dict(node.reads),
                    "writes": list(node.writes),
                    "rows": node.row_set_after,
                    "max_staleness": node.max_staleness,
                }
                for node in self.nodes
            ],
            "loops": [
                {
                    "name": loop.name,
                    "nodes": list(loop.nodes),
                    "ranks": format_ranks(loop.ranks),
                    "lag": loop.lag,
                    "is_continuous": loop.is_continuous,
                }
                for loop in self.loops
            ],
            "channels": [
                {
                    "name": channel.name,
                    "kind": channel.kind,
                    "source": channel.source,
                    "target": channel.target,
                    "capacity": channel.capacity,
                    "max_staleness": channel.max_staleness,
                    "max_bytes": channel.max_bytes,
                    "sends": [str(transfer) for transfer in channel.transfers],
                }
                for channel in self.channels
            ],
            "repeat": repeat,
            "windows": 1 if self.windowed is None else self.windowed.num_windows,
            "pruned": list(self.pruned),
            "edges": [asdict(edge) for edge in self.edges],
            "roles": [
                {
                    **asdict(instance),
                    "layout": str(instance.layout),
                    "engine_layout": str(instance.engine_layout) if instance.engine_layout else None,
                }
                for instance in self.instances
            ],
            "chains": {format_ranks(ranks): [str(a) for a in actions] for ranks, actions in self.chains().items()},
            "memory_bytes": None if self.memory is None else self.memory.to_json(),
        }

    def _facts_of(self, action: Action) -> list[object]:
        """What ranks must agree on to execute an entry together."""
        facts: list[object] = [str(action), format_ranks(self.ranks_of(action))]
        match action:
            case Load(layout, columns):
                facts += [str(layout), columns, action.portions, action.in_turns]
            case Reshard():
                facts += [str(action.source_layout), str(action.target_layout), action.row_set, action.columns]
                facts += [action.keep_groups, action.is_late, str(action.spare_layout), action.num_updates]
            case Repeat():
                facts += [str(action.layout), action.num_groups, action.max_rounds]
            case Windowed():
                facts += [action.delays, action.num_windows]
        return facts

    def hash(self) -> str:
        """Fingerprint of the plan, which must be equal on all ranks before they start together."""
        facts = [
            self.recipe_hash,
            *([self.profile_hash] if self.profile_hash else []),
            self.world_size,
            [[instance.role, instance.engine] for instance in self.instances],
            [
                [n.name, n.node.run, n.node.roles, str(n.layout), dict(n.reads), n.writes, n.max_staleness]
                for n in self.nodes
            ],
            [
                [
                    loop.name,
                    format_ranks(loop.ranks),
                    loop.lag,
                    loop.is_continuous,
                    loop.stragglers,
                    loop.helpers,
                    [self._facts_of(action) for action in flat(loop.schedule)],
                ]
                for loop in self.loops
            ],
            [
                [c.name, c.source, c.target, c.capacity, c.max_staleness, [self._facts_of(t) for t in c.transfers]]
                for c in self.channels
            ],
        ]
        return hashlib.sha256(json.dumps(facts, sort_keys=True).encode()).hexdigest()
