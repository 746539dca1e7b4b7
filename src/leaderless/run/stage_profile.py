"""Measures the seconds of a recipe's stages, in short runs or from the trace of an earlier run."""

from __future__ import annotations

import json
import os
import tempfile
from collections import defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import fmean, median
from typing import NamedTuple

from leaderless.base.devices import DEVICE_FILES, DEVICE_FOLDER, ROCM_FILE, WSL_FILE, first_device
from leaderless.config import Recipe, RecipeError
from leaderless.config.source import Setting
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Plan
from leaderless.planner.placement.stage_seconds import MachineIdentity, Point, Profile, settings_of
from leaderless.planner.simulate.cluster import GIB
from leaderless.run.run import Run

ACCELERATORS = (*DEVICE_FILES.values(), ROCM_FILE, WSL_FILE)
"""Files in `DEVICE_FOLDER` of machines that may have accelerators, as patterns."""
NUM_STEPS = 4
"""Steps of each measuring run; the first is not counted."""
MAX_LENGTHS = 4096
"""Number of responses whose lengths are kept."""


@dataclass
class Spans:
    """Traces of the ranks of some runs, without first steps, in which much happens only once."""

    # Work of the shards of each node, and how long it took.
    points: dict[str, list[Point]] = field(default_factory=lambda: defaultdict(list))
    reshards: list[float] = field(default_factory=list)  # seconds of each transfer of rows
    syncs: list[float] = field(default_factory=list)  # seconds of each transfer of weights
    overheads: list[float] = field(default_factory=list)  # seconds of each step outside of its nodes
    lengths: list[int] = field(default_factory=list)  # tokens of responses
    waits: list[float] = field(default_factory=list)  # seconds that their episodes waited for environments

    def add(self, directory: RunDirectory, plan: Plan) -> None:
        """Add the trace of a run."""
        spans: dict[tuple[str, int], list[_Span]] = defaultdict(list)
        for path in sorted(directory.traces.glob("rank-*.json")):
            for span in _spans_of(path):
                if span.step > 1:
                    spans[span.name, span.step].append(span)
        nodes = {node.name: node for node in plan.nodes}
        spent: dict[int, float] = defaultdict(float)
        for (name, step), found in sorted(spans.items()):
            # Ranks that wait for each other end together: the time of the last to arrive is work alone.
            least = min(span.point.seconds for span in found)
            if name.startswith("weights("):
                self.syncs.append(least)
            elif name.startswith("reshard("):
                self.reshards.append(least)
            elif name in nodes:
                is_alone = nodes[name].spec.streams or nodes[name].spec.role_use == "generate"
                points = [span.point for span in found]
                if not is_alone:
                    rows, tokens, longest = (max(sizes) for sizes in zip(*(point[:3] for point in points), strict=True))
                    points = [Point(rows, tokens, longest, least)]
                self.points[name] += points
                spent[step] += max(point.seconds for point in points)
                self.lengths += [length for point in points for length in point.lengths]
                self.waits += [wait for point in points for wait in point.waits or (0.0,) * len(point.lengths)]
        if len({node.layout.ranks for node in plan.nodes}) == 1:
            ends = {line["step"]: line["time_s"] for line in directory.read_metrics()}
            whole = {step: ends[step] - ends[step - 1] for step in spent if {step, step - 1} <= ends.keys()}
            self.overheads += [max(0.0, seconds - spent[step]) for step, seconds in whole.items()]


class _Span(NamedTuple):
    """One run of a chain entry on one rank."""

    name: str
    step: int
    point: Point


def _spans_of(path: Path) -> Iterator[_Span]:
    """Spans of a trace, which need not be complete."""
    for line in path.read_text(encoding="utf-8").splitlines():
        if '"ph": "X"' in line:
            event = json.loads(line.rstrip(","))
            facts = event["args"]
            rows, tokens, longest = (facts.get(name, 0) for name in ("rows", "tokens", "longest"))
            lengths, waits = (tuple(facts.get(name, ())) for name in ("lengths", "waits"))
            point = Point(rows, tokens, longest, event["dur"] / 1e6, lengths, waits)
            yield _Span(event["name"], facts["step"], point)


