"""How the ranks of a pool divide work and rows."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from itertools import groupby
from math import prod

from leaderless.config import Recipe, RecipeError, nearest
from leaderless.config.layout import LayoutConfig
from leaderless.planner.workflow import Node, Workflow, spec_of
from leaderless.planner.workflow.builtin_stages import JOIN, ROW_STAGES


@dataclass(frozen=True)
class Cluster:
    """The ranks that a plan is made for.

    Attributes:
        world_size: Number of workers, one per device.
        engine: Engine on its machines where the recipe leaves it open.
    """

    world_size: int
    engine: str = "native"

    def __post_init__(self) -> None:
        if self.world_size < 1:
            raise ValueError(f"world_size={self.world_size}: must be at least 1")


MODEL_AXES = ("pp", "cp", "tp")
"""Axes along which ranks hold the same rows, from the outermost: ranks of one `tp` are next to each other."""
PART = "part"
"""Name of the ranks with the same place along `tp` and `pp`."""
EXPERTS = "ep"
"""Name of the ranks that divide the experts of each layer, and send each other tokens."""
COPIES = "copies"
"""Name of the ranks of a stage with the same experts, which divide their weights."""
BACK = "back"
"""Name of the peers along `pp` for what goes from later stages to earlier ones."""


@dataclass(frozen=True)
class Layout:
    """A pool of ranks and how it is divided: a mesh with the axes `dp`, `pp`, `cp` and `tp`, from the outermost.

    Rows are divided into `dp` shards. The ranks of one shard are neighbors in `ranks`, which ascend, so that
    model-parallel peers (`tp`, `pp`, `cp`) share a host; they hold the same rows. The ranks of a stage divide experts
    in another way: each `ep` neighbors have all experts of its layers.
    """

    ranks: tuple[int, ...]
    dp: int
    tp: int = 1
    pp: int = 1
    cp: int = 1
    ep: int = 1

    @property
    def ranks_per_shard(self) -> int:
        """Ranks that hold the same rows."""
        return self.tp * self.pp * self.cp

    @property
    def sizes(self) -> Mapping[str, int]:
        """Size of each axis, from the outermost."""
        return {"dp": self.dp, "pp": self.pp, "cp": self.cp, "tp": self.tp}

    @property
    def axes(self) -> tuple[str, ...]:
        """The axes of the mesh: `dp`, and others along which there are several ranks."""
        return ("dp", *(axis for axis in MODEL_AXES if self.sizes[axis] > 1))

    def coordinates(self, rank: int) -> Mapping[str, int]:
        """The place of a rank of the pool along each axis."""
        place, coordinates = self._position[rank], dict[str, int]()
        for axis in reversed(list(self.sizes)):
            place, coordinates[axis] = divmod(place, self.sizes[axis])
        return {axis: coordinates[axis] for axis in self.sizes}

    def peers(self, rank: int, axis: str) -> tuple[int, ...]:
        """The ranks that differ from one of the pool in their place along an axis only, it included, ascending."""
        names = list(self.sizes)
        stride = prod(self.sizes[name] for name in names[names.index(axis) + 1 :])
        first = self._position[rank] - self.coordinates(rank)[axis] * stride
        return self.ranks[first : first + self.sizes[axis] * stride : stride]

    @property
    def peer_groups(self) -> Sequence[Callable[[int], tuple[int, ...]]]:
        """From a rank to its peers, for each of its process groups in a mesh of several axes; empty for one axis.

        These are the peers along each axis, the shard, and the ranks with the same part of the model, unless an axis
        has the same ones; and the ranks that divide experts or have the same ones, unless they are others of these.
        """
        groups: tuple[Callable[[int], tuple[int, ...]], ...] = ()
        if len(self.axes) > 1:
            groups = tuple(partial(self.peers, axis=axis) for axis in self.axes)
        if len(self.axes) > 2:
            groups = (*groups, self.shard, self.part) if self.tp * self.pp > 1 else (*groups, self.shard)
        first = self.ranks[0]  # process groups that coincide for one rank do so for all
        known = {(first,), self.ranks, *(peers(first) for peers in groups)}
        return (*groups, *(peers for peers in (self.experts, self.copies) if peers(first) not in known))

    def part(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place along `tp` and `pp` as a rank of the pool, it included, ascending."""
        along, width = self.coordinates(rank), self.cp * self.tp
        firsts = range(along["pp"] * width + along["tp"], len(self.ranks), self.pp * width)
        return tuple(self.ranks[place] for first in firsts for place in range(first, first + width, self.tp))

    def stage(self, rank: int) -> tuple[int, ...]:
        """The ranks with the same place along `pp` as a rank of the pool, it included, ascending."""
        width = self.cp * self.tp
        firsts = range(self.coordinates(rank)["pp"] * width, len(self.ranks), self.pp * width)
        return tuple(self.ranks[place] for first in firsts for place in range(first, first + width))

    def experts(self, rank: int) -> tuple[int, ...]:
        """The ranks that divide the experts of each layer with a rank of the pool, it included, ascending."""
        if self.ep == 1:
            return (rank,)
        stage = self.stage(rank)
        first = stage.index(rank) // self.ep * self.ep
        return stage[first : first + self.ep]

    def copies(self, rank: int) -> tuple[int, ...]:
        """The ranks that have the same experts as a rank of the pool, if these are divided; it included, ascending."""
        if self.ep == 1:
            return (rank,)
        stage = self.stage(rank)
        return stage[stage.index(rank) % self.ep :: self.ep]

    @property
    def num_copies(self) -> int:
        """Number of ranks with the same experts."""
        return len(self.ranks) // (self.pp * self.ep)

    def named_peers(self, rank: int) -> Mapping[str, tuple[int, ...]]:
        """The peers of a rank by what they have in common: its process groups, as `EngineSetup` names them."""
        peers = {axis: self.peers(rank, axis) for axis in self.axes}
        if self.tp * self.pp > 1:
            peers[PART] = self.part(rank)
        if self.ep > 1:
            peers[EXPERTS] = self.experts(rank)
            if self.num_copies > 1:
                peers[COPIES] = self.copies(rank)
        return peers

    @cached_property
    def _position(self) -> dict[int, int]:
        return {rank: position for position, rank in enumerate(self.ranks)}

    def __contains__(self, rank: int) -> bool:
        return rank in self._position

    def place(self, rank: int) -> int:
        """The place of a rank of the pool among its ranks."""
        return self._position[rank]

    def shard_of(self, rank: int) -> int:
        """The shard of rows that a rank of the pool holds."""
        return self._position[rank] // self.ranks_per_shard

    def place_in_shard(self, rank: int) -> int:
        """The place of a rank among those that hold the same rows."""
        return self._position[rank] % self.ranks_per_shard

    def shard(self, rank: int) -> tuple[int, ...]:
        """The ranks that hold the same rows as a rank of the pool, it included, ascending."""
        first = self.shard_of(rank) * self.ranks_per_shard
        return self.ranks[first : first + self.ranks_per_shard]

    def represents(self, rank: int) -> bool:
        """Whether a rank stands for its shard, whose ranks hold the same rows.

        Of a pipeline only the last stage has the outputs of the model, so one of its ranks does.
        """
        return self._position[rank] % self.ranks_per_shard == (self.pp - 1) * self.cp * self.tp

    @cached_property
    def representatives(self) -> tuple[int, ...]:
        """The ranks that stand for their shards."""
        return tuple(rank for rank in self.ranks if self.represents(rank))

    @property
    def flat(self) -> Layout:
        """The same ranks, each with rows of its own."""
        return Layout(self.ranks, len(self.ranks))

    @property
    def row_key(self) -> tuple[tuple[int, ...], int]:
        """Equal for layouts under which every rank has the same rows."""
        return self.ranks, self.dp

    def holds_rows_like(self, other: Layout) -> bool:
        """Whether every rank has the same rows under both layouts."""
        return self.row_key == other.row_key

    def __str__(self) -> str:
        """As in `ranks 0-3 dp=2 tp=2`."""
        others = {name: self.sizes[name] for name in ("tp", "pp", "cp")} | {"ep": self.ep}
        sizes = [f"{name}={size}" for name, size in others.items() if size > 1]
        return " ".join([f"ranks {format_ranks(self.ranks)}", f"dp={self.dp}", *sizes])


