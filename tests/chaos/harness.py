"""Runs whose workers are killed again and again, compared with undisturbed runs."""

from __future__ import annotations

import json
import os
import random
import shutil
import time
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from itertools import chain
from pathlib import Path
from statistics import median

import psutil
import yaml
from tests.chaos.stage import COMMIT, RESUME, VARIABLE, WRITE, Kill
from tests.end_to_end.cli import TIMEOUT_S, metrics, start
from tests.tiny import tiny_model, write_recipe

WORKFLOW = """
name: chaos
nodes:
  rollout:   {run: rollout, role: policy}
  reward:    {run: reward, after: rollout}
  note:      {run: "tests.chaos.stage:note_prompts", after: reward}
  old:       {run: log_probs, role: policy, after: rollout}
  advantage: {run: advantage, after: note}
  policy:    {run: update, role: policy, after: [advantage, old]}
"""
STEPS = 10
PROMPTS_PER_STEP, NUM_PROMPTS = 8, 64
"""The data ends within the steps of a run, so that runs continue with a second epoch."""
POOLS = json.dumps(
    {name: {"ranks": int(name in {"old", "advantage", "policy"})} for name in yaml.safe_load(WORKFLOW)["nodes"]}
)
AHEAD = json.dumps({"rollout": {"capacity": 2}})
CONTINUOUS = json.dumps(
    {name: {"ranks": "0-1" if name in {"rollout", "reward"} else "2"} for name in yaml.safe_load(WORKFLOW)["nodes"]}
)
NEWEST = json.dumps({"rollout": {"capacity": 2, "mode": "continuous"}})
PLACEMENTS = {
    "2 workers": (2, ()),
    "2 pools": (2, (f"layout={POOLS}",)),
    "2 loops": (2, (f"layout={POOLS}", f"channels={AHEAD}")),
    "continuous": (3, (f"layout={CONTINUOUS}", f"channels={NEWEST}")),
    "3 workers": (3, ()),
    "4 workers": (4, ()),
}
"""Number of workers and settings by name."""


@dataclass
class Run:
    """Outcome of a run.

    Attributes:
        folder: Folder that it was started in.
        seconds: Seconds from its start to its end.
        num_starts: Number of times that the command was started; 1 when the run continued by itself after each kill.
        kills: Workers that were killed, each with what it was doing.
        events: Lines of `events.jsonl`.
    """

    folder: Path
    seconds: float
    num_starts: int
    kills: Sequence[Mapping[str, object]]
    events: Sequence[Mapping[str, object]] = field(default_factory=list)


def undisturbed(folder: Path, placement: str, disturbed: Run, plain: Run, steps: int = STEPS) -> Run:
    """The run without kills that a run with kills must be like.

    Continuous generation depends on time, so that a run without kills has to follow its journal.

    Args:
        folder: New folder for a run.
        placement: Name in `PLACEMENTS`.
        disturbed: Run with kills.
        plain: Run without any.
        steps: Number of steps.
    """
    if placement != "continuous":
        return plain
    return run(folder, placement, [], steps, [f"run.follow={disturbed.folder / 'runs/tiny'}"])


def run(
    folder: Path, placement: str, kills: Sequence[Kill], steps: int = STEPS, more_settings: Sequence[str] = ()
) -> Run:
    """Train to the end, starting the command again where it gives up.

    Args:
        folder: New folder for the run.
        placement: Name in `PLACEMENTS`.
        kills: Kills in their order.
        steps: Number of steps.
        more_settings: Further settings.
    """
    num_workers, settings = PLACEMENTS[placement]
    recipe = _prepare(folder, kills, steps)
    begin, num_starts = time.monotonic(), 0
    while num_starts <= len(kills):
        num_starts += 1
        process = start(folder, "leaderless", "train", recipe, "--workers", num_workers, *settings, *more_settings)
        output, errors = process.communicate(timeout=TIMEOUT_S * (1 + len(kills)))
        if process.returncode == 0:
            break
        assert list(folder.glob("killed-*")), f"nobody was killed, but it failed:\n{output}\n{errors}"
    assert process.returncode == 0, f"{output}\n{errors}"
    done = [json.loads(path.read_text()) for path in sorted(folder.glob("killed-*.json"))]
    events = folder / "runs/tiny/events.jsonl"
    lines = events.read_text().splitlines() if events.exists() else []
    return Run(folder, time.monotonic() - begin, num_starts, done, [json.loads(line) for line in lines])


