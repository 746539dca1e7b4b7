"""The memory of this rank, compared with what the plan needs before anything is loaded."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import get_args

import psutil
import torch
from rich.markup import escape

from leaderless.config import Recipe, RecipeError
from leaderless.config.models import Whole
from leaderless.distributed.transport import ProcessGroup
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Plan, format_bytes
from leaderless.planner.memory.estimate import estimate_memory
from leaderless.planner.memory.fit import fit_plan
from leaderless.planner.memory.rank import Room
from leaderless.worker.rank_info import RankInfo
from leaderless.worker.supervision.settled_memory import read_room, write_room


@dataclass(frozen=True)
class MemoryBounds:
    """Bounds on which all ranks have agreed.

    Attributes:
        num_bytes: Bytes that each rank had before it held anything; of the host, an equal part.
        is_cpu: Whether these are of the host.
        pass_tokens: Most tokens of one pass to begin with.
        room: Use of the memory that is left.
        per_machine: Ranks that share a host.
    """

    num_bytes: int
    is_cpu: bool
    pass_tokens: int
    room: Room = field(default_factory=Room)
    per_machine: int = 1

    def fits(self, recipe: Recipe, plan: Plan) -> bool:
        """Whether a plan may run, by its estimate."""
        how = {"is_cpu": self.is_cpu, "has_pages": self.room.cache.has_pages}
        return not fit_plan(recipe, plan, self.num_bytes, **how, per_machine=self.per_machine).is_hopeless

    def as_begun(self, directory: RunDirectory, world: ProcessGroup) -> MemoryBounds:
        """Return these, with what decided about sums at the first start on as many ranks, whatever memory there is now.

        Gradients that are added up in another order would differ from the run that began. All ranks call it.
        """
        if self.is_cpu:
            return self
        kinds, is_first = get_args(Whole), world.rank == 0
        begun = read_room(directory, world.size) if is_first else None
        known = [-1, -1] if begun is None else [kinds.index(begun.keeps), begun.max_logits]
        kind, max_logits = world.max(torch.tensor(known), "what memory is used for").tolist()
        if kind >= 0:
            return replace(self, room=replace(self.room, keeps=kinds[kind], max_logits=max_logits))
        if is_first:
            write_room(directory, world.size, self.room)
        return self


def check_memory(
    recipe: Recipe, plan: Plan, place: RankInfo, device: torch.device, world: ProcessGroup, say: Callable[[str], None]
) -> MemoryBounds:
    """Refuse a run that cannot fit, and warn of one that may not. All ranks call it; the least memory decides.

    Raises:
        RecipeError: Not even passes of one sample would fit, and `run.memory_check` does not allow to try.
    """
    host = available_memory(torch.device("cpu"), place.local_world_size)
    mine = [
        host if device.type == "cpu" else available_memory(device, 1) - bytes_of_helper(recipe, plan, place.rank),
        host,
        place.local_world_size,
    ]
    least = (-world.max(-torch.tensor(mine, dtype=torch.float64), "the memory of each rank")).long().tolist()
    is_cpu, has_pages, per_machine = device.type == "cpu", device.type == "cuda", least[2]
    fit = fit_plan(recipe, plan, least[0], is_cpu=is_cpu, has_pages=has_pages, per_machine=per_machine)
    is_strict = recipe.run.memory_check == "refuse"
    if fit.is_hopeless and is_strict:
        raise RecipeError.at("run.memory_check", f"{fit.problem}; or set run.memory_check=warn to try all the same")
    if fit.problem:
        say(f"[bold red]memory may run out[/]: {escape(fit.problem)}")
    on_host = sum(plan.memory.accelerator.host.values()) if plan.memory and not is_cpu else 0
    if on_host > least[1]:
        needed, there = format_bytes(on_host), format_bytes(least[1])
        say(f"[bold red]memory of the host may run out[/]: a rank needs {needed} of it, and there are {there}")
    return MemoryBounds(least[0], is_cpu, fit.pass_tokens, fit.room, per_machine)


def bytes_of_helper(recipe: Recipe, plan: Plan, rank: int) -> int:
    """Bytes of an accelerator that another rank, which generates on the device of this one, needs of it."""
    helper = next((one for one, owner in plan.helpers.items() if owner == rank), None)
    if helper is None:
        return 0
    estimate = estimate_memory(recipe, plan, plan.batch.micro_batch_tokens, among=(helper,))
    return 0 if estimate is None else estimate.accelerator.peak


def available_memory(device: torch.device, num_ranks: int, root: Path = Path("/")) -> int:
    """Bytes that one rank may still use: free memory of its accelerator, or its share of the machine's.

    `num_ranks` share the machine; `root` is the folder of `proc` and `sys`.
    """
    if device.type != "cpu":
        free, _ = torch.get_device_module(device).mem_get_info(device)
        return int(free)
    limits = [left for path in _control_groups(root) if (left := _left_in(path)) is not None]
    return min([psutil.virtual_memory().available, *limits]) // num_ranks


def _control_groups(root: Path) -> Iterator[Path]:
    """The folders with limits for this process, its own control group first, of version 1 or 2."""
    table = root / "proc/self/cgroup"
    for line in table.read_text().splitlines() if table.exists() else ():
        _, controllers, name = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        top = root / "sys/fs/cgroup" / ("memory" if controllers else "")
        own = top / name.lstrip("/")
        yield from (path for path in (own, *own.parents) if path == top or top in path.parents)


def _left_in(path: Path) -> int | None:
    """Bytes left below the limit of a control group, its cache of files included; None where it has no limit."""
    for limit, used, cache in (
        ("memory.max", "memory.current", "inactive_file"),
        ("memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        if not (path / limit).exists() or (most := (path / limit).read_text().strip()) == "max":
            continue
        stat = dict(line.split() for line in (path / "memory.stat").read_text().splitlines())
        return max(0, int(most) - int((path / used).read_text()) + int(stat.get(cache, 0)))
    return None
