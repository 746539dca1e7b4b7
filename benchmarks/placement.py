"""Automatic placement: the measured step of the layout that is chosen, next to every other layout's.

    python benchmarks/placement.py            # all world sizes and workloads
    python benchmarks/placement.py --quick    # two world sizes, two workloads
    python benchmarks/placement.py --predict  # choose and predict again for what has been measured; runs profiles alone

Stages take their time by sleeping as a token model would (see `placement_parts`), so that eight processes on few cores
are what they seem to be; all else is the real commands, `leaderless profile` and `leaderless train`. Each workload is
profiled once. Then, for each number of workers, every layout of the search space is run, and the one that `layout:
auto` chooses is compared with the fastest. Cases are saved as they end, and those that are saved are not run again.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))

from benchmarks.made import prepare  # noqa: E402
from benchmarks.placement_report import RESULTS, WORKLOADS, Case, Measured, Results, Workload, load, summary, table  # noqa: E402

PROMPTS, RESPONSES, NUM_STEPS, FIRST = 16, 2, 5, 2
"""Batch of a step; steps of a run, of which the first ones are not counted."""
PROFILE_WORKERS = 4
SECTIONS = {
    "batch": {"prompts_per_step": PROMPTS, "responses_per_prompt": RESPONSES},
    "training": {"backend": "placement_parts:make_trainer"},
    "run": {"reward_processes": 0, "recorded_prompts": 0, "trace_steps": 0},
    "loggers": [],
    "models": {"policy": "model"},
    "data": {
        "train": {"path": "rows.jsonl", "prompt": "prompt", "answer": "answer", "template": "plain"},
        "max_prompt_tokens": 64,
    },
    "reward": {"exact_match": 1.0},
    "steps": NUM_STEPS,
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--workers", nargs="+", type=int, default=(2, 3, 4, 6, 8))
    parser.add_argument("--workloads", nargs="+", choices=sorted(WORKLOADS), default=list(WORKLOADS))
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--minutes", type=float, default=float("inf"), help="begin no case after this time")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--predict", action="store_true")
    parser.add_argument("--profiles", type=Path, help="folder that keeps profiles: those in it are not measured again")
    options = parser.parse_args()
    workers, workloads = options.workers, options.workloads
    if options.quick:
        workers, workloads = (2, 4), ("short", "tail_lag")
    end = time.monotonic() + 60 * options.minutes
    results = load(options.results) or Results(cores=len(os.sched_getaffinity(0)), steps=NUM_STEPS, cases=[])
    done = {(case["workload"], case["workers"]) for case in results["cases"]}
    if options.predict:
        results["cases"] = [predict(case, options.profiles) for case in results["cases"]]
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        print(f"{summary(results)}\n\n{table(results)}")
        return
    for num_workers in workers:
        for name in workloads:
            if (name, num_workers) in done or time.monotonic() > end:
                continue
            results["cases"].append(measure(name, num_workers, options.profiles))
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{name} on {num_workers}:\n{table({**results, 'cases': results['cases'][-1:]})}", file=sys.stderr)
    print(f"{summary(results)}\n\n{table(results)}")


def measure(name: str, num_workers: int, profiles: Path | None) -> Case:
    """The seconds of a step under every layout of a workload."""
    with made_folder(name, WORKLOADS[name]) as folder:
        profile(folder, name, profiles)
        runs = {}
        for label, layout, lag, predicted in layouts(folder, num_workers):
            runs[label] = Measured(seconds=seconds_of(folder, num_workers, layout, lag), predicted=predicted)
        return Case(workload=name, workers=num_workers, chosen=choose(folder, num_workers), runs=runs)


def predict(case: Case, profiles: Path | None) -> Case:
    """A case with its choice and predictions made again."""
    name, num_workers = case["workload"], case["workers"]
    with made_folder(name, WORKLOADS[name]) as folder:
        profile(folder, name, profiles)
        predicted = {label: seconds for label, _, _, seconds in layouts(folder, num_workers)}
        runs = {
            label: Measured(seconds=run["seconds"], predicted=predicted[label]) for label, run in case["runs"].items()
        }
        return Case(workload=name, workers=num_workers, chosen=choose(folder, num_workers), runs=runs)


class made_folder:  # noqa: N801 - used as a function
    """A folder with a recipe, a model, data and what they take."""

    def __init__(self, name: str, workload: Workload) -> None:
        self._folder, self._workload = tempfile.TemporaryDirectory(prefix=f"placement-{name}-"), workload

    def __enter__(self) -> Path:
        folder = Path(self._folder.name)
        prepare(folder, hidden_size=16, num_layers=1, prompt_tokens=8)
        shutil.copy(Path(__file__).with_name("placement_parts.py"), folder)
        work = self._workload["work"]
        (folder / "work.json").write_text(json.dumps(work), encoding="utf-8")
        rollout = {"engine": "placement_parts:make_engine", "max_response_tokens": work["most"]}
        recipe: dict[str, object] = {
            "name": "run",
            "workflow": "ppo" if self._workload["critic"] else "grpo",
            "rollout": rollout,
        }
        (folder / "recipe.yaml").write_text(json.dumps(recipe | SECTIONS), encoding="utf-8")
        return folder

    def __exit__(self, *error: object) -> None:
        self._folder.cleanup()


PROFILES: dict[str, str] = {}
"""Profile of each workload, which is measured once."""


def profile(folder: Path, name: str, profiles: Path | None) -> None:
    (folder / "max_lag").write_text(str(WORKLOADS[name]["max_lag"]), encoding="utf-8")
    kept = profiles / f"{name}.json" if profiles else None
    if name not in PROFILES and kept and kept.exists():
        PROFILES[name] = kept.read_text(encoding="utf-8")
    if name not in PROFILES:
        leaderless(folder, "profile", "recipe.yaml", *options_of(folder), "--workers", str(PROFILE_WORKERS))
        PROFILES[name] = (folder / "profile.json").read_text(encoding="utf-8")
        if kept:
            kept.parent.mkdir(parents=True, exist_ok=True)
            kept.write_text(PROFILES[name], encoding="utf-8")
    (folder / "profile.json").write_text(PROFILES[name], encoding="utf-8")


def options_of(folder: Path) -> list[str]:
    return [f"placement={{max_lag: {(folder / 'max_lag').read_text(encoding='utf-8')}}}"]


def choose(folder: Path, num_workers: int) -> str:
    """The layout that is chosen."""
    from leaderless import Run
    from leaderless.run.planned_run import plan_training

    with inside(folder):
        choice = plan_training(Run("recipe.yaml", *options_of(folder)).loaded, num_workers).choice
    assert choice is not None
    layout = {name: config.ranks for name, config in choice.best.recipe.layout.items()}
    return label_of(layout, choice.best.candidate.lag)


@contextmanager
def inside(folder: Path) -> Iterator[None]:
    """Work in a folder, and import from it."""
    before = Path.cwd()
    os.chdir(folder)
    sys.path.insert(0, str(folder))
    try:
        yield
    finally:
        os.chdir(before)
        sys.path.remove(str(folder))


def layouts(folder: Path, num_workers: int) -> Iterator[tuple[str, dict[str, str], int, float]]:
    """Every layout of the search space that can run: its name, ranks by node, lag, and predicted seconds of a step."""
    from leaderless import Run
    from leaderless.config import RecipeError
    from leaderless.planner.placement.candidates import Allowed, candidates_of
    from leaderless.planner.placement.search import predict_step
    from leaderless.planner.placement.stage_seconds import read_profile

    with inside(folder):
        max_lag, found = int((folder / "max_lag").read_text(encoding="utf-8")), []
        measured = read_profile(folder / "profile.json")
        for candidate in candidates_of(Run("recipe.yaml").plan(num_workers), Allowed(max_lag)):
            layout = {name: config.ranks for name, config in candidate.layout.items()}
            run = Run("recipe.yaml", *settings_of(layout, candidate.lag))
            try:
                plan = run.plan(num_workers)
            except RecipeError:
                continue
            predicted = predict_step(run.recipe, plan, measured).seconds
            found.append((label_of(layout, candidate.lag), layout, candidate.lag, predicted))
    yield from found


def label_of(layout: dict[str, str], lag: int) -> str:
    """A layout in short: ranks of rollout, policy and critic."""
    if not layout:
        return "colocated"
    ranks = [f"{name} {layout[name]}" for name in ("rollout", "policy", "critic") if name in layout]
    return ", ".join(ranks) + (f", lag {lag}" if lag else "")


def settings_of(layout: dict[str, str], lag: int) -> list[str]:
    sections = {name: {"ranks": ranks} for name, ranks in layout.items()}
    return [f"layout={json.dumps(sections)}", *([f"channels={{rollout: {{capacity: {lag}}}}}"] if lag else [])]


def seconds_of(folder: Path, num_workers: int, layout: dict[str, str], lag: int) -> float:
    """Seconds of a step of a run, without the first ones."""
    leaderless(folder, "train", "recipe.yaml", *settings_of(layout, lag), "--workers", str(num_workers), "--fresh")
    lines = (folder / "runs/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()
    ends = {line["step"]: line["time_s"] for line in map(json.loads, lines)}
    shutil.rmtree(folder / "runs")
    return (ends[NUM_STEPS] - ends[FIRST]) / (NUM_STEPS - FIRST)


def leaderless(folder: Path, *arguments: str) -> str:
    """The output of a command, whose processes are forked from one that has imported torch already."""
    from tests.forking import Forked

    command: Sequence[str] = [sys.executable, "-m", "leaderless", *arguments]
    with (folder / "errors").open("w", encoding="utf-8") as errors:
        process = Forked(
            command,
            cwd=folder,
            env=os.environ | {"OMP_NUM_THREADS": "1"},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        )
        output: str = process.communicate()[0]
    if process.returncode:
        sys.exit(f"{' '.join(command)} failed: {output}{(folder / 'errors').read_text(encoding='utf-8')}")
    return output


if __name__ == "__main__":
    main()
