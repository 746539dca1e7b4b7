"""A first estimate of each candidate, for which no plan is made: thousands of them in a fraction of a second."""

from __future__ import annotations

from collections.abc import Sequence

from leaderless.planner.placement.candidates import Candidate, Pool
from leaderless.planner.placement.node_seconds import StepSeconds
from leaderless.planner.placement.stage_seconds import Profile
from leaderless.planner.plan import Plan


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
