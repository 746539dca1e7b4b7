"""Automatic placement that may generate continuously: predicted and measured steps of the best layout of each kind.

    python benchmarks/continuous_placement.py

The engine and the training back end of `asynchrony.py` sleep as long as their tokens take, so that few cores are
enough; commands, processes, transfers and weights are real. Each workload is profiled once, with 4 workers. Then, for
each number of workers, the fastest layout of each kind, by what is predicted, is run: all nodes on all ranks, two pools
with a fixed lag, and two pools that generate continuously with each capacity. Where there are helpers, one for two
workers, the best layout with them is run next to the best without them. Cases that are saved are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, TypedDict
from unittest.mock import patch

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.continuous_placement_report import EVERYWHERE, RESULTS, Case, Measured, Results, load, summary, table  # noqa: E402
from benchmarks.made import prepare  # noqa: E402
from benchmarks.placement import inside, leaderless  # noqa: E402

if TYPE_CHECKING:
    from leaderless.planner.placement.candidates import Candidate

PROFILE_WORKERS, NUM_STEPS, FIRST = 4, 16, 4
"""Workers that are profiled; steps of a run, and those that are left out, in which nothing is in flight yet."""
RECIPE: Mapping[str, object] = {
    "name": "run",
    "workflow": "grpo",
    "models": {"policy": "model"},
    "batch": {"prompts_per_step": 16, "responses_per_prompt": 4},
    "rollout": {"engine": "asynchrony_parts:make_engine", "max_response_tokens": 512, "max_sequences": 256},
    "training": {"backend": "asynchrony_parts:make_trainer"},
    "algorithm": {"correction": {"type": "truncate"}},
    "run": {"reward_processes": 0, "recorded_prompts": 0, "trace_steps": 0},
    "loggers": [],
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "prompt", "answer": "answer", "template": "plain"},
        "max_prompt_tokens": 64,
    },
    "reward": {"exact_match": 1.0},
    "steps": NUM_STEPS,
}
PLACEMENT = "placement={continuous: true, max_staleness: 4, max_lag: 2%s}"
EPISODES = {
    "environment": {"type": "asynchrony_parts:Tools", "max_turns": 3, "max_episode_tokens": 400, "concurrency": 256},
    "rollout": {"engine": "asynchrony_parts:make_engine", "max_response_tokens": 64, "max_sequences": 256},
    "reward": {},
}
LIGHT = {"STEP_S": "0.001", "SEQUENCE_S": "0.0002", "SCORE_S": "0.00003", "UPDATE_S": "0.00007"}


class Workload(TypedDict):
    """Sections of the recipe that differ, the costs of tokens, and whether more workers help on the same devices."""

    sections: Mapping[str, object]
    costs: Mapping[str, str]
    is_helped: bool


WORKLOADS: Mapping[str, Workload] = {
    "long tail": {"sections": {}, "costs": {}, "is_helped": False},
    "even lengths": {"sections": {}, "costs": {"MEDIAN_TOKENS": "100", "SIGMA": "0.2"}, "is_helped": False},
    "light training": {"sections": {}, "costs": LIGHT, "is_helped": False},
    "slow tools": {"sections": EPISODES, "costs": {}, "is_helped": False},
    "light training, with helpers": {"sections": {}, "costs": LIGHT, "is_helped": True},
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=(2, 4))
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    end = time.monotonic() + 60 * options.minutes
    results = load(options.results) or Results(cores=len(os.sched_getaffinity(0)), steps=NUM_STEPS, cases=[])
    done = {(case["workload"], case["workers"]) for case in results["cases"]}
    for name in options.workloads:
        with made_folder(name) as folder:
            for num_workers in options.workers:
                if (name, num_workers) in done or time.monotonic() > end:
                    continue
                if not (folder / "profile.json").exists():
                    leaderless(folder, "profile", "recipe.yaml", PLACEMENT % "", "--workers", str(PROFILE_WORKERS))
                results["cases"].append(measure(folder, name, num_workers))
                options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
                print(table({**results, "cases": results["cases"][-1:]}), file=sys.stderr)
    print(f"{summary(results)}\n\n{table(results)}")


@contextmanager
def made_folder(name: str) -> Iterator[Path]:
    """A folder with a recipe, a model and data, and the costs of a workload in the environment."""
    workload = WORKLOADS[name]
    with tempfile.TemporaryDirectory(prefix="continuous-placement-") as made, patch.dict(os.environ, workload["costs"]):
        folder = Path(made)
        prepare(folder, hidden_size=16, num_layers=1, prompt_tokens=8)
        shutil.copy(Path(__file__).with_name("asynchrony_parts.py"), folder)
        text = json.dumps({**RECIPE, **workload["sections"]})
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        yield folder


def measure(folder: Path, name: str, num_workers: int) -> Case:
    """The seconds of a step under the fastest layout of each kind."""
    find = helped_layouts if WORKLOADS[name]["is_helped"] else layouts
    chosen, ways = find(folder, num_workers)
    runs = {label: Measured(seconds=seconds_of(folder, way), predicted=way.predicted_s) for label, way in ways.items()}
    return Case(workload=name, workers=num_workers, chosen=chosen, runs=runs)


class Way(NamedTuple):
    """A layout on some workers."""

    candidate: Candidate
    num_workers: int
    predicted_s: float


def helped_layouts(folder: Path, num_devices: int) -> tuple[str, dict[str, Way]]:
    """The fastest layouts with and without helpers, and the faster one, by what is predicted."""
    from leaderless import Run
    from leaderless.run.planned_run import plan_training

    helpers = num_devices // 2
    with inside(folder):
        settings = PLACEMENT % f", helpers: {helpers}"
        choice = plan_training(Run("recipe.yaml", settings).loaded, num_devices + helpers).choice
    assert choice is not None
    assert choice.without is not None
    options = (choice.best, choice.without)
    ways = [Way(one.candidate, one.plan.world_size, one.predicted.seconds) for one in options]
    chosen = min(ways, key=lambda way: way.predicted_s)
    return label_of(chosen.candidate), {label_of(way.candidate): way for way in ways}


def layouts(folder: Path, num_workers: int) -> tuple[str, dict[str, Way]]:
    """The chosen layout, and the fastest of each kind by name."""
    from leaderless import Run
    from leaderless.config import RecipeError
    from leaderless.planner.placement.candidates import Allowed, candidates_of
    from leaderless.planner.placement.search import predict_step
    from leaderless.planner.placement.stage_seconds import read_profile
    from leaderless.run.planned_run import plan_training

    best: dict[tuple[bool, bool, int], Way] = {}
    with inside(folder):
        profile = read_profile(folder / "profile.json")
        choice = plan_training(Run("recipe.yaml", PLACEMENT % "").loaded, num_workers).choice
        assert choice is not None
        for candidate in candidates_of(Run("recipe.yaml").plan(num_workers), Allowed(max_lag=2, max_ahead=4)):
            run = Run("recipe.yaml", *settings_of(candidate))
            try:
                predicted = predict_step(run.recipe, run.plan(num_workers), profile).seconds
            except RecipeError:
                continue
            kind = bool(candidate.pools), bool(candidate.cache), candidate.lag
            if kind not in best or predicted < best[kind].predicted_s or candidate == choice.best.candidate:
                best[kind] = Way(candidate, num_workers, predicted)
    del best[True, False, 0]
    return label_of(choice.best.candidate), {label_of(way.candidate): way for way in best.values()}


def settings_of(candidate: Candidate) -> list[str]:
    """A candidate as settings on the command line."""
    layout = {name: config.model_dump(exclude_defaults=True) for name, config in candidate.layout.items()}
    channels = {name: config.model_dump(exclude_defaults=True) for name, config in candidate.channels.items()}
    return [f"layout={json.dumps(layout)}", f"channels={json.dumps(channels)}"]


def label_of(candidate: Candidate) -> str:
    """A candidate in short: ranks that generate and train, and how."""
    if not candidate.pools:
        return EVERYWHERE
    ranks = [config.ranks for config in candidate.layout.values()]
    how = f"continuous, capacity {candidate.lag}" if candidate.cache else f"fixed lag {candidate.lag}"
    if candidate.helpers:
        how += f", {len(candidate.helpers)} of them on devices of others"
    return f"{ranks[0]} and {ranks[-1]}, {how}"


def seconds_of(folder: Path, way: Way) -> float:
    """Seconds of a step of a run, without the first ones."""
    settings = settings_of(way.candidate)
    leaderless(folder, "train", "recipe.yaml", *settings, "--workers", str(way.num_workers), "--fresh")
    lines = (folder / "runs/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ends = {line["step"]: line["time_s"] for line in map(json.loads, lines)}
    shutil.rmtree(folder / "runs")
    return float(ends[NUM_STEPS] - ends[FIRST]) / (NUM_STEPS - FIRST)


if __name__ == "__main__":
    main()
