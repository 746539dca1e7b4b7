"""Where the recipe's channels cut a workflow into loops, and cuts that could not work.

    ranks 0-3                            ranks 4-7
    rollout -> reward  ===== rows ====>  old -> advantage -> update
       ^                                                       |
       +---------------------- weights ------------------------+

Of this workflow `channels: {rollout: ...}` cuts the edges (===) that leave the ranks of `rollout`. The other edges join
nodes: those on the left go through iterations in one loop, and those on the right in another one.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.layout import ChannelConfig
from leaderless.planner.engines import engine_of
from leaderless.planner.graph.row_sets import DATA
from leaderless.planner.graph.schedule import makers
from leaderless.planner.layout import format_ranks, places_of_shard
from leaderless.planner.plan_parts import PlannedNode, RoleInstance

Pool = frozenset[int]
"""Ranks of nodes that share ranks, directly or through other nodes."""


@dataclass(frozen=True)
class Cut:
    """A workflow in two parts: the rows of the first go to the second through a channel.

    Attributes:
        generating: Nodes of the part that generates.
        training: Nodes of the part that trains.
        config: Settings of the channel.
        max_staleness: Most optimizer steps between the weights that sampled a row and those trained with it.
        is_continuous: Whether the first part works on several iterations at once.
    """

    generating: frozenset[str]
    training: frozenset[str]
    config: ChannelConfig
    max_staleness: int
    is_continuous: bool


def find_cut(
    recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance], repeated: Sequence[str] = ()
) -> Cut | None:
    """Cut the nodes that run as the recipe's channels say; None if there is no channel.

    Nodes that share ranks form a pool. The edges that leave the pool of a named node go through its channel; nodes that
    other edges join go through iterations together.
    """
    if not recipe.open_channels:
        return None
    return _Cutter(recipe, nodes, instances).cut(repeated)


class _Cutter:
    def __init__(self, recipe: Recipe, nodes: Sequence[PlannedNode], instances: Sequence[RoleInstance]) -> None:
        self.recipe, self.nodes, self.instances = recipe, {node.name: node for node in nodes}, instances
        # Nodes that share a rank, directly or through others, cannot work at the same time, so that a cut never divides
        # them.
        pools = _pools(nodes)
        self.pool = {node.name: next(pool for pool in pools if node.layout.ranks[0] in pool) for node in nodes}
        # A node waits for those that write its columns, and for those that make its rows, even if it reads none of
        # them.
        sources = {node.name: {*node.reads.values(), *(x.name for x in makers(nodes, node.row_set))} for node in nodes}
        self.edges = [
            (source, node.name)
            for node in nodes
            for source in sorted(sources[node.name] - {DATA})
            if self.pool[source] != self.pool[node.name]
        ]
        # Nodes that join rows put them into one table.
        shared = (makers(nodes, node.row_set_after) for node in nodes if node.spec.rows == "join")
        # So they go through iterations together, and no cut may part them.
        self.joins = [
            (self.pool[first.name], self.pool[second.name]) for made in shared for first, second in pairwise(made)
        ]
        of_instance = {instance: next(p for p in pools if instance.layout.ranks[0] in p) for instance in instances}
        # Weights that are loaded in the step make their ranks wait for the trainer, as rows do.
        self.weights = [
            (of_instance[trained], of_instance[copy])
            for trained in instances
            for copy in instances
            if trained.is_trained and copy.role == trained.role and of_instance[copy] != of_instance[trained]
        ]

    def cut(self, repeated: Sequence[str]) -> Cut:
        named = self._named_pools()
        self._check_step(next(iter(self.recipe.open_channels)), repeated)
        cut = [edge for edge in self.edges if self.pool[edge[0]] in named]
        for pool, name in named.items():
            if not any(self.pool[source] == pool for source, _ in cut):
                raise self._without_edge(name)
        # What is not cut joins: the pools at both ends go through iterations together.
        kept = [(self.pool[source], self.pool[target]) for source, target in self.edges if (source, target) not in cut]
        # Weights to or from a named pool come back through a channel of their own, and join nothing.
        kept += [pair for pair in self.weights if named.keys().isdisjoint(pair)] + self.joins
        part_of = _joined(set(self.pool.values()), kept)
        # A cut edge whose ends are joined by others is no cut: neither end could be ahead.
        for source, target in cut:
            if part_of[self.pool[source]] == part_of[self.pool[target]]:
                raise self._joined_anyway(named[self.pool[source]], (source, target), cut)
        self._check_parts([frozenset(self._nodes_on(part)) for part in set(part_of.values())])
        # Two parts are left, or an error has been raised: any cut edge shows which one generates.
        first, second = (part_of[self.pool[name]] for name in cut[0])
        name = named[self.pool[cut[0][0]]]
        # Rows of the second part that went into the first would make each wait for the other's iteration.
        back = next((edge for edge in cut if part_of[self.pool[edge[0]]] == second), None)
        if back is not None:
            raise RecipeError.at(
                f"channels.{named[self.pool[back[0]]]}",
                f"'{back[1]}' would take rows of '{back[0]}' through it, but rows go to '{cut[0][1]}', on the ranks of "
                f"'{back[0]}', through channels.{name}: rows can go one way only; run '{back[1]}' on the ranks of "
                f"'{back[0]}'",
            )
        generating, training = frozenset(self._nodes_on(first)), frozenset(self._nodes_on(second))
        self._check_roles(name, generating, training)
        config, is_continuous = self.recipe.channels[name], name in self.recipe.continuous_channels
        if is_continuous:
            self._check_continuous(name, generating)
            self._check_portions(name, self.nodes[cut[0][0]].layout.ranks)
            self._check_helpers(name, generating, training)
        return Cut(generating, training, config, self._staleness(name), is_continuous)

    def _named_pools(self) -> dict[Pool, str]:
        """The first node that a channel names on each pool."""
        named: dict[Pool, str] = {}
        for name, config in self.recipe.open_channels.items():
            if name not in self.nodes:
                raise RecipeError.at(f"channels.{name}", f"no node that runs is called so{nearest(name, self.nodes)}")
            other = named.setdefault(self.pool[name], name)
            if self.recipe.channels[other] != config:
                raise RecipeError.at(
                    f"channels.{name}",
                    f"has {_described(config)}, and channels.{other} has {_described(self.recipe.channels[other])}, "
                    f"but both nodes are on ranks {_format(self.pool[name])}, whose rows go through one channel: leave "
                    "one of the two out",
                )
        return named

    def _check_step(self, name: str, repeated: Sequence[str]) -> None:
        """Steps that go through a workflow more than once, or in parts, have no iterations to put into a channel."""
        if repeated:
            raise RecipeError.at(
                f"channels.{name}",
                f"does not go with a workflow that repeats nodes ({', '.join(repeated)}), whose surplus is as old as "
                "the rounds make it: take a workflow without `repeat`, as grpo, or leave the channel out",
            )
        windows = self.recipe.batch.windows_per_step
        if windows > 1:
            raise RecipeError.at(
                "batch.windows_per_step",
                f"is {windows}, but the rows of an iteration go through channels.{name} in one piece: leave it at 1",
            )
        for setting, action in self.recipe.guards:
            if action == "roll_back":
                raise RecipeError.at(
                    f"guards.{setting}",
                    f"is roll_back, but the loops at the two ends of channels.{name} do not see what happens in each "
                    "other's iterations, so that one would go back alone: set warn, skip or stop, or leave the channel "
                    "out",
                )

    def _without_edge(self, name: str) -> RecipeError:
        """Why there is nothing to put into a channel."""
        pool, ranks = self.pool[name], self.nodes[name].layout.ranks
        there = (node for node in self.nodes.values() if self.pool[node.name] == pool)
        trainer = next((node for node in there if node.spec.role_use == "train"), None)
        if trainer is None or self._use(name) == "train":
            message = f"no rows leave ranks {_format(pool)}, so nothing could be in it: name the node that generates"
            return RecipeError.at(f"channels.{name}", f"{message}, on ranks that do not train")
        shared = sorted({*ranks} & {*trainer.layout.ranks})
        how = f"share rank {shared[0]}" if shared else f"are joined by other nodes on ranks {_format(pool)}"
        return RecipeError.at(
            f"channels.{name}",
            f"'{name}' and '{trainer.name}' {how}, so one waits while the other works, and nothing can be in flight: "
            "give them disjoint ranks under `layout`, or leave the channel out",
        )

    def _joined_anyway(self, name: str, edge: tuple[str, str], cut: Sequence[tuple[str, str]]) -> RecipeError:
        """Why the two ends of a channel would have to go through iterations together all the same."""
        pool = self.pool[edge[0]]
        ways = ((a, b) for a, b in self.edges if self.pool[b] == pool and (a, b) not in cut)
        source, target = next(ways, edge)  # else the rows of both ends are joined into one table
        is_circle = self.pool[source] in self._after(edge[1])
        reason = (
            "it would wait for its own iteration to come back, and none could begin"
            if is_circle
            else f"the two go through iterations together, and with '{edge[1]}' too"
        )
        columns = ", ".join(column for column, provider in self.nodes[target].reads.items() if provider == source)
        return RecipeError.at(
            f"channels.{name}",
            f"'{target}' on ranks {_format(self.nodes[target].layout.ranks)} takes {columns or 'rows'} of '{source}' "
            f"on ranks {_format(self.nodes[source].layout.ranks)} without a channel, so that {reason}: run '{target}' "
            f"on the ranks of '{source}' under `layout`, or leave the channel out",
        )

    def _after(self, name: str) -> set[Pool]:
        """The pools that get something from a node's pool, that pool included."""
        found, size = {self.pool[name]}, 0
        while len(found) > size:
            size = len(found)
            found |= {self.pool[target] for source, target in self.edges if self.pool[source] in found}
        return found

    def _check_parts(self, parts: Sequence[frozenset[str]]) -> None:
        if len(parts) > 2:
            order = list(self.nodes)
            found = sorted((min(order.index(name) for name in part), part) for part in parts)
            names = "; ".join(", ".join(sorted(part, key=order.index)) for _, part in found)
            raise RecipeError.at(
                "channels",
                f"cut the workflow into {len(parts)} loops ({names}), but one that generates and one that trains are "
                "what can run: give the nodes of each shared ranks under `layout`, or leave a channel out",
            )

    def _check_roles(self, name: str, generating: frozenset[str], training: frozenset[str]) -> None:
        """One part generates with the weights that the other trains."""
        key, trained = f"channels.{name}", {self.nodes[x].node.role for x in training if self._use(x) == "train"}
        for node in self.nodes:
            role, ranks = self.nodes[node].node.role, _format(self.nodes[node].layout.ranks)
            if node in generating and self._use(node) == "train":
                message = f"'{node}' trains '{role}' on ranks {ranks}, before the channel"
            elif node in training and self._use(node) == "generate":
                message = f"'{node}' generates with '{role}' on ranks {ranks}, behind the channel"
            elif node in generating and self._use(node) != "generate" and role in trained:
                message = f"'{node}' uses '{role}' on ranks {ranks}, before the channel, with weights that are old then"
            else:
                continue
            remedy = "only the nodes that generate may be before it, and only others may use what they train"
            raise RecipeError.at(key, f"{message}: {remedy}; give '{node}' other ranks under `layout`")
        generated = {self.nodes[x].node.role for x in generating if self._use(x) == "generate"}
        if not generated & trained:
            raise RecipeError.at(
                key,
                f"no role that generates on ranks {_format(self.pool[name])} is trained behind it, so no weights would "
                "come back: leave the channel out",
            )

    def _check_continuous(self, name: str, generating: frozenset[str]) -> None:
        """Ranks that work on groups of several iterations at once take part in nothing together."""
        key, config = f"channels.{name}.mode", self.recipe.channels[name]
        remedy = "run it behind the channel under `layout`, or leave the mode at fixed_lag"
        nodes = [node for node in self.nodes.values() if node.name in generating]
        sampling = [node for node in nodes if self._use(node.name) == "generate"]
        if len(sampling) > 1:
            raise RecipeError.at(
                key,
                f"is continuous, but {' and '.join(sorted(x.name for x in sampling))} generate one after the other: "
                "leave it at fixed_lag",
            )
        (sampler,) = sampling
        if sampler.node.run not in {"rollout", "rollout_with_greedy"}:
            raise RecipeError.at(key, f"is continuous, but '{sampler.name}' runs '{sampler.node.run}': leave it out")
        if sampler.layout.ranks_per_shard > 1:
            raise RecipeError.at(
                key,
                f"is continuous, but '{sampler.name}' has {sampler.layout}: the ranks of one engine would take new "
                "weights at different tokens; give it one rank for each engine, or leave the mode at fixed_lag",
            )
        for node in nodes:
            if node.node.judges:
                judge, role = node.node.judges[0]
                raise RecipeError.at(
                    f"reward.{judge}.role",
                    f"is '{role}', which '{node.name}' asks before the channel '{name}', where ranks generate "
                    f"continuously, each on its own: {remedy}",
                )
            if self._use(node.name) not in {"generate", "none"} or not node.spec.streams:
                what = "scores with a model" if self._use(node.name) != "none" else "needs the groups of all ranks"
                raise RecipeError.at(key, f"is continuous, but '{node.name}' before the channel {what}: {remedy}")
            if node.layout != sampler.layout:
                message = f"'{node.name}' on {node.layout} takes the rows of '{sampler.name}' on {sampler.layout}"
                raise RecipeError.at(key, f"is continuous, but {message}: give both one layout")
        if self.recipe.online is not None:
            raise RecipeError.at(key, "is continuous, but clients of `online` lead the generation: leave it out")
        engine = next(x.engine for x in self.instances if x.role == sampler.node.role and x.generates)
        possible = engine_of(engine).updates
        if config.cache not in possible:
            raise RecipeError.at(
                f"channels.{name}.cache",
                f"is {config.cache}, but the engine '{engine}' can "
                + (f"only {' or '.join(sorted(possible))}" if possible else "take weights only between two iterations")
                + (f": set it to {min(possible)}" if possible else ": leave channels.*.mode at fixed_lag"),
            )

    def _check_portions(self, name: str, ranks: Sequence[int]) -> None:
        """Each rank that generates has a portion, and something to do."""
        key, portions = f"channels.{name}.portions", self.recipe.channels[name].portions
        if not portions:
            return
        if len(portions) != len(ranks):
            raise RecipeError.at(
                key,
                f"has {len(portions)} numbers for the {len(ranks)} ranks that generate, {_format(ranks)}: one for each",
            )
        prompts = self.recipe.batch.prompts_per_step
        idle = [rank for place, rank in enumerate(ranks) if not places_of_shard(place, portions, prompts)]
        if idle:
            raise RecipeError.at(
                key,
                f"leaves nothing of the {prompts} prompts of a step for rank {idle[0]}: raise its portion, or "
                "batch.prompts_per_step",
            )

    def _check_helpers(self, name: str, generating: frozenset[str], training: frozenset[str]) -> None:
        """A rank that helps generates, and the one whose device it uses trains; each has one other at most."""
        key, helpers = f"channels.{name}.helpers", self.recipe.channels[name].helpers
        ranks = [{rank for node in part for rank in self.nodes[node].layout.ranks} for part in (generating, training)]
        for helper, owner in helpers.items():
            for rank, pool, does in ((helper, ranks[0], "generate"), (owner, ranks[1], "train")):
                if rank not in pool:
                    raise RecipeError.at(
                        key,
                        f"says that rank {helper} generates on the device of rank {owner}, but rank {rank} does not "
                        f"{does}: name one of ranks {_format(pool)}",
                    )
        engines = {one.engine for one in self.instances if one.generates and ranks[0].issuperset(one.layout.ranks)}
        running = next((engine for engine in engines if helpers and not engine_of(engine).works_in_steps), None)
        if running is not None:
            raise RecipeError.at(
                key,
                f"lets the engine '{running}' share a device, but it also works between its steps, so that it would "
                "not wait for training: set rollout.engine=native, or leave helpers out",
            )
        shared = [owner for owner in helpers.values() if list(helpers.values()).count(owner) > 1]
        if shared:
            raise RecipeError.at(key, f"puts several ranks on the device of rank {shared[0]}: one can help")

    def _staleness(self, name: str) -> int:
        config, updates = self.recipe.channels[name], self.recipe.batch.updates_per_step
        made = config.capacity * updates
        if config.max_staleness is not None and config.max_staleness < made:
            raise RecipeError.at(
                f"channels.{name}.max_staleness",
                f"is {config.max_staleness}, but capacity={config.capacity} with batch.updates_per_step={updates} "
                f"trains rows that are {made} optimizer steps old: set at least {made}, or lower the capacity",
            )
        return config.max_staleness or made

    def _use(self, name: str) -> str:
        return self.nodes[name].spec.role_use

    def _nodes_on(self, ranks: Pool) -> list[str]:
        return [name for name, pool in self.pool.items() if pool <= ranks]


def _pools(nodes: Iterable[PlannedNode]) -> set[Pool]:
    """Ranks of nodes; nodes that share some have one common set."""
    pools: set[Pool] = set()
    for node in nodes:
        touched = {pool for pool in pools if not pool.isdisjoint(node.layout.ranks)}
        pools = (pools - touched) | {frozenset(node.layout.ranks).union(*touched)}
    return pools


def _joined(pools: set[Pool], pairs: Iterable[tuple[Pool, Pool]]) -> Mapping[Pool, Pool]:
    """For each pool all ranks that it is joined with, its own included."""
    part_of = {pool: pool for pool in pools}
    for pair in pairs:
        whole = frozenset[int]().union(*(part_of[pool] for pool in pair))
        part_of |= {pool: whole for pool in pools if pool <= whole}
    return part_of


def _described(config: ChannelConfig) -> str:
    return ", ".join(f"{key}={value}" for key, value in config.model_dump(exclude_defaults=True).items())


def _format(ranks: Iterable[int]) -> str:
    return format_ranks(tuple(sorted(ranks)))
