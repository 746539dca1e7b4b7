"""Looks at measured seconds while a run goes on, and finds a layout that takes fewer."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from statistics import median

import torch
from rich.markup import escape

from leaderless.planner import Plan
from leaderless.planner.replan import OWN, Choice, NodeSeconds, alternatives, choose, step_seconds
from leaderless.worker.parts import Parts

NUM_LOOKED_AT = 3
"""Steps of which the medians count: one that is slow by chance changes nothing."""


class Replanner:
    """Chooses among the layouts of `schedule.layouts`, the same on all ranks.

    What it has measured is lost when the workers start again; then it measures anew.
    """

    def __init__(self, parts: Parts) -> None:
        """Plan all layouts; nothing has been measured yet."""
        self._recipe, self._world, self._display = parts.recipe, parts.transport.world, parts.display
        self._directory = parts.directory
        self.plans = alternatives(parts.recipe, parts.plan)
        self._current = self._name_of(parts.plan)
        self._nodes = {node.name: NodeSeconds() for node in parts.plan.nodes}
        self._overhead_s: dict[str, float] = {}
        self._switch_s = parts.roles.seconds
        self._steps: deque[Mapping[str, float]] = deque(maxlen=NUM_LOOKED_AT)
        self._is_warm = False
        self._num_switches = 0
        self.choice: Choice | None = None

    def _name_of(self, plan: Plan) -> str:
        return next((name for name, known in self.plans.items() if known.layout == plan.layout), OWN)

    def look(self, step: int, spent: Mapping[str, float], seconds: float) -> Plan | None:
        """Take in the seconds of a step; where a choice is due, choose. All ranks of the world call it together.

        Args:
            step: Number of the step.
            spent: Seconds of this rank in each of its nodes.
            seconds: Seconds of the whole step.

        Returns:
            The plan to continue with; None to keep the one in force.
        """
        self.choice = None
        if self._is_warm:  # the first step with a layout is slow, as caches and memory are new
            self._steps.append({**spent, "": seconds})
        self._is_warm = True
        is_due = step % self._recipe.schedule.replan_every_steps == 0
        if not is_due or len(self._steps) < NUM_LOOKED_AT or step >= self._recipe.steps:
            return None
        self._agree()
        expected = {
            name: step_seconds(plan, self._nodes) + self._overhead_s.get(name, self._overhead_s[self._current])
            for name, plan in self.plans.items()
        }
        num_left = self._recipe.steps - step
        self.choice = choose(expected, self._current, self._switch_s, num_left, self._recipe.schedule)
        return self.plans[self.choice.name] if self.choice.is_worth_it else None

    def _agree(self) -> None:
        """Measure nodes by their slowest rank, and what a step takes besides."""
        names = [*self._nodes, ""]
        mine = [median(step.get(name, 0.0) for step in self._steps) for name in names]
        values = torch.tensor([*mine, self._switch_s], dtype=torch.float64)
        *agreed, self._switch_s = self._world.max(values, "the seconds of nodes").tolist()
        plan = self.plans[self._current]
        for name, seconds in zip(self._nodes, agreed, strict=False):
            self._nodes[name].measure(len(plan[name].layout.ranks), seconds)
        self._overhead_s[self._current] = agreed[-1] - step_seconds(plan, self._nodes)

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
        self._is_warm = False

    def numbers(self) -> dict[str, float]:
        """Metrics `schedule/switches` and, after a choice, `schedule/gain`."""
        gain = {} if self.choice is None else {"schedule/gain": self.choice.gain}
        return {"schedule/switches": self._num_switches, **gain}
