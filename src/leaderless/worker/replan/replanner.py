"""Looks at measured seconds during a run, and at the network between hosts, and finds a layout that takes fewer."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Mapping
from functools import partial
from statistics import median

import torch
from rich.markup import escape

from leaderless.distributed.transport import ProcessGroup
from leaderless.planner import Loop, Plan
from leaderless.planner.placement.replan_candidates import describe, propose
from leaderless.planner.placement.replanning import (
    OWN,
    Links,
    NodeSeconds,
    ReplanChoice,
    alternatives,
    choose,
    find_slow,
    loop_seconds,
    lost_seconds,
    pairs_in_rounds,
    step_seconds,
)
from leaderless.worker.asynchronous.channels import between_loops, wait_for
from leaderless.worker.build.parts import Parts

NUM_BYTES = 2 << 20
"""Bytes that either host of a pair sends."""
WHAT = "the test of the network"


def find_slow_links(world: ProcessGroup) -> Links:
    """Find hosts whose network is slow. All ranks of the world call it together.

    Hosts form a circle, and the first rank of each exchanges bytes with the first ranks of its two
    neighbors. Each rank gets the seconds of every pair.
    """
    firsts: dict[int, int] = {}
    for rank in world.ranks:
        firsts.setdefault(world.hosts[rank], rank)
    order = sorted(firsts.values())
    pair_s = torch.zeros(len(order), dtype=torch.float64)
    for pairs in pairs_in_rounds(len(order)):
        for host in pairs:
            pair = order[host], order[(host + 1) % len(order)]
            if world.rank in pair:
                pair_s[host] = _seconds_with(pair[1] if world.rank == pair[0] else pair[0], world)
    agreed = world.max(pair_s, WHAT).tolist()
    places = {world.hosts[rank]: place for place, rank in enumerate(order)}
    return find_slow({rank: places[world.hosts[rank]] for rank in world.ranks}, agreed, NUM_BYTES)


def _seconds_with(peer: int, world: ProcessGroup) -> float:
    """Seconds of an exchange with another rank, after both have met."""
    world.exchange({peer: torch.zeros(1, dtype=torch.uint8)}, [peer], WHAT)
    begin = time.perf_counter()
    world.exchange({peer: torch.zeros(NUM_BYTES, dtype=torch.uint8)}, [peer], WHAT)
    return time.perf_counter() - begin


NUM_LOOKED_AT = 3
"""Steps of which the medians count: one that is slow by chance changes nothing."""
CHANGE = 0.2
"""Relative change of a loop's seconds after which the network is tested."""
LOOKS_AT_SLOW = 20
"""Looks after which the network is tested again while a host is slow, as one that is avoided changes no seconds."""