def places_of_shard(shard: int, portions: Sequence[int], prompts_per_step: int) -> range:
    """The places of a shard among the prompts of a step, which shards divide in the proportion of their portions."""
    total, before = sum(portions), sum(portions[:shard])
    return range(prompts_per_step * before // total, prompts_per_step * (before + portions[shard]) // total)


def in_proportion(one: Sequence[int], other: Sequence[int]) -> bool:
    """Whether ranks with these portions divide prompts as those with others."""
    return len(one) == len(other) and all(a * sum(other) == b * sum(one) for a, b in zip(one, other, strict=True))


def most_prompts_of_rank(recipe: Recipe, num_shards: int) -> int:
    """The most prompts of a step that one of the ranks that generate has; `num_shards` divide them, if evenly."""
    portions = next((one.portions for one in recipe.open_channels.values() if one.portions), (1,) * num_shards)
    return -(-recipe.batch.prompts_per_step * max(portions) // sum(portions))


def check_model_axes(decorator: str, axes: Sequence[str]) -> None:
    """Refuse axes of a decorator that are none of `pp`, `cp` and `tp`."""
    unknown = [axis for axis in axes if axis not in MODEL_AXES]
    if unknown:
        raise ValueError(f"@{decorator}(axes={axes!r}): '{unknown[0]}' is none of {', '.join(MODEL_AXES)}")


def all_ranks(*layouts: Layout) -> tuple[int, ...]:
    """All ranks of some layouts, ascending."""
    return tuple(sorted({rank for layout in layouts for rank in layout.ranks}))


def format_ranks(ranks: Sequence[int]) -> str:
    """Ascending ranks as ranges: `0-3,8`."""
    runs = ([rank for _, rank in run] for _, run in groupby(enumerate(ranks), lambda place: place[1] - place[0]))
    return ",".join(str(run[0]) if len(run) == 1 else f"{run[0]}-{run[-1]}" for run in runs)


def make_layouts(recipe: Recipe, workflow: Workflow, cluster: Cluster) -> dict[str, Layout]:
    """The layout of every node.

    A node without a layout in the recipe runs where its role is trained, if that node has one; else where the first
    node that it comes after runs; else on all ranks. How an engine spans ranks is its own matter: what generates where
    others train, or comes after a node that generates, has rows on each of these ranks.
    """
    names = [node.name for node in workflow.nodes if node.run not in ROW_STAGES]
    for name in recipe.layout:
        if name not in names:
            raise RecipeError.at(
                f"layout.{name}", f"the workflow '{workflow.name}' has no such node{nearest(name, names)}"
            )
    layouts = {name: _make_layout(f"layout.{name}", config, cluster) for name, config in recipe.layout.items()}
    trainers = {
        role: node.name for node in workflow.nodes for name, role in node.roles if spec_of(node).roles[name] == "train"
    }
    everywhere = _make_layout("layout", LayoutConfig(), cluster)
    for node in workflow.order():
        if node.name not in layouts:
            trainer = trainers.get(node.role) if node.role else None
            # What the planner adds is no leader: its own place follows from the nodes that it is added for.
            written = (name for name in node.after if workflow[name].run not in ROW_STAGES)
            leader = trainer if trainer in recipe.layout else next(written, None)
            layouts[node.name] = layouts[leader] if leader else everywhere
            if leader and _generates(workflow[leader]) != _generates(node):
                layouts[node.name] = layouts[leader].flat
    _place_joins(recipe, workflow, layouts)
    return layouts


def _generates(node: Node) -> bool:
    return "generate" in spec_of(node).roles.values()


def _place_joins(recipe: Recipe, workflow: Workflow, layouts: dict[str, Layout]) -> None:
    """Put nodes that join rows where the first node that reads them runs, or where one of the parts was made.

    Samples of one prompt that were made on different ranks are resharded part by part, so they may not meet. If whole
    groups are needed there, the rows are joined elsewhere and then sent with their groups.
    """
    order = workflow.order()
    joins = {node.name: node for node in order if node.run == JOIN}
    parts = {name: [x for x in node.after[1:] if x in joins] for name, node in joins.items()}
    for name in reversed([name for name in joins if not any(name in others for others in parts.values())]):
        reader = next(node.name for node in order if name in node.after)
        nodes = (*parts[name], name)
        candidates = (layouts[reader], *(layouts[joins[part].after[0]] for part in nodes))
        found = next((layout for layout in candidates if _groups_meet(recipe, workflow, layouts, name, layout)), None)
        if found is None:
            raise RecipeError.at(
                f"layout.{reader}",
                f"node '{reader}' joins rows that were made on other ranks, and whole groups are needed on "
                f"{layouts[reader]}: put '{reader}' on ranks where no node needs whole groups",
            )
        layouts.update(dict.fromkeys(nodes, found))


def _groups_meet(recipe: Recipe, workflow: Workflow, layouts: Mapping[str, Layout], join: str, layout: Layout) -> bool:
    """Whether rows may be joined on a layout: each group is on one shard of it, or no node there needs that."""
    before = workflow.ancestors()
    made_on = [layouts[name] for name in before[join] if name in layouts and spec_of(workflow[name]).rows != "same"]
    if layout.dp == 1 or all(layout.holds_rows_like(other) for other in made_on):
        return True
    return not any(
        spec_of(node).under(recipe).needs_whole_groups
        or (node.name in recipe.layout and recipe.layout[node.name].groups == "whole")
        for node in workflow.nodes
        if join in before[node.name] and layouts[node.name].holds_rows_like(layout)
    )


def _make_layout(key: str, config: LayoutConfig, cluster: Cluster) -> Layout:
    try:
        ranks = config.ranks_of(cluster.world_size)
    except ValueError as error:
        raise RecipeError.at(f"{key}.ranks", str(error)) from error
    model_parallel = config.tp * config.pp * config.cp
    dp = config.dp or len(ranks) // model_parallel
    if dp * model_parallel != len(ranks):
        sizes = f"dp {dp} x " * bool(config.dp) + f"tp {config.tp} x pp {config.pp} x cp {config.cp}"
        raise RecipeError.at(key, f"{sizes} does not divide its {len(ranks)} ranks ({format_ranks(ranks)})")
    if (count := len(ranks) // config.pp) % config.ep:
        able = ", ".join(str(one) for one in range(1, count + 1) if count % one == 0)
        holders = f"{count} ranks of each stage" if config.pp > 1 else f"{count} ranks of the node"
        raise RecipeError.at(f"{key}.ep", f"ep={config.ep} does not divide the {holders}: it can be {able}")
    return Layout(ranks, dp, config.tp, config.pp, config.cp, config.ep)
