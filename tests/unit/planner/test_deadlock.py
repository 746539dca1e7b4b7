"""No ranks wait for each other forever: plans run on threads, with a transport that only waits.

Every rank is a thread that walks its chain, and every rank that pushes into a channel has another thread, its lane,
which sends. What ranks do together is a meeting of them. A world in which all threads wait, and none of what they wait
for can come, is stuck.
"""

from __future__ import annotations

import random
import threading
from collections import defaultdict, deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import partial

import pytest
from hypothesis import HealthCheck, assume, example, given, settings
from hypothesis import strategies as st
from tests.unit.planner import test_joins, test_schedule
from tests.unit.recipes import plan_of
from tests.unit.worker import test_channels

from leaderless.config import RecipeError
from leaderless.planner import (
    Action,
    Channel,
    Layout,
    Load,
    Loop,
    Plan,
    Pull,
    Push,
    Repeat,
    Reshard,
    RunNode,
    SyncWeights,
    Windowed,
)
from leaderless.planner.graph.loops import find_circle, lag_of

DEADLINE_S = 60.0
"""Longest wait of a thread. A stuck world is noticed at once, so that only a broken test takes as long."""


class StuckError(Exception):
    """All threads wait for each other."""


@dataclass
class World:
    """Threads that walk chains, and what they wait for.

    Attributes:
        plan: Plan whose entries they execute.
        num_iterations: Iterations of every loop.
        taken: Iterations of the source whose content a rank has taken out of a channel, by channel, rank and iteration.
        in_flight: Most iterations that a rank has pushed and some rank that takes them from it has not pulled.
        stuck: Whether all threads wait for each other.
    """

    plan: Plan
    num_iterations: int
    taken: dict[tuple[str, int, int], set[int]] = field(default_factory=dict)
    in_flight: dict[str, int] = field(default_factory=lambda: defaultdict(int))
    stuck: bool = False
    _changed: threading.Condition = field(default_factory=threading.Condition)
    _waiting: dict[int, Callable[[], bool]] = field(default_factory=dict)
    _alive: int = 0
    _errors: list[Exception] = field(default_factory=list)
    _arrived: dict[object, set[int]] = field(default_factory=lambda: defaultdict(set))
    _labels: dict[object, set[int]] = field(default_factory=lambda: defaultdict(set))
    _queues: dict[tuple[str, int], deque[int]] = field(default_factory=lambda: defaultdict(deque))
    _pushed: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    _pulled: dict[tuple[str, int], int] = field(default_factory=lambda: defaultdict(int))
    _closed: set[int] = field(default_factory=set)

    def run(self, chains: Mapping[int, Sequence[Action]]) -> World:
        """Let every rank walk its chain for all iterations; returns the world after that."""
        channels = [channel for channel in self.plan.channels if channel.transfers and channel.capacity]
        tasks = [partial(self._walk_all, rank, chain) for rank, chain in chains.items()]
        tasks += [partial(self._send, channel, rank) for channel in channels for rank in channel.source_ranks]
        self._alive = len(tasks)
        threads = [threading.Thread(target=self._guarded, args=(task,), daemon=True) for task in tasks]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join(DEADLINE_S)
            assert not thread.is_alive(), "a thread has not come to an end"
        if self._errors:
            raise self._errors[0]
        return self

    def _guarded(self, task: Callable[[], None]) -> None:
        try:
            task()
        except StuckError:
            pass
        except Exception as error:  # noqa: BLE001 - it is raised again where all threads end
            self._errors.append(error)
            self.stuck = True
        with self._changed:
            self._alive -= 1
            self._changed.notify_all()

    def _wait(self, is_so: Callable[[], bool]) -> None:
        """Wait until something is so; the lock is held."""
        me = threading.get_ident()
        while not is_so():
            self._waiting[me] = is_so
            if len(self._waiting) == self._alive and not any(other() for other in self._waiting.values()):
                self.stuck = True
                self._changed.notify_all()
            if self.stuck:
                raise StuckError
            assert self._changed.wait(DEADLINE_S), "a wait has no end"
            del self._waiting[me]

    def _meet(self, key: object, ranks: Sequence[int], rank: int, label: int | None = None) -> None:
        """Wait for all ranks; those with a label hand it to the others."""
        with self._changed:
            self._arrived[key].add(rank)
            if label is not None:
                self._labels[key].add(label)
            self._changed.notify_all()
            self._wait(lambda: len(self._arrived[key]) == len(ranks))

    def _walk_all(self, rank: int, chain: Sequence[Action]) -> None:
        for iteration in range(1, self.num_iterations + 1):
            self._walk(rank, chain, iteration, ())
        with self._changed:
            self._closed.add(rank)
            self._changed.notify_all()

    def _walk(self, rank: int, chain: Sequence[Action], iteration: int, turn: tuple[int, ...]) -> None:
        for action in chain:
            match action:
                case Repeat():
                    whole = self.plan.repeat
                    assert whole is not None
                    for number in range(iteration % 3):  # as many rounds as ranks agree on, perhaps none
                        self._meet((str(whole), iteration, number), whole.ranks, rank)
                        self._walk(rank, action.body, iteration, (*turn, number))
                case Windowed():
                    for inner, window in action.turns():
                        self._walk(rank, [inner], iteration, (*turn, window))
                case Push(name):
                    self._push(self.plan.channel(name), rank, iteration)
                case Pull(name):
                    self._pull(self.plan.channel(name), rank, iteration)
                case Load():
                    pass
                case RunNode() | Reshard() | SyncWeights():
                    self._meet((action, iteration, turn), self.plan.ranks_of(action), rank)

    def _push(self, channel: Channel, rank: int, iteration: int) -> None:
        if iteration + lag_of(channel, self.plan.loops) > self.num_iterations:
            return  # nobody takes it
        queue = self._queues[channel.name, rank]
        with self._changed:
            self._wait(lambda: len(queue) < max(1, channel.capacity))
            queue.append(iteration)
            self._pushed[channel.name, rank] += 1
            self._note_in_flight(channel, rank)
            self._changed.notify_all()
        if not channel.capacity:
            self._send_first(channel, rank)

    def _note_in_flight(self, channel: Channel, rank: int) -> None:
        """How many iterations of a rank some rank has not taken yet."""
        for transfer in channel.transfers:
            if rank in transfer.source_layout:
                for other in transfer.target_layout.ranks:
                    number = self._pushed[channel.name, rank] - self._pulled[channel.name, other]
                    self.in_flight[channel.name] = max(self.in_flight[channel.name], number)

    def _send(self, channel: Channel, rank: int) -> None:
        """The lane of a rank: send what is in its queue, in order."""
        queue = self._queues[channel.name, rank]
        while True:
            with self._changed:
                self._wait(lambda: bool(queue) or rank in self._closed)
                if not queue:
                    return
            self._send_first(channel, rank)

    def _send_first(self, channel: Channel, rank: int) -> None:
        queue = self._queues[channel.name, rank]
        for index, transfer in enumerate(channel.transfers):
            if rank in transfer.source_layout:
                number = self._count("sent", channel, rank, index)
                self._meet((channel.name, number, index), transfer.ranks, rank, label=queue[0])
        with self._changed:
            queue.popleft()
            self._changed.notify_all()

    def _pull(self, channel: Channel, rank: int, iteration: int) -> None:
        if iteration <= lag_of(channel, self.plan.loops):
            return  # nothing has been made for it
        found: set[int] = set()
        with self._changed:
            self._pulled[channel.name, rank] += 1  # it takes part from here on
        for index, transfer in enumerate(channel.transfers):
            if rank in transfer.target_layout:
                key = channel.name, self._count("taken", channel, rank, index), index
                self._meet(key, transfer.ranks, rank)
                found |= self._labels[key]
        self.taken[channel.name, rank, iteration] = found

    def _count(self, what: str, channel: Channel, rank: int, index: int) -> int:
        """How often a rank has taken part in a transfer; no two threads count the same."""
        counted = self._queues[f"{what} {channel.name} {index}", rank]
        counted.append(1)
        return len(counted)


