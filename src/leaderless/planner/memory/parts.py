"""The parts of a rank's memory, and what every rank has, whatever its models are."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass

from leaderless.config.training import Whole
from leaderless.planner.memory.cache_pool import UNBOUND, CacheBound
from leaderless.planner.memory.limits import MAX_LOGITS, MIB

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
    """

    resident: Mapping[str, int]
    phases: Mapping[str, Mapping[str, int]]
    apart: Mapping[str, Mapping[str, int]]
    host: Mapping[str, int]

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


COMMANDS = ("export", "serve")
"""Phases of other commands, which the peak of a run does not depend on."""


@dataclass(frozen=True)
class MemoryEstimate:
    """Bytes of the fullest rank, where ranks compute on the CPU and where each has an accelerator."""

    cpu: DeviceMemory
    accelerator: DeviceMemory

    def to_json(self) -> dict[str, object]:
        """JSON-able values."""
        return {"cpu": self.cpu.to_json(), "accelerator": self.accelerator.to_json()}
