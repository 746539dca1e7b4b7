"""The layouts that are worth a plan, and a first estimate of each: thousands in a fraction of a second."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from leaderless.config.layout import ChannelConfig, LayoutConfig
from leaderless.planner.layout import format_ranks
from leaderless.planner.placement.node_seconds import StepSeconds
from leaderless.planner.placement.stage_seconds import Profile
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import PlannedNode
from leaderless.planner.workflow.builtin_stages import ROW_STAGES

FEW_RANKS = 16
"""Up to this number of ranks every size of a pool is tried."""
MAX_UNITS = 5
"""Nodes that are placed one by one; further ones stay with the last of these."""
EIGHTHS = 8
PORTIONS = ((1, 1), (3, 2), (2, 1), (3, 1), (4, 1), (8, 1))
"""Prompts of a rank with a device of its own, and of one that helps, in proportion."""

Pool = tuple[int, int]
"""First rank of a pool, and the one after its last."""


@dataclass(frozen=True)
class Candidate:
    """A layout that may be chosen.

    Attributes:
        pools: Ranks of each node; empty if all nodes run on all ranks.
        lag: Iterations that generation is ahead.
        leader: Node that generates; empty if it is not ahead.
        windows: Parts in which rows pass through the pools.
        cache: Treatment of the caches of responses in progress when new weights arrive; empty if `leader` does not
            generate continuously.
        helpers: Ranks that also generate, each on the device of one that trains, and the latter.
        portions: Relative shares of the prompts of the ranks that generate; empty if all are equal.
    """

    pools: Mapping[str, Pool]
    lag: int = 0
    leader: str = ""
    windows: int = 1
    cache: Literal["keep", "recompute", ""] = ""
    helpers: tuple[tuple[int, int], ...] = ()
    portions: tuple[int, ...] = ()

    @property
    def layout(self) -> dict[str, LayoutConfig]:
        """The section `layout` of a recipe."""
        return {name: LayoutConfig(ranks=self._ranks(pool)) for name, pool in self.pools.items()}

    def _ranks(self, pool: Pool) -> str:
        ranks = range(*pool)
        is_helped = bool(self.helpers) and pool == self.pools[self.leader]
        return format_ranks((*ranks, *(helper for helper, _ in self.helpers)) if is_helped else tuple(ranks))

    @property
    def channels(self) -> dict[str, ChannelConfig]:
        """The section `channels` of a recipe."""
        if not self.cache:
            return {self.leader: ChannelConfig(capacity=self.lag)} if self.lag else {}
        settings = {"capacity": self.lag, "mode": "continuous", "cache": self.cache}
        if self.helpers:
            settings |= {"helpers": dict(self.helpers), "portions": self.portions}
        return {self.leader: ChannelConfig.model_validate(settings)}

    def __str__(self) -> str:
        """As in `rollout, reward 0-5; policy 6-7; lag 1`."""
        if not self.pools:
            return "all nodes on all ranks"
        names: dict[Pool, list[str]] = {}
        for name, pool in self.pools.items():
            names.setdefault(pool, []).append(name)
        parts = [f"{', '.join(nodes)} on {a}{f'-{b - 1}' if b - a > 1 else ''}" for (a, b), nodes in names.items()]
        if self.lag:
            parts.append(f"continuous, at most {self.lag} ahead" if self.cache else f"lag {self.lag}")
        if self.helpers:
            helps = f"help{'s' * (len(self.helpers) == 1)} with portions {self.portions[0]}:{self.portions[-1]}"
            parts.append(f"{len(self.helpers)} {helps}")
        return "; ".join(parts + ([f"{self.windows} windows"] if self.windows > 1 else []))


@dataclass(frozen=True)
class Allowed:
    """Choices that the user allows.

    Attributes:
        max_lag: Most iterations that generation may be ahead.
        max_windows: Most parts in which rows pass through pools in lockstep.
        alone: Nodes without a model that may have ranks of their own.
        max_ahead: Most iterations that continuous generation may be ahead; 0 if there must be none.
        cache: Treatment of the caches of responses in progress when new weights arrive.
        helpers: Workers, the last ones, that have no own device, and generate on the devices of ranks that train.
    """

    max_lag: int = 0
    max_windows: int = 1
    alone: Collection[str] = ()
    max_ahead: int = 0
    cache: Literal["keep", "recompute"] = "keep"
    helpers: int = 0


def placeable(plan: Plan) -> list[PlannedNode]:
    """The nodes that a recipe may give ranks; those that the planner adds have none of their own."""
    return [node for node in plan.nodes if node.node.run not in ROW_STAGES]


def units_of(plan: Plan, alone: Collection[str] = ()) -> list[list[str]]:
    """Nodes in groups that always share ranks, in order; the first of each generates, trains or scores.

    What needs whole groups, as advantages do, goes with the training that follows; rewards go with what generates.
    Nodes without a model that are named by `alone` may have ranks of their own, and so may rewards of judges that are
    models of the run.
    """
    units: dict[str, list[str]] = {}
    trained = {role for node in plan.nodes for role, use in node.uses if use == "train"}
    for node in placeable(plan):
        use = node.spec.role_use
        if use == "generate":
            units[f"generate {node.name}"] = [node.name]
        elif use in {"score", "train"}:
            role = node.node.role or node.name
            units.setdefault(f"{'train' if role in trained else 'score'} {role}", []).append(node.name)
        elif node.name in alone or node.node.judges:
            units[f"alone {node.name}"] = [node.name]
    first_trained = next((name for name in units if name.startswith("train")), None)
    for node in placeable(plan):
        is_free = node.spec.role_use == "none" and node.name not in alone and not node.node.judges
        if is_free and first_trained and not node.spec.streams:
            units[first_trained].append(node.name)
    found = list(units.values())
    return [*found[: MAX_UNITS - 1], [name for unit in found[MAX_UNITS - 1 :] for name in unit]][:MAX_UNITS]


def two_pools(plan: Plan) -> list[Candidate]:
    """Generation on one half of the ranks and the rest on the other, in lockstep and ahead; none without two ranks.

    What follows generation stays there if it only looks at rows.
    """
    generating = [node.name for node in plan.nodes if node.spec.role_use == "generate"]
    if plan.world_size < 2 or not generating:
        return []
    half = plan.world_size // 2
    others = [x.name for x in placeable(plan) if x.spec.role_use != "generate" and not x.spec.streams]
    pools = dict.fromkeys(generating, (0, half)) | dict.fromkeys(others, (half, plan.world_size))
    return [Candidate(pools), Candidate(pools, lag=1, leader=generating[0])]


def candidates_of(plan: Plan, allowed: Allowed) -> Iterator[Candidate]:
    """All candidates, the simplest first, for the plan of a recipe with all nodes on all ranks.

    With helpers, all of them help: a rank has something to do.
    """
    if allowed.helpers:
        yield from _helped(plan, allowed)
        return
    yield Candidate({})
    alone = allowed.alone
    units = [unit for unit in units_of(plan, alone) if unit]
    generating = {node.name for node in plan.nodes if node.spec.role_use == "generate"}
    judging = {node.name for node in plan.nodes if node.node.judges}
    streaming = {node.name for node in plan.nodes if node.spec.streams}
    for parts in _partitions(list(range(len(units)))):
        for sizes in _sizes(plan.world_size, len(parts)):
            pools = _place(units, parts, sizes)
            num_streaming = sum(any(name in streaming for unit in part for name in units[unit]) for part in parts)
            windows = _doublings(allowed.max_windows) if num_streaming > 1 else [1]
            yield from (Candidate(pools, windows=number) for number in windows)
            ahead = [part for part in parts if any(units[unit][0] in generating for unit in part)]
            if len(ahead) == 1 and all(units[unit][0] in generating | judging for unit in ahead[0]):
                yield from _ahead(pools, units[ahead[0][0]][0], allowed)
    # What generates, or all that has a model, uses all ranks, and the others share them out.
    for shared in ([unit for unit in units if unit[0] not in generating], [unit for unit in units if unit[0] in alone]):
        everywhere = {name: (0, plan.world_size) for unit in units if unit not in shared for name in unit}
        for parts in _partitions(list(range(len(shared)))) if everywhere else ():
            for sizes in _sizes(plan.world_size, len(parts)):
                yield Candidate(everywhere | _place(shared, parts, sizes))


def _ahead(pools: Mapping[str, Pool], leader: str, allowed: Allowed) -> Iterator[Candidate]:
    """Candidates whose generation is ahead of training."""
    yield from (Candidate(pools, lag, leader) for lag in _doublings(allowed.max_lag) if lag)
    yield from (Candidate(pools, lag, leader, cache=allowed.cache) for lag in _doublings(allowed.max_ahead) if lag)


def _helped(plan: Plan, allowed: Allowed) -> Iterator[Candidate]:
    """Candidates whose last ranks generate on the devices of ranks that train."""
    num_devices, prompts = plan.world_size - allowed.helpers, plan.batch.prompts_per_step
    generating = [node.name for node in plan.nodes if node.spec.role_use == "generate"]
    others = [name for unit in units_of(plan) for name in unit if name not in generating]
    for size in _steps(num_devices, 2) if len(generating) == 1 and others else ():
        if num_devices - size < allowed.helpers:
            continue
        pools = dict.fromkeys(generating, (0, size)) | dict.fromkeys(others, (size, num_devices))
        helpers = tuple((num_devices + place, size + place) for place in range(allowed.helpers))
        for own, helping in PORTIONS:
            portions = (own,) * size + (helping,) * allowed.helpers
            if prompts * min(portions) < sum(portions):
                continue  # a rank would have none
            for lag in _doublings(allowed.max_ahead):
                yield Candidate(pools, lag, generating[0], cache=allowed.cache, helpers=helpers, portions=portions)


def _doublings(most: int) -> list[int]:
    """Powers of two below a number, and the number."""
    return [*(1 << power for power in range(most.bit_length()) if 1 << power < most), most]


def _partitions(units: Sequence[int]) -> Iterator[list[list[int]]]:
    """All ways to divide units into two or more parts, in the order of their first units."""

    def divide(rest: Sequence[int]) -> Iterator[list[list[int]]]:
        if not rest:
            yield []
            return
        for parts in divide(rest[:-1]):
            for place in range(len(parts)):
                yield [*parts[:place], [*parts[place], rest[-1]], *parts[place + 1 :]]
            yield [*parts, [rest[-1]]]

    return (parts for parts in divide(units) if len(parts) > 1)


def _sizes(world_size: int, num_pools: int) -> Iterator[tuple[int, ...]]:
    """Sizes of pools that make up all ranks: every one of few ranks, else powers of two and eighths."""
    if num_pools == 1:
        yield (world_size,)
        return
    for size in _steps(world_size, num_pools):
        for rest in _sizes(world_size - size, num_pools - 1) if world_size - size >= num_pools - 1 else ():
            yield (size, *rest)


def _steps(world_size: int, num_pools: int) -> list[int]:
    if world_size <= FEW_RANKS:
        return list(range(1, world_size))
    eighths = {world_size * part // EIGHTHS for part in range(1, EIGHTHS)}
    if num_pools > 2:
        return sorted(eighths)
    powers = {1 << power for power in range(world_size.bit_length()) if 1 << power < world_size}
    return sorted(size for size in eighths | powers | {world_size - size for size in powers} if 0 < size < world_size)


def _place(units: Sequence[Sequence[str]], parts: Sequence[Sequence[int]], sizes: Sequence[int]) -> dict[str, Pool]:
    pools: dict[str, Pool] = {}
    begin = 0
    for part, size in zip(parts, sizes, strict=True):
        pools |= {name: (begin, begin + size) for unit in part for name in units[unit]}
        begin += size
    return pools


class Rough:
    """Estimates the seconds of candidates by the mean seconds of their nodes."""

    def __init__(self, plan: Plan, profile: Profile, steps: StepSeconds) -> None:
        self._plan, self._profile, self._steps = plan, profile, steps
        self._means: dict[tuple[str, int, bool], float] = {}
        self._works: dict[tuple[int, ...], tuple[float, float]] = {}
        samplers = {node.name for node in plan.nodes if node.spec.samples}
        order = [node.name for node in plan.nodes]
        self._sampler = next((name for name in order if name in samplers), order[0])
        self._graded = {node.name for node in plan.nodes if steps.is_graded_ahead(node)}
        self._generating = {node.name for node in plan.nodes if node.spec.role_use == "generate"}
        self._sources = {
            node.name: sorted({name for name in node.reads.values() if name in order}) for node in plan.nodes
        }
        trained = {role for node in plan.nodes for role, use in node.uses if use == "train"}
        self._synced = {node.name for node in plan.nodes if node.name in self._generating and node.node.role in trained}
        self._trains = {node.node.role: node.name for node in plan.nodes if node.spec.role_use == "train"}

    def seconds(self, candidate: Candidate) -> float:
        """Seconds of a step, about."""
        pools, finished = self._pools(candidate), dict[str, float]()
        clocks: dict[Pool, float] = dict.fromkeys(pools.values(), 0.0)
        busy: dict[Pool, float] = dict.fromkeys(clocks, 0.0)
        generated = graded = 0.0
        for node in self._plan.nodes:
            name, pool = node.name, pools[node.name]
            begin = max(value for other, value in clocks.items() if _meet(pool, other))
            for source in self._sources[name]:
                moved = 0.0 if pools[source] == pool else self._profile.reshard_s
                begin = max(begin, finished[source] + moved)
            is_balanced = pool != pools[self._sampler]
            key = (name, pool[1] - pool[0], is_balanced)
            if key not in self._means:
                num_shards = max(1, (pool[1] - pool[0]) // node.layout.ranks_per_shard)
                self._means[key] = float(self._steps.of(node, num_shards, is_balanced=is_balanced).mean())
            finished[name] = begin + self._means[key]
            busy[pool] += self._means[key]
            graded += self._means[key] * (name in self._graded)
            for other, value in clocks.items():
                if _meet(pool, other):
                    clocks[other] = max(value, finished[name])
            if name in self._generating:
                generated = max(generated, finished[name])
        total = max(finished.values())
        syncs = sum(pools[x] != pools[self._trains[self._plan[x].node.role or ""]] for x in self._synced)
        total += syncs * self._profile.sync_s
        if candidate.cache:
            own, helping = self._work(candidate)
            trained = total - generated - graded  # rewards are computed while others are generated
            # A device that trains and generates does one after the other.
            device = helping + trained if candidate.helpers else 0.0
            return max(own, graded, trained, device, (total - graded) / (candidate.lag + 1))
        if candidate.lag:
            return max(generated, total - generated)
        # Windows hide at best all but their own part of what the busiest pool does not do itself.
        busiest = max(busy.values())
        return busiest + (total - busiest) / candidate.windows

    def _work(self, candidate: Candidate) -> tuple[float, float]:
        """Seconds of the first and the last rank that generates all the time, of an iteration; the last may help."""
        first, end = candidate.pools[candidate.leader]
        portions = candidate.portions or (1,) * (end - first)
        if portions not in self._works:
            means = self._steps.rates(self._plan[candidate.leader], portions).work.mean(axis=0)
            self._works[portions] = float(means[0]), float(means[-1])
        return self._works[portions]

    def _pools(self, candidate: Candidate) -> dict[str, Pool]:
        """The ranks of all nodes; those without an entry run where the first node that they come after does."""
        pools: dict[str, Pool] = {}
        for node in self._plan.nodes:
            before: Sequence[str] = [name for name in node.node.after if name in pools]
            default = pools[before[0]] if before else (0, self._plan.world_size)
            pools[node.name] = candidate.pools.get(node.name, default)
        return pools


def _meet(first: Pool, second: Pool) -> bool:
    return first[0] < second[1] and second[0] < first[1]
