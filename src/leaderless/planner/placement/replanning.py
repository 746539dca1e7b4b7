"""Plans for a run that has started: other layouts, the seconds they would take, and the choice among them.

Everything here is a pure function of facts that all ranks have agreed on, so all of them make the same choice.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median

from leaderless.config import Problem, Recipe, RecipeError
from leaderless.config.layout import LayoutConfig, ScheduleConfig
from leaderless.planner.entries import Action, Reshard, RunNode, SyncWeights, walked
from leaderless.planner.layout import Cluster, Layout, in_proportion
from leaderless.planner.make_plan import make_plan
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Loop

LEAST_S = 0.01
"""Seconds of a test below which no host counts as slow."""
MUCH_SLOWER = 4.0
"""A host is slow if its test takes this many times as long as the median host's."""


@dataclass(frozen=True)
class Links:
    """The seconds that a byte takes to a slow host and from it.

    Attributes:
        hosts: Number of each rank's host.
        byte_s: Seconds of a byte by host, where the host is slow.
    """

    hosts: Mapping[int, int] = field(default_factory=dict)
    byte_s: Mapping[int, float] = field(default_factory=dict)

    def of(self, ranks: Iterable[int]) -> float:
        """Seconds of a byte among some ranks: the rate of their slowest host, if they are on several."""
        if not self.byte_s:
            return 0.0
        hosts = {self.hosts[rank] for rank in ranks}
        return max((self.byte_s.get(host, 0.0) for host in hosts), default=0.0) if len(hosts) > 1 else 0.0

    def sending(self, sources: Sequence[int], targets: Sequence[int]) -> float:
        """Seconds of a byte that each target receives, from some of the sources: at the rate of the slowest host.

        What goes out of a slow host does so once for each target elsewhere; each target on it receives its own.
        """
        seconds = [0.0]
        for host, byte_s in self.byte_s.items():
            here = sum(self.hosts[rank] == host for rank in sources) / len(sources)
            num_here = sum(self.hosts[rank] == host for rank in targets)
            seconds.append(byte_s * (here * (len(targets) - num_here) + (1 - here) * num_here))
        return max(seconds)


def find_slow(hosts: Mapping[int, int], pair_s: Sequence[float], num_bytes: int) -> Links:
    """Which hosts are slow.

    Each host is tested with the one before it and the one after it, and is as fast as the faster test. So a slow host
    shows if its neighbors are not slow as well; two hosts alone cannot be distinguished.

    Args:
        hosts: Number of each rank's host.
        pair_s: Seconds of a test between each host and the next one, in a circle.
        num_bytes: Bytes that each of the two has sent in the test.
    """
    best = [min(pair_s[host], pair_s[host - 1]) for host in range(len(pair_s))]
    limit = max(LEAST_S, MUCH_SLOWER * median(best)) if best else LEAST_S
    return Links(hosts, {host: seconds / num_bytes for host, seconds in enumerate(best) if seconds > limit})


def pairs_in_rounds(num_hosts: int) -> list[list[int]]:
    """The pairs of a circle of hosts, each by its first host, in rounds in which no host has two tests."""
    if num_hosts < 2:
        return []
    if num_hosts == 2:
        return [[0]]
    even, odd = list(range(0, num_hosts - 1, 2)), list(range(1, num_hosts - 1 + (num_hosts + 1) % 2, 2))
    return [even, odd] if num_hosts % 2 == 0 else [even, odd, [num_hosts - 1]]


MANY = 1 << 30
"""Number of ranks on which shared work takes no time."""
OWN = "layout"
"""Name of the recipe's own layout among those to choose from."""


def with_layout(recipe: Recipe, layout: Mapping[str, LayoutConfig], like: Plan) -> Plan:
    """Plan a recipe with another section `layout`, for the cluster of a plan; a RecipeError if it does not fit."""
    cluster = Cluster(like.world_size, like.engine)
    return make_plan(recipe.model_copy(update={"layout": layout}), like.graph, cluster)


def check_exchangeable(recipe: Recipe, one: Plan, other: Plan) -> None:
    """Refuse plans of which one cannot replace the other while the run goes on; see `check_adoptable`."""
    check_adoptable(recipe, one, other)
    check_adoptable(recipe, other, one)


def check_adoptable(recipe: Recipe, old: Plan, new: Plan) -> None:
    """Refuse what cannot be changed while the run goes on.

    Raises:
        RecipeError: The channels would be others; groups that wait for their turn cannot be divided otherwise; clients
            of an online run know the doors of its ranks; or there is another number of ranks.
    """
    remedy = "stop the run, and continue it with the new layout"
    if _what_flows(old) != _what_flows(new):
        raise RecipeError.at(
            "layout",
            f"sends other columns through channels than the layout in force, which has rows in flight: {remedy}",
        )
    _check_order(old, new)
    if recipe.online is not None:
        raise RecipeError.at("online", f"the plan of an online run cannot be replaced while it goes on: {remedy}")
    if new.world_size != old.world_size:
        raise RecipeError.at(
            "layout",
            f"a plan for {new.world_size} workers cannot replace one for {old.world_size} while the run goes on: stop "
            f"the run, and continue it with {new.world_size} workers",
        )
    for role in _in_stages(old) ^ _in_stages(new):
        raise RecipeError.at("layout", f"the stages of '{role[0]}' cannot change while the run goes on: {remedy}")