def walked(plan: Plan, num_iterations: int = 3, changed: Mapping[int, Sequence[Action]] | None = None) -> World:
    """A plan after some iterations of its loops; some ranks may walk another chain than the plan's."""
    chains = {rank: plan.chain(rank) for loop in plan.loops for rank in loop.ranks}
    return World(plan, num_iterations).run(chains | dict(changed or {}))


def check(world: World) -> None:
    """Check that all has finished, and that channels have carried what they are for."""
    assert not world.stuck
    for channel in world.plan.channels:
        lag = lag_of(channel, world.plan.loops)
        for rank in channel.target_ranks if channel.transfers else ():
            for iteration in range(lag + 1, world.num_iterations + 1):
                assert world.taken[channel.name, rank, iteration] == {iteration - lag}
        assert world.in_flight[channel.name] <= max(1, channel.capacity)


# Plans of recipes

FEW = settings(
    max_examples=max(15, settings.default.max_examples // 30),
    suppress_health_check=[HealthCheck.filter_too_much],
    deadline=None,
)


@FEW
@given(case=test_schedule.cases())
def test_no_plan_without_channels_gets_stuck(case):
    check(walked(test_schedule.planned(case)))


@FEW
@given(case=test_joins.graphs())
def test_no_plan_with_joins_and_selections_gets_stuck(case):
    check(walked(test_schedule.planned(case)))


@FEW
@given(case=test_channels.cases())
def test_no_plan_with_channels_gets_stuck(case):
    try:
        plan = case.plan()
    except RecipeError:
        assume(False)
        raise
    check(walked(plan, num_iterations=5))


POOLS = {"layout": {"rollout": {"ranks": "0-1"}, "policy": {"ranks": "2-3"}}}


@pytest.mark.parametrize(
    ("workflow", "sections"),
    [
        ("grpo", POOLS),
        ("grpo", POOLS | {"batch": {"windows_per_step": 3}, "algorithm": {"kl": {"coefficient": 0.1}}}),
        ("dapo", POOLS),
        ("grpo", POOLS | {"channels": {"rollout": {"capacity": 1}}}),
        ("grpo", POOLS | {"channels": {"rollout": {"capacity": 3}}}),
    ],
)
def test_built_in_workflows_do_not_get_stuck(workflow, sections):
    check(walked(plan_of(workflow, 4, **sections), num_iterations=7))


def test_weights_are_those_that_the_lag_promises():
    world = walked(plan_of("grpo", 4, **POOLS, channels={"rollout": {"capacity": 2}}), num_iterations=7)
    weights = {k: made for (name, rank, k), made in world.taken.items() if (name, rank) == ("policy=>rollout", 1)}
    assert weights == {4: {1}, 5: {2}, 6: {3}, 7: {4}}


# What must be noticed


def test_two_entries_in_another_order_on_one_rank_get_stuck():
    plan = plan_of("grpo", 4, **POOLS)
    first, *between, last = plan.chain(2)
    assert not walked(plan).stuck
    assert walked(plan, changed={2: [last, *between, first]}).stuck
    plan = plan_of("grpo", 4, **POOLS, channels={"rollout": {"capacity": 1}})
    pull, *others, push = plan.chain(3)
    assert not walked(plan).stuck
    assert walked(plan, changed={3: [others[0], pull, *others[1:], push]}).stuck


@pytest.mark.parametrize("lag", [-1, -2])
def test_a_circle_without_lag_gets_stuck_and_is_found(lag):
    plan = plan_of("grpo", 4, **POOLS, channels={"rollout": {"capacity": 1}})
    without = replace(plan, loops=(replace(plan.loops[0], lag=lag), plan.loops[1]))
    assert walked(without, num_iterations=5).stuck
    assert set(find_circle(without.loops, without.channels)) >= {"rollout: pull(policy=>rollout)"}


def test_loops_that_both_pull_before_they_push_get_stuck_and_are_found():
    plan = general([0, 0], [("rows", 0, 1, 1), ("rows", 1, 0, 1)], seed=0)
    loops = [
        replace(loop, schedule=tuple(sorted(loop.schedule, key=str))) for loop in plan.loops
    ]  # pull, push, reshard
    plan = replace(plan, loops=tuple(loops))
    assert walked(plan).stuck
    assert len(find_circle(plan.loops, plan.channels)) == 4
    eager = replace(loops[0], schedule=loops[0].schedule[::-1])
    plan = replace(plan, loops=(eager, loops[1]))
    check(walked(plan))
    assert find_circle(plan.loops, plan.channels) == ()


# Any loops and channels


def general(
    lags: Sequence[int], ends: Sequence[tuple[str, int, int, int]], seed: int, *, is_whole: bool = True
) -> Plan:
    """A plan of loops on two ranks each, with the channels (kind, source, target, capacity), its entries shuffled."""
    shuffled = random.Random(seed)
    loops: list[Loop] = []
    pools = [(2 * number, 2 * number + 1) for number in range(len(lags))]
    channels: list[Channel] = []
    for number, (kind, source, target, capacity) in enumerate(ends):
        layouts = []
        for pool in (pools[source], pools[target]):
            ranks = pool if is_whole else shuffled.choice([pool, pool[:1], pool[1:]])
            layouts.append(Layout(ranks, len(ranks)))
        channel = partial(Channel, f"c{number}", source=f"l{source}", target=f"l{target}", capacity=capacity)
        if kind == "rows":
            moves = tuple(Reshard(f"n{part}", "rows", (), *layouts, keep_groups=False) for part in range(2))
            channels.append(channel(kind="rows", max_staleness=1, reshards=moves))
        else:
            channels.append(channel(kind="weights", max_staleness=1, sync=SyncWeights("policy", *layouts)))
    for number, lag in enumerate(lags):
        entries: list[Action] = [Push(c.name) for c in channels if c.source == f"l{number}"]
        entries += [Pull(c.name) for c in channels if c.target == f"l{number}"]
        layout = Layout(pools[number], 2)
        entries += [Reshard(f"own{part}", "rows", (), layout, layout, keep_groups=False) for part in range(2)]
        shuffled.shuffle(entries)
        loops.append(Loop(f"l{number}", (), pools[number], tuple(entries), lag))
    return replace(plan_of("grpo"), world_size=2 * len(lags), loops=tuple(loops), channels=tuple(channels))


@st.composite
def generals(draw) -> Plan:
    lags = draw(st.lists(st.integers(0, 2), min_size=2, max_size=3))
    pairs = [(a, b) for a in range(len(lags)) for b in range(len(lags)) if a != b]
    channel = st.tuples(st.sampled_from(["rows", "weights"]), st.sampled_from(pairs), st.integers(0, 3))
    drawn = draw(st.lists(channel, min_size=1, max_size=4))
    ends = [(kind, *pair, capacity) for kind, pair, capacity in drawn]
    return general(lags, ends, draw(st.integers(0, 99)), is_whole=draw(st.booleans()))


@settings(deadline=None)
@given(plan=generals())
@example(plan=general([0, 0], [("rows", 0, 1, 1), ("rows", 1, 0, 1)], 0))
@example(plan=general([1, 0], [("rows", 0, 1, 1), ("weights", 1, 0, 1)], 3))
@example(plan=general([0, 0], [("rows", 0, 1, 1), ("rows", 0, 1, 0)], 5))
def test_ranks_get_stuck_exactly_where_waits_form_a_circle(plan):
    circle = find_circle(plan.loops, plan.channels)
    world = walked(plan, num_iterations=16)
    sizes = {len(transfer.ranks) for channel in plan.channels for transfer in channel.transfers}
    if not circle:
        check(world)
    elif sizes == {4}:  # all ranks of both loops take part, so each of them waits where its loop does
        assert world.stuck
