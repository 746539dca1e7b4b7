"""The memory of one rank, put together from what its models hold: the same for language models and for bodies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Generic, NamedTuple, TypeVar

from leaderless.config import Recipe
from leaderless.planner.graph.process_groups import communicators
from leaderless.planner.memory.cache_pool import CacheBound
from leaderless.planner.memory.parts import (
    COMMUNICATOR_BYTES,
    CONTEXT_BYTES,
    LIBRARIES_BYTES,
    WORKSPACE_BYTES,
    WRITE_BYTES,
    DeviceMemory,
    MemoryEstimate,
)
from leaderless.planner.plan import Plan
from leaderless.planner.plan_parts import Channel

Parts = dict[str, int]
"""Bytes by what they are for."""
Model = TypeVar("Model")


class Bounds(NamedTuple):
    """Limits of the work of a rank, and where it computes.

    Attributes:
        pass_tokens: Most tokens of a pass; of a body, steps of its environment.
        max_sequences: Most sequences that are decoded; by default what the recipe allows.
        max_logits: Most logits of a chunk.
        is_cpu: Whether it computes on a CPU.
        cache: Bound of the pools of native engines for keys and values.
    """

    pass_tokens: int
    max_sequences: int | None
    max_logits: int
    is_cpu: bool
    cache: CacheBound


@dataclass(frozen=True)
class RankMemory(ABC, Generic[Model]):
    """One rank.

    Attributes:
        recipe: Settings.
        models: Its models.
        everywhere: Models of all ranks.
        pushed: Channels into which it puts something.
        pulled: Channels from which it takes something.
        num_communicators: Process groups for which its accelerator has a communicator.
        bounds: Limits, and the device.
    """

    recipe: Recipe
    models: Sequence[Model]
    everywhere: Sequence[Model]
    pushed: Sequence[Channel]
    pulled: Sequence[Channel]
    num_communicators: int
    bounds: Bounds

    @property
    def is_cpu(self) -> bool:
        """Whether it computes on a CPU."""
        return self.bounds.is_cpu

    @abstractmethod
    def resident(self, model: Model) -> Iterator[tuple[str, int]]:
        """Memory that a model takes all the time."""

    @abstractmethod
    def phases(self, model: Model) -> Iterator[tuple[str, Parts]]:
        """Memory that a model adds in each phase; a phase may have several moments, of which the fullest counts."""

    @abstractmethod
    def saved_bytes(self) -> int:
        """The rank's share of a checkpoint."""

    @abstractmethod
    def waiting(self) -> Parts:
        """Data that stay in the memory of the host, besides copies of checkpoints."""

    @abstractmethod
    def loading(self) -> Parts:
        """Data in the memory of the host at the fullest moment while models are read."""

    def commands(self, libraries: Parts, resumed: Parts) -> Mapping[str, Parts]:  # noqa: ARG002
        """Phases outside of a run's own steps: after the libraries, or when it is resumed."""
        return {}

    def memory(self) -> DeviceMemory:
        """All parts."""
        resident, phases = Parts(), dict[str, Parts]()
        for model in self.models:
            for name, size in self.resident(model):
                resident[name] = resident.get(name, 0) + size
            for name, parts in self.phases(model):
                phases[name] = max(phases.get(name, {}), parts, key=lambda parts: sum(parts.values()))
        saved, is_asynchronous = self.saved_bytes(), self.recipe.checkpoint.asynchronous
        libraries, in_flight = {"libraries": LIBRARIES_BYTES}, min(WRITE_BYTES, saved)
        written = {"files being written": in_flight}
        kept = ({"checkpoint copy": saved, **written} if saved and is_asynchronous else {}) | self.waiting()
        if self.is_cpu:
            if saved:
                phases["checkpoint"] = {} if is_asynchronous else written
            resumed = resident | libraries | {"files being read": in_flight} if saved else {}
            apart = {"loading": libraries | self.loading(), **self.commands(libraries, resumed)}
            return DeviceMemory(resident | kept | libraries, phases, apart, {})
        resident |= {"driver": CONTEXT_BYTES, "workspaces": WORKSPACE_BYTES}
        if self.num_communicators:
            resident["communication"] = self.num_communicators * COMMUNICATOR_BYTES
        return DeviceMemory(resident, phases, self.commands({}, {}), libraries | kept | self.loading())


def fullest_rank(
    make: Callable[..., RankMemory[Model]],
    recipe: Recipe,
    plan: Plan,
    models: Sequence[Sequence[Model]],
    ranks: Sequence[int],
    bounds: tuple[Bounds, Bounds],
) -> MemoryEstimate | None:
    """The fullest rank on a CPU and on an accelerator, of some with models, each as its stages; None without models."""
    if not models:
        return None
    everywhere, channels, num_communicators = [one[0] for one in models], plan.channels, communicators(plan)
    ends = [(frozenset(channel.source_ranks), frozenset(channel.target_ranks)) for channel in channels]

    def stage(place: int, rank: int) -> int:
        return plan.instances[place].layout.coordinates(rank)["pp"] if len(models[place]) > 1 else 0

    # Ranks with the same models need the same: each combination of models is counted once.
    held = dict.fromkeys(
        (
            tuple((place, stage(place, rank)) for place, x in enumerate(plan.instances) if rank in x.layout),
            tuple(place for place, (pushing, _) in enumerate(ends) if rank in pushing),
            tuple(place for place, (_, pulling) in enumerate(ends) if rank in pulling),
            num_communicators(rank),
        )
        for rank in ranks
    )

    def fullest(bound: Bounds) -> DeviceMemory:
        estimates = (
            make(recipe, [models[i][stage] for i, stage in own], everywhere, sent, taken, num, bound).memory()
            for own, *places, num in held
            for sent, taken in [[[channels[i] for i in some] for some in places]]
        )
        return max(estimates, key=lambda memory: memory.peak)

    return MemoryEstimate(*map(fullest, bounds))