def _in_stages(plan: Plan) -> set[tuple[str, Layout]]:
    """The roles of which ranks have some layers each, and their layouts."""
    return {(one.role, one.layout) for one in plan.instances if one.layout.pp > 1 and not one.is_engine_only}


def _what_flows(plan: Plan) -> list[tuple[object, ...]]:
    """The channels between loops, the columns that go through them, and how their loops work."""
    channels = [
        (one.name, one.kind, one.capacity, *((way.source, way.row_set, way.columns) for way in one.reshards))
        for one in plan.channels
        if one.transfers
    ]
    return [*channels, *((loop.is_continuous, loop.stragglers, loop.helpers) for loop in plan.loops)]


def _check_order(old: Plan, new: Plan) -> None:
    """Refuse to divide prompts otherwise where groups are not trained in their order: some rank would have too few."""
    for was, loop in zip(old.loops, new.loops, strict=True):
        before, after = was.portions, loop.portions
        if not loop.is_continuous or loop.stragglers == "wait" or len(after) == 1 or in_proportion(before, after):
            continue
        raise RecipeError.at(
            "layout",
            f"has {len(after)} ranks that generate, where {len(before)} did, but with channels.*.stragglers="
            f"{loop.stragglers} groups are not trained in the order of their prompts, which {len(after)} ranks could "
            "divide: give as many ranks to the node that generates, or one, or set stragglers to wait",
        )


def alternatives(recipe: Recipe, like: Plan) -> dict[str, Plan]:
    """The plans that `schedule.layouts` names, and the recipe's own.

    Raises:
        RecipeError: A layout does not fit, or cannot replace the recipe's during the run.
    """
    plans: dict[str, Plan] = {}
    for name, layout in {OWN: recipe.layout, **recipe.schedule.layouts}.items():
        try:
            plans[name] = like if layout == like.layout else with_layout(recipe, layout, like)
            if recipe.schedule.replan_every_steps:
                check_exchangeable(recipe, like, plans[name])
        except RecipeError as error:
            key = f"schedule.layouts.{name}"
            below = [one.key.removeprefix("layout") * one.key.startswith("layout.") for one in error.problems]
            problems = [Problem(key + end, one.message) for end, one in zip(below, error.problems, strict=True)]
            raise RecipeError(problems) from error
    return plans


@dataclass
class NodeSeconds:
    """Measured seconds of a node in a step, by the number of ranks that shared its work.

    A node that takes longer than before does so on any number of ranks: what is known for other numbers is changed by
    the same factor. But if the network of one of its hosts has become slow at the same time, that is the cause, and the
    node takes longer only on ranks of this host.

    Attributes:
        known: Seconds by number of ranks, on hosts that are not slow.
        num_bytes: Bytes that would take the seconds which a slow network has added.
    """

    known: dict[int, float] = field(default_factory=dict)
    num_bytes: float = 0.0
    _byte_s: dict[int, float] = field(default_factory=dict)

    def measure(self, num_ranks: int, seconds: float, byte_s: float = 0.0) -> None:
        """Take in the newest seconds; a byte among the node's ranks took `byte_s`, or 0 where no host was slow.

        On a number of ranks that is new, seconds are compared with those that were expected of a quick network.
        """
        before, last_byte_s = self.known.get(num_ranks), self._byte_s.get(num_ranks, 0.0)
        if self.known and abs(byte_s - last_byte_s) > max(byte_s, last_byte_s) / 2:
            self.num_bytes = max(0.0, (seconds - self.on(num_ranks, last_byte_s)) / (byte_s - last_byte_s))
        self._byte_s[num_ranks] = byte_s
        seconds = max(0.0, seconds - self.num_bytes * byte_s)
        if before:
            self.known = {size: known * seconds / before for size, known in self.known.items()}
        self.known[num_ranks] = seconds

    def on(self, num_ranks: int, byte_s: float = 0.0) -> float:
        """Seconds on a number of ranks: a part that they share, and, known from two numbers on, one that each has.

        Where a byte among them takes `byte_s` seconds, what they send is added.
        """
        return self._work_on(num_ranks) + self.num_bytes * byte_s

    def _work_on(self, num_ranks: int) -> float:
        if num_ranks in self.known or not self.known:
            return self.known.get(num_ranks, 0.0)
        sizes = sorted(self.known, key=lambda size: abs(size - num_ranks))[:2]
        if len(sizes) == 1:
            return self.known[sizes[0]] * sizes[0] / num_ranks
        one, other = sizes
        shared = (self.known[one] - self.known[other]) / (1 / one - 1 / other)
        shared = min(max(shared, 0.0), self.known[one] * one)
        return self.known[one] + shared * (1 / num_ranks - 1 / one)

    def law(self) -> tuple[float, float]:
        """Seconds that each of any number of ranks has, and those that ranks share."""
        each_s = self.on(MANY)
        size = next(iter(self.known), 1)
        return each_s, max(0.0, (self.on(size) - each_s) * size)


