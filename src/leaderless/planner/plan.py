"""The plan: what every rank does, in order, what is sent between ranks, and which of them exchange."""

from __future__ import annotations

import hashlib
import json
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import cache
from typing import TYPE_CHECKING

from leaderless.config.layout import LayoutConfig
from leaderless.planner.entries import (
    Action,
    Load,
    Pull,
    Push,
    Repeat,
    Reshard,
    RunNode,
    Windowed,
    flat,
)
from leaderless.planner.layout import Layout, all_ranks, format_ranks
from leaderless.planner.memory.decoder_size import ModelSize
from leaderless.planner.plan_parts import BatchSizes, Channel, Edge, Loop, PlannedNode, RoleInstance
from leaderless.planner.workflow import Workflow

if TYPE_CHECKING:
    from leaderless.planner.memory.rank import MemoryEstimate


_CHANNEL = ("name", "kind", "source", "target", "capacity", "max_staleness", "max_bytes")


@dataclass(frozen=True)
class Plan:
    """Result of planning a recipe, its workflow and a cluster; the same object on every rank.

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
        graph: The workflow as it is written, from which the run is planned again.
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
    graph: Workflow
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
    def continuous_loops(self) -> list[Loop]:
        """The loops that generate continuously."""
        return [loop for loop in self.loops if loop.is_continuous]

    @property
    def is_continuous(self) -> bool:
        """Whether a loop generates continuously."""
        return bool(self.continuous_loops)

    @property
    def leading(self) -> Loop:
        """The loop whose iterations are the steps of the run: the one that trains what others generate with."""
        return next(loop for loop in self.loops if not loop.lag)

    @property
    def schedule(self) -> tuple[Action, ...]:
        """The chain entries of all loops, one loop's after another's."""
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
        """Work of one rank in each iteration of its loop, in order."""
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
                {name: getattr(loop, name) for name in ("name", "nodes", "lag", "is_continuous")}
                | {"ranks": format_ranks(loop.ranks)}
                for loop in self.loops
            ],
            "channels": [
                {name: getattr(channel, name) for name in _CHANNEL} | {"sends": list(map(str, channel.transfers))}
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
        """Facts that ranks must agree on to execute an entry together."""
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


def trained_instance(plan: Plan, role: str) -> RoleInstance | None:
    """The instance of a role that is trained; None for a role that is not."""
    return next((one for one in plan.instances if one.role == role and one.is_trained), None)


def trains_reward_model(plan: Plan, role: str) -> bool:
    """Whether a plan trains a role as a reward model."""
    return any(one.node.role == role and one.node.run == "update_reward_model" for one in plan.nodes)


def layouts_with_axes(plan: Plan) -> tuple[Layout, ...]:
    """Layouts whose ranks have process groups along axes, in the order in which these are made."""
    layouts = (layout for one in plan.instances for layout in (one.layout, one.serving_layout))
    return tuple(layout for layout in dict.fromkeys(layouts) if layout.peer_groups)


def process_groups(plan: Plan) -> list[tuple[int, ...]]:
    """Ranks of each process group of the main thread, besides all ranks and those along axes, in the same order."""
    found = [plan.ranks_of(action) for action in flat(plan.schedule)]
    found += [instance.layout.ranks for instance in plan.instances]
    judges = [instance for instance in plan.instances if instance.is_judge]
    # A judge may be asked about held-out responses by other ranks, together with its own.
    found += [all_ranks(one.layout, judge.layout) for one in plan.instances if not one.is_judge for judge in judges]
    for loop in plan.loops:
        found += [loop.ranks, *metric_pools(plan, loop)]
    return list(dict.fromkeys(found))


def metric_pools(plan: Plan, loop: Loop) -> Iterator[tuple[int, ...]]:
    """The ranks that add up metrics together: by entry, by shards of a node, and all of the loop."""
    entries = [*flat(loop.schedule)]
    nodes = (plan[action.node].layout.representatives for action in entries if isinstance(action, RunNode))
    yield from dict.fromkeys([*map(plan.ranks_of, entries), *nodes, loop.ranks])


def communicators(plan: Plan) -> Callable[[int], int]:
    """Make a function that counts the communicators of a rank's accelerator: one for each process group of others.

    Ranks that share a device send through host memory, and so does what has a lane of its own.
    """
    helpers, layouts = plan.helpers, layouts_with_axes(plan)

    def is_counted(ranks: tuple[int, ...]) -> bool:
        members = frozenset(ranks) if helpers else frozenset[int]()
        return len(ranks) > 1 and not any(rank in members and owner in members for rank, owner in helpers.items())

    world = tuple(range(plan.world_size))
    together = filter(is_counted, dict.fromkeys([world, *process_groups(plan)]))
    counts = Counter(rank for ranks in together for rank in ranks)

    @cache  # ranks of the same layouts have as many
    def along_axes(own: tuple[int, ...], place: int) -> int:
        forth = {peers(place) for number in own for peers in layouts[number].peer_groups}
        back = {layouts[number].peers(place, "pp") for number in own if layouts[number].pp > 1}
        return sum(map(is_counted, [*forth, *back]))

    first: dict[tuple[int, ...], int] = {}

    def count(rank: int) -> int:
        own = tuple(number for number, layout in enumerate(layouts) if rank in layout)
        return counts[rank] + along_axes(own, first.setdefault(own, rank))

    return count