def measure(recipe: Recipe, source: Path, overrides: Sequence[str], workers: int) -> Profile:
    """Run a recipe, which a file or a run's folder holds, with small and large steps and generation on other ranks.

    A RecipeError says that it cannot run with this number of workers.
    """
    prompts, spans = recipe.batch.prompts_per_step, Spans()
    with tempfile.TemporaryDirectory(prefix="leaderless-profile-") as folder:
        for name, settings in _ways(recipe, prompts, workers):
            fixed: dict[str, Setting] = {
                "name": name,
                "steps": NUM_STEPS,
                "run.directory": folder,
                "loggers": [],
                "run.trace_steps": NUM_STEPS,
                "evaluation.every_steps": 0,
                "checkpoint.best_metric": None,
                "placement": None,
                "channels": {},
                "layout": {},
            }
            run = Run(source, *overrides, **{**fixed, **settings})
            run.train(workers, apart=True, in_process=False)
            spans.add(run.directory, run.plan(workers))
    return profile_of(spans, recipe, workers)


def _ways(recipe: Recipe, prompts: int, workers: int) -> list[tuple[str, dict[str, Setting]]]:
    """Names and settings of the measuring runs."""
    from leaderless.planner.placement.candidates import two_pools  # it imports numpy

    ways: list[tuple[str, dict[str, Setting]]] = [
        ("small", {"batch.prompts_per_step": max(workers, prompts // 2)}),
        ("large", {"batch.prompts_per_step": 2 * prompts}),
    ]
    plan = Run(recipe, placement=None, layout={}, channels={}).plan(workers)
    placement = recipe.placement
    for pools in two_pools(plan):
        layout: Setting = {name: {"ranks": own.ranks} for name, own in pools.layout.items()}
        if not pools.lag:  # few ranks may generate all rows: such shards are measured, too
            ways.append(("pools", {"layout": layout, "batch.prompts_per_step": 2 * prompts}))
        elif placement is not None and (placement.max_lag or placement.continuous):
            # What is ahead may need nodes that a step in lockstep does without, as log-probs before the update.
            ways.append(("ahead", {"layout": layout, "channels": {pools.leader: {"capacity": pools.lag}}}))
    return ways


def profile_of(spans: Spans, recipe: Recipe, workers: int) -> Profile:
    """The laws that explain the traces; a RecipeError if there is nothing to explain."""
    from leaderless.planner.placement.node_seconds import fit_seconds  # it imports numpy

    if not spans.points:
        raise RecipeError.at(
            "run.trace_steps",
            "the run has traced no step after its first: run it with run.trace_steps of at least 2, or leave --from "
            "out",
        )
    return Profile(
        machine=this_machine(workers),
        settings=settings_of(recipe),
        world_size=workers,
        stages={name: fit_seconds(points) for name, points in spans.points.items()},
        reshard_s=median(spans.reshards or [0.0]),
        sync_s=median(spans.syncs or [0.0]),
        overhead_s=fmean(spans.overheads or [0.0]),
        lengths=tuple(spans.lengths[:MAX_LENGTHS]),
        waits=tuple(spans.waits[:MAX_LENGTHS]) if any(spans.waits) else (),
    )


def has_accelerator() -> bool:
    """Whether this machine may have accelerators, found without torch."""
    return any(True for pattern in ACCELERATORS for _ in DEVICE_FOLDER.glob(pattern))


def num_accelerators() -> int:
    """Number of accelerators of this machine, or 1 without any; torch is imported only where there may be one."""
    if not has_accelerator():
        return 1
    import torch

    return max(1, torch.accelerator.device_count())


def this_machine(workers: int) -> MachineIdentity:
    """The type of this machine, and the memory of each of its workers."""
    text = Path("/proc/cpuinfo").read_text(encoding="utf-8")
    models = [line.partition(":")[2].strip() for line in text.splitlines() if line.startswith("model name")]
    processor = models[0] if models else os.uname().machine
    # Torch is loaded only where there may be one; it may be hidden, or torch may be built for the CPU.
    device = first_device() if has_accelerator() else None
    if device is None:
        memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / workers
        return MachineIdentity(processor=processor, memory_gib=round(memory / GIB, 3))
    return MachineIdentity(processor=processor, accelerator=device.name, memory_gib=round(device.total_bytes / GIB, 3))


def check_machine(profile: Profile) -> None:
    """Refuse a measured profile of machines with another processor or accelerator, by a RecipeError."""
    if profile.cluster:
        return
    here = this_machine(profile.world_size)
    for name in ("processor", "accelerator"):
        then, now = getattr(profile.machine, name), getattr(here, name)
        if then != now:
            raise RecipeError.at(
                "placement.profile",
                f"was measured on machines with the {name} '{then}', but this one has '{now}': run `leaderless "
                "profile` here, or write `layout` out",
            )
