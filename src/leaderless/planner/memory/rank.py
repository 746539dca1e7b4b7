"""The memory of one rank, put together from what its models hold: the same for language models and for bodies."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Generic, NamedTuple, TypeVar

from leaderless.config import Recipe
from leaderless.config.models import Offload, Whole
from leaderless.planner.layout import format_ranks
from leaderless.planner.memory.limits import MAX_LOGITS, MIB, UNBOUND, CacheBound
from leaderless.planner.plan import Plan, communicators
from leaderless.planner.plan_parts import Channel

WRITE_BYTES = 256 * MIB
"""Most that writing or reading a checkpoint holds on top of the tensors themselves."""
LIBRARIES_BYTES = 330 * MIB
"""Python, torch and transformers in a process of their own."""
CONTEXT_BYTES = 600 * MIB
"""Memory of an accelerator that its driver takes for a process: its context, and kernels that are loaded when they are
needed."""
COMMUNICATOR_BYTES = 220 * MIB
"""Buffers of the accelerator's communication library for each process group of several ranks.

NCCL has 4 MiB, 4.7 MiB and 0.5 MiB for its three protocols in each connection, and a ring has one in each of up to 24
channels. Each process group has a communicator of its own, which is connected at the start."""
WORKSPACE_BYTES = 200 * MIB
"""Memory that torch gives to libraries of an accelerator, and does not take back.

cuBLAS and cuBLASLt have 32 MiB each on Hopper, and less on others, for every thread and stream that multiplies: in
forward passes, in backward passes, and where passes are recorded. Numbers of two micro-batches on their
way from the host have 4 MiB each. Compiled layers and attention over pages need no memory besides their results."""
LARGE_MAX_LOGITS = 1 << 28
"""The same on accelerators with room for them, which read and write the gradient of the head for each chunk."""


@dataclass(frozen=True)
class Room:
    """Use of the memory that is left on ranks with accelerators.

    Attributes:
        keeps: Meaning of `training.keep_whole: auto`.
        max_logits: Logits of one chunk, and the most that are kept for the backward pass.
        cache: Memory of native engines for keys and values.
    """

    keeps: Whole = "nothing"
    max_logits: int = MAX_LOGITS
    cache: CacheBound = UNBOUND


def format_bytes(count: int) -> str:
    """Bytes for a reader, as `1.5 GiB`."""
    size, unit = float(count), "B"
    for larger in ("KiB", "MiB", "GiB", "TiB", "PiB"):
        if size < 1023.5:
            break
        size, unit = size / 1024, larger
    return f"{size:.1f} {unit}" if size < 10 and unit != "B" else f"{size:.0f} {unit}"


@dataclass(frozen=True)
class DeviceMemory:
    """Bytes of one rank on one kind of device.

    Attributes:
        resident: Parts that stay through a step, by what they are for.
        phases: Parts on top of these in each phase of a step; only one phase runs at a time.
        apart: Parts of phases outside of steps: loading, resuming, and other commands.
        host: Parts in the memory of the host, on an accelerator.
        disk: Parts in files in `run.offload_folder`.
    """

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    apart: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int]
    disk: Mapping[str, int] = field(default_factory=dict)

    @property
    def totals(self) -> Mapping[str, int]:
        """All that is held in each phase."""
        resident = sum(self.resident.values())
        in_step = {name: resident + sum(parts.values()) for name, parts in self.phases.items()}
        return in_step | {name: sum(parts.values()) for name, parts in self.apart.items()}

    @property
    def peak(self) -> int:
        """Most that a run holds at any time."""
        totals = self.totals
        during = [totals[name] for name in (*self.phases, *self.apart) if name not in COMMANDS]
        return max(during, default=sum(self.resident.values()))

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {"peak": self.peak, **asdict(self), "totals": dict(self.totals)}


OF_ITERATIONS = (" scores", " trains")
"""Ends of the names of phases that begin when what the iteration before has left is gone."""
COMMANDS = ("export", "serve")
"""Phases of other commands, which the peak of a run does not depend on."""


class RankPeak(NamedTuple):
    """Most bytes that ranks with the same models hold at any time, each of them.

    Attributes:
        ranks: The ranks, ascending.
        cpu: Bytes where they compute on the CPU.
        accelerator: Bytes of an accelerator where each has one.
    """

    ranks: Sequence[int]
    cpu: int
    accelerator: int


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank, where ranks compute on the CPU and where each has an accelerator.

    Attributes:
        cpu: The fullest rank of those that compute on the CPU.
        accelerator: The fullest rank of those that have accelerators.
        peaks: Peaks of all ranks.
    """

    cpu: DeviceMemory
    accelerator: DeviceMemory
    peaks: Sequence[RankPeak] = ()

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        peaks = [{**one._asdict(), "ranks": format_ranks(one.ranks)} for one in self.peaks]
        return {"cpu": self.cpu.to_json(), "accelerator": self.accelerator.to_json(), "peaks": peaks}


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

    def leaving(self) -> Parts:
        """Data in the memory of the host that an iteration leaves, until the next one of its loop begins."""
        return {}

    @abstractmethod
    def loading(self) -> Parts:
        """Data in the memory of the host at the fullest moment while models are read."""

    def offloaded(self, where: Offload) -> Parts:  # noqa: ARG002
        """Data that are in the memory of the host, or on the disk, where they are not used."""
        return {}

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
        on_disk = self.offloaded("disk")
        if self.is_cpu:
            if saved:
                phases["checkpoint"] = {} if is_asynchronous else written
            leaving = self.leaving()
            for name, parts in phases.items():
                if not name.endswith(OF_ITERATIONS):
                    phases[name] = parts | leaving
            resumed = resident | libraries | {"files being read": in_flight} if saved else {}
            apart = {"loading": libraries | self.loading(), **self.commands(libraries, resumed)}
            return DeviceMemory(resident | kept | libraries, phases, apart, {}, on_disk)
        resident |= {"driver": CONTEXT_BYTES, "workspaces": WORKSPACE_BYTES}
        if self.num_communicators:
            resident["communication"] = self.num_communicators * COMMUNICATOR_BYTES
        on_host = libraries | kept | self.loading() | self.offloaded("host")
        return DeviceMemory(resident, phases, self.commands({}, {}), on_host, on_disk)


_Held = tuple[tuple[tuple[int, int], ...], tuple[int, ...], tuple[int, ...], int]
"""A rank's models, as places and stages; places of the channels that it pushes into, and takes from; communicators."""


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
    held = dict[_Held, list[int]]()
    for rank in ranks:
        key = (
            tuple((place, stage(place, rank)) for place, x in enumerate(plan.instances) if rank in x.layout),
            tuple(place for place, (pushing, _) in enumerate(ends) if rank in pushing),
            tuple(place for place, (_, pulling) in enumerate(ends) if rank in pulling),
            num_communicators(rank),
        )
        held.setdefault(key, []).append(rank)

    def estimate(bound: Bounds, own: _Held) -> DeviceMemory:
        places, *ends, num = own
        sent, taken = ([channels[place] for place in some] for some in ends)
        return make(recipe, [models[i][stage] for i, stage in places], everywhere, sent, taken, num, bound).memory()

    kinds = [[estimate(bound, key) for key in held] for bound in bounds]
    peaks = [
        RankPeak(some, *(memory.peak for memory in pair)) for some, *pair in zip(held.values(), *kinds, strict=True)
    ]
    cpu, accelerator = (max(some, key=lambda memory: memory.peak) for some in kinds)
    return MemoryEstimate(cpu, accelerator, peaks)