class Replanner:
    """Chooses among the layouts of `schedule.layouts`, or of the planner's search; the same on all ranks.

    What it has measured is lost when the workers start again; then it measures anew.

    Attributes:
        plans: Plans to choose from, by name.
        choice: Layout chosen after the last step, if layouts were compared then.
    """

    def __init__(self, parts: Parts) -> None:
        """Plan all layouts that are named; nothing has been measured yet."""
        self._recipe, self._world, self._display = parts.recipe, parts.transport.world, parts.display
        self._directory, self._fits = parts.directory, partial(parts.roles.memory.fits, parts.recipe)
        self.plans = alternatives(parts.recipe, parts.plan)
        self._current = self._name_of(parts.plan)
        self._nodes = {node.name: NodeSeconds() for node in parts.plan.nodes}
        self._besides: dict[str, dict[str, float]] = {}
        self._waits = [wait_for(channel) for channel in between_loops(parts.plan)]
        self._switch_s, self._lost_s = parts.roles.seconds, 0.0
        self._steps: deque[Mapping[str, float]] = deque(maxlen=NUM_LOOKED_AT)
        self._is_warm = False
        self._num_switches = 0
        self._links, self._num_looks_at_slow = Links(), 0
        self._took: list[float] = []
        self.choice: ReplanChoice | None = None

    def _name_of(self, plan: Plan) -> str:
        """The name of a plan, which is one of those to choose from afterwards."""
        name = next((name for name, known in self.plans.items() if known.layout == plan.layout), describe(plan))
        self.plans[name] = plan
        return name

    def _search(self) -> None:
        """Let the planner find layouts, in place of those that it has found before."""
        known = {name: self.plans[name] for name in (OWN, self._current)}
        taken = {describe(plan) for plan in known.values()}
        found = propose(self._recipe, known[self._current], self._nodes, self._fits, self._links)
        self.plans = known | {name: plan for name, plan in found.items() if name not in taken}

    def measure(self, spent: Mapping[str, float], seconds: float) -> None:
        """Take in the seconds of an iteration of this rank's loop.

        `spent` are those in each of its nodes, and in its waits for other loops; `seconds` those of the whole
        iteration.
        """
        self.choice = None
        if self._is_warm:  # the first iteration with a layout is slow, as caches and memory are new
            waited = sum(spent.get(name, 0.0) for name in self._waits)
            loop = self.plans[self._current].loop_of(self._world.rank)
            self._steps.append({**spent, _key(loop): seconds - waited})
        self._is_warm = True

    def is_due(self, step: int) -> bool:
        """Whether layouts are compared after a step."""
        return step % self._recipe.schedule.replan_every_steps == 0 and step < self._recipe.steps

    def look(self, step: int) -> Plan | None:
        """Compare layouts after a step. All ranks of the world call it together.

        Returns:
            The plan to continue with; None to keep the one in force.
        """
        if not self._agree():
            return None
        if not self._recipe.schedule.layouts:
            self._search()
        expected = {
            name: step_seconds(plan, self._nodes, self._besides.get(name, self._besides[self._current]), self._links)
            for name, plan in self.plans.items()
        }
        num_left = self._recipe.steps - step
        switch_s = self._switch_s + self._lost_s
        self.choice = choose(expected, self._current, switch_s, num_left, self._recipe.schedule)
        return self.plans[self.choice.name] if self.choice.is_worth_it else None

    def _agree(self) -> bool:
        """Measure nodes by their slowest rank, and what else a step takes; False if a rank has seen too little."""
        plan = self.plans[self._current]
        names = [*self._nodes, *map(_key, plan.loops)]
        mine = [median(step.get(name, 0.0) for step in self._steps) if self._steps else 0.0 for name in names]
        is_short = len(self._steps) < NUM_LOOKED_AT
        values = torch.tensor([is_short, self._switch_s, *mine], dtype=torch.float64)
        is_short, self._switch_s, *agreed = self._world.max(values, "the seconds of nodes").tolist()
        if is_short:
            return False
        took = agreed[len(self._nodes) :]
        self._test_links(took)
        self._lost_s = lost_seconds(plan, dict(zip((loop.name for loop in plan.loops), took, strict=True)))
        for name, seconds in zip(self._nodes, agreed, strict=False):
            ranks = plan[name].layout.ranks
            self._nodes[name].measure(len(ranks), seconds, self._links.of(ranks))
        self._besides[self._current] = {
            loop.name: seconds - loop_seconds(plan, loop, self._nodes, self._links)
            for loop, seconds in zip(plan.loops, took, strict=True)
        }
        return True

    def _test_links(self, took: list[float]) -> None:
        """Test the network where loops take another time than at the last look, and sometimes while a host is slow.

        At the first look with a layout nobody knows whether they do, so it is tested then, too.
        """
        changed = not self._took or any(
            abs(new - old) > CHANGE * old for new, old in zip(took, self._took, strict=False)
        )
        self._took = took
        self._num_looks_at_slow += bool(self._links.byte_s)
        if changed or self._num_looks_at_slow > LOOKS_AT_SLOW:
            self._links, self._num_looks_at_slow = find_slow_links(self._world), 0

    def switched(self, step: int, seconds: float) -> None:
        """Note that the chosen plan is in force now, and show it; `seconds` is what the switch has taken."""
        assert self.choice is not None, "a plan is adopted after it has been chosen"
        before, choice = self._current, self.choice
        self._switch_s, self._current = seconds, choice.name
        self._num_switches += 1
        self.forget_steps()
        self._display.say(
            f"step {step}: from now on layout [bold]'{escape(choice.name)}'[/] instead of '{escape(before)}': "
            f"{choice.expected_s:.3g} s a step are expected, where it was {choice.now_s:.3g} s; the switch took "
            f"{seconds:.2g} s"
        )
        if self._world.rank == self._world.ranks[0]:
            facts = {"now_s": choice.now_s, "expected_s": choice.expected_s, "seconds": seconds}
            with self._directory.may_fail(self._directory.events):
                self._directory.append_event("switch", {"step": step, "from": before, "to": choice.name, **facts})

    def follow(self, plan: Plan) -> None:
        """Go on from another plan, as a checkpoint was made under it."""
        self._current = self._name_of(plan)
        self.forget_steps()

    def forget_steps(self) -> None:
        """Measure anew."""
        self._steps.clear()
        self._took = []
        self._is_warm = False

    def numbers(self) -> dict[str, float]:
        """Metrics `schedule/switches` and, after a choice, `schedule/gain`."""
        gain = {} if self.choice is None else {"schedule/gain": self.choice.gain}
        return {"schedule/switches": self._num_switches, **gain}


def _key(loop: Loop) -> str:
    """Key of a loop's seconds among the nodes' seconds; a node may have its name."""
    return f"loop {loop.name}"
