"""How a plan fits into the memory of accelerators, as text for a terminal and as JSON-able values."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace

from rich.console import Console
from rich.text import Text

from leaderless.base.values import Json
from leaderless.config import Recipe
from leaderless.planner.memory.estimate import estimate_memory, plan_pool
from leaderless.planner.memory.fit import MARGIN, Fit, fit_plan
from leaderless.planner.memory.limits import CachePool
from leaderless.planner.memory.rank import MemoryEstimate, format_bytes
from leaderless.planner.plan import Plan
from leaderless.planner.show.text import print_section
from leaderless.planner.simulate.cluster import GIB

KEPT = {"all": "weights and gradients", "weights": "weights", "nothing": "nothing"}
"""Parts that ranks keep whole, by the value of `training.keep_whole`."""


@dataclass(frozen=True)
class Fitted:
    """A plan on accelerators with some memory.

    Attributes:
        plan: The plan, with the memory of what ranks would do there.
        fit: Verdict, and use of the memory that is left.
        pools: Pools for keys and values by the role of their native engine.
        gib: Memory of each accelerator.
    """

    plan: Plan
    fit: Fit
    pools: dict[str, CachePool]
    gib: float

    @classmethod
    def of(cls, recipe: Recipe, plan: Plan, gib: float) -> Fitted:
        """Decide as ranks do before they load anything."""
        fit, pools = fit_plan(recipe, plan, int(gib * GIB), is_cpu=False), dict[str, CachePool]()
        if plan.memory is None:
            return cls(plan, fit, pools, gib)
        found = estimate_memory(recipe, plan, fit.pass_tokens, room=fit.room)
        assert found is not None, "it was known before"
        native = [one for one in plan.instances if one.has_engine and one.engine == "native"]
        for instance in native if recipe.body is None else []:
            if pool := plan_pool(recipe, plan.instances, plan.sizes, instance, fit.room.cache):
                pools[instance.role] = pool
        memory = MemoryEstimate(plan.memory.cpu, found.accelerator)
        return cls(replace(plan, memory=memory), fit, pools, gib)

    def print(self, console: Console) -> None:
        """Print what ranks would do with the memory, or why it is not enough."""
        print_section(console, f"On accelerators with {self.gib:g} GiB each", list(self._lines()))

    def _lines(self) -> Iterator[tuple[str | Text, str]]:
        memory, room = self.plan.memory, self.fit.room
        if memory is None:
            yield "unknown", "the memory of the plan is not known, as is said above"
            return
        if self.fit.problem:
            yield Text("does not fit" if self.fit.is_hopeless else "may not fit", "bold red"), self.fit.problem
            return
        largest, most = format_bytes(memory.accelerator.peak), format_bytes(int(MARGIN * self.gib * GIB))
        yield "fits", f"the fullest rank takes {largest}; up to {most} are used, as this is an estimate"
        yield "a pass", f"at most {self.fit.pass_tokens:,} tokens"
        yield "logits", f"chunks of at most {room.max_logits:,}"
        yield "kept whole", KEPT[room.keeps]
        for role, pool in self.pools.items():
            waits = "all sequences at their longest" if room.cache.most_tokens is None else "sequences wait for room"
            yield f"{role}'s engine", f"keys and values of {pool.tokens:,} tokens: {waits}"
            if any(one.role == role and not one.is_engine_only for one in self.plan.instances if one.has_engine):
                yield "", f"{'keeps' if pool.stays else 'releases'} its memory while it sleeps"

    def to_json(self) -> Json:
        """JSON-able values."""
        room = self.fit.room
        return {
            "memory_gib": self.gib,
            "fits": not self.fit.problem,
            "problem": self.fit.problem,
            "pass_tokens": self.fit.pass_tokens,
            "max_logits": room.max_logits,
            "keep_whole": room.keeps,
            "pools": {role: {"tokens": one.tokens, "stays": one.stays} for role, one in self.pools.items()},
        }