def _prepare(folder: Path, kills: Sequence[Kill], steps: int) -> Path:
    folder.mkdir(parents=True)
    (folder / "chaos.yaml").write_text(WORKFLOW)
    (folder / "kills.json").write_text(json.dumps([asdict(kill) for kill in kills]))
    os.environ[VARIABLE] = str(folder)
    shutil.copytree(tiny_model(), folder / "model")
    return write_recipe(
        folder,
        "model",
        {
            "workflow": "chaos.yaml",
            "steps": steps,
            "batch.prompts_per_step": PROMPTS_PER_STEP,
            "checkpoint.every_steps": 1,
            "run.trace_steps": steps,
            "run.max_restarts": 100,
            "run.directory": "runs",
        },
    )


def check(disturbed: Run, undisturbed: Run) -> None:
    """Check that a run with kills ended as the same run without them, and left nothing behind.

    Args:
        disturbed: Run with kills.
        undisturbed: Same run without kills.
    """
    folders = [run.folder / "runs/tiny" for run in (disturbed, undisturbed)]
    for log in sorted(file.name for file in folders[1].glob("metrics*.jsonl")):
        lines, expected = (metrics(folder, log) for folder in folders)
        assert lines == expected, "the curve is the same to the last bit"
    used = [sorted((run.folder / "used").glob("step-*.json")) for run in (disturbed, undisturbed)]
    assert [path.read_text() for path in used[0]] == [path.read_text() for path in used[1]], (
        "prompts and random numbers"
    )
    check_used_once(disturbed.folder)
    hidden = [path.name for path in (folders[0] / "checkpoints").iterdir() if not path.name.startswith("step-")]
    assert not hidden, "no half-written checkpoint stays"
    assert not left_behind(disturbed.folder), "no process stays"


def check_used_once(folder: Path) -> None:
    """Check that each prompt was used once in an epoch.

    Args:
        folder: Folder of a run.
    """
    steps: dict[str, list[str]] = {}
    for path in sorted((folder / "used").glob("step-*.json")):
        steps.setdefault(path.name.partition(".")[0], []).extend(json.loads(path.read_text())["prompts"])
    prompts = list(chain.from_iterable(steps.values()))
    for first in range(0, len(prompts), NUM_PROMPTS):
        twice = [prompt for prompt, count in Counter(prompts[first : first + NUM_PROMPTS]).items() if count > 1]
        assert not twice, f"used twice in one epoch: {twice}"


def left_behind(folder: Path) -> list[str]:
    """Command lines of processes of a run that are still running.

    Args:
        folder: Folder that the run was started in.
    """
    found = []
    for process in psutil.process_iter():
        try:
            if process.pid != os.getpid() and process.cwd() == str(folder):
                found.append(" ".join(process.cmdline()))
        except psutil.Error:
            continue
    return found


def phases_of(undisturbed: Run) -> dict[int, dict[str, float]]:
    """Seconds that each rank spends in each phase of a step, by rank.

    Args:
        undisturbed: Run that wrote a trace.
    """
    phases: dict[int, dict[str, float]] = {}
    for path in (undisturbed.folder / "runs/tiny/trace").glob("rank-*.json"):
        spans: dict[str, list[float]] = {}
        events = json.loads(path.read_text())
        for event in events:
            if event["ph"] == "X":
                spans.setdefault(event["name"], []).append(event["dur"] / 1e6)
        rank = int(events[0]["pid"])
        phases[rank] = {name: median(seconds) for name, seconds in spans.items()}
        phases[rank] |= dict.fromkeys([RESUME, WRITE], 0.01)
    # The first rank that trains gives a checkpoint its name.
    phases[min(rank for rank, names in phases.items() if "policy" in names)][COMMIT] = 0.01
    return phases


def draw_kills(phases: Mapping[int, Mapping[str, float]], count: int, steps: int, seed: int) -> list[Kill]:
    """Kills of random ranks in random phases, spread over the steps.

    Args:
        phases: Result of `phases_of`.
        count: Number of kills.
        steps: Number of steps of the run.
        seed: Seed; the same one draws the same kills.
    """
    generator = random.Random(seed)
    kills = []
    for number in range(count):
        rank = generator.choice(sorted(phases))
        phase = generator.choice(sorted(phases[rank]))
        step = 2 + number * (steps - 2) // count
        kills.append(Kill(rank, phase, step if phase != RESUME else 0, generator.uniform(0, phases[rank][phase])))
    return kills