def step_seconds(
    plan: Plan, nodes: Mapping[str, NodeSeconds], besides: Mapping[str, float] | None = None, links: Links | None = None
) -> float:
    """Seconds of a step, from the seconds of its nodes: the duration of the slowest loop, which the others wait for.

    `besides` has the seconds of an iteration outside of its nodes, by the loop's name.
    """
    return max(loop_seconds(plan, loop, nodes, links) + (besides or {}).get(loop.name, 0.0) for loop in plan.loops)


def loop_seconds(plan: Plan, loop: Loop, nodes: Mapping[str, NodeSeconds], links: Links | None = None) -> float:
    """Seconds of an iteration of a loop: the clocks of all ranks on their way through its schedule.

    What is sent takes no time here, but weights do from and to slow hosts, and the ranks that send and receive wait for
    each other. In windows, rows travel in the background, as they do through channels.
    """
    walk = _Walk(plan, nodes, links or Links())
    for action, window, num_windows in walked(loop.schedule):
        walk.enter(action, window, num_windows)
    return max(walk.clocks)


def lost_seconds(plan: Plan, took: Mapping[str, float]) -> float:
    """Seconds that are spent again after a switch, from the seconds of an iteration of each loop.

    Ranks that generate continuously lose their unfinished work: half of the iterations that may be, as some have only
    begun.
    """
    return max(((loop.lag + 1) / 2 * took[loop.name] for loop in plan.continuous_loops), default=0.0)


class _Walk:
    """The clocks of all ranks."""

    def __init__(self, plan: Plan, nodes: Mapping[str, NodeSeconds], links: Links) -> None:
        self._plan, self._nodes, self._links = plan, nodes, links
        self.clocks = [0.0] * plan.world_size
        self._arrived: dict[tuple[tuple[int, ...], int], float] = {}

    def enter(self, action: Action, window: int, num_windows: int) -> None:
        """Go through an entry, or one window of it."""
        match action:
            case RunNode(name):
                self._run(name, window, num_windows)
            case Reshard() if num_windows > 1:
                left = max(self.clocks[rank] for rank in action.source_layout.ranks)
                key = action.target_layout.ranks, window
                self._arrived[key] = max(left, self._arrived.get(key, 0.0))
            case Reshard():
                self._meet(action.ranks)
            case SyncWeights(role, source, target):
                size = self._plan.sizes.get(role)  # four bytes for each weight are the most that ranks are sent
                num_bytes = 4 * size.num_trained if size is not None else 0
                self._meet(action.ranks, self._links.sending(source.ranks, target.ranks) * num_bytes)

    def _run(self, name: str, window: int, num_windows: int) -> None:
        node = self._plan[name]
        ranks = node.layout.ranks
        if node.spec.roles:
            self._meet(ranks)  # weights are gathered
        took = self._nodes[name].on(len(ranks), self._links.of(ranks)) / num_windows if name in self._nodes else 0.0
        arrived = self._arrived.get((ranks, window), 0.0) if num_windows > 1 else 0.0
        for rank in ranks:
            self.clocks[rank] = max(self.clocks[rank], arrived) + took

    def _meet(self, ranks: Sequence[int], seconds: float = 0.0) -> None:
        latest = max(self.clocks[rank] for rank in ranks)
        for rank in ranks:
            self.clocks[rank] = latest + seconds


@dataclass(frozen=True)
class ReplanChoice:
    """The choice among layouts after a step.

    Attributes:
        name: Name of the fastest layout.
        now_s: Seconds of a step as it is.
        expected_s: Seconds of a step with the fastest layout.
        is_worth_it: Whether to switch to it.
    """

    name: str
    now_s: float
    expected_s: float
    is_worth_it: bool

    @property
    def gain(self) -> float:
        """Share of a step's seconds that the fastest layout saves."""
        return 1 - self.expected_s / self.now_s if self.now_s else 0.0


def choose(
    expected: Mapping[str, float], current: str, switch_s: float, num_steps_left: int, config: ScheduleConfig
) -> ReplanChoice:
    """Choose among layouts, by seconds of a step: another one must be faster by enough, and pay for the switch."""
    now_s = expected[current]
    name = min(expected, key=lambda one: (expected[one], one != current))
    saved_s = now_s - expected[name]
    pays = saved_s * min(num_steps_left, config.horizon_steps) >= config.payback * switch_s
    return ReplanChoice(name, now_s, expected[name], saved_s > config.min_gain * now_s and pays)
