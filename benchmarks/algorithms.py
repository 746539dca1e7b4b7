"""Accuracy, its spread over seeds, and time of every built-in workflow in which a policy answers, on the quickstart.

    pip install --editable .[benchmarks]
    python benchmarks/algorithms.py && python docs/generate.py

All start from the same model and use the same number of samples per step (dapo draws more, remax one more per prompt).
Rejection and distillation have the quickstart's settings too; only distillation has no penalty, since its reference is
the teacher. The teacher is the final model of grpo with the first seed, so distillation can get as far as that run.

An interrupted benchmark continues where it stopped; remove its folder to start again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/algorithms/results.json"
PICTURE = ROOT / "docs/images/algorithms.png"
SEEDS = (0, 1, 2)
GOOD = 0.9
WORKFLOWS = (
    *("grpo", "dr_grpo", "gspo", "cpgd", "cispo", "rloo", "reinforce_pp", "remax", "ppo", "dapo"),
    *("rejection", "distillation"),
)
TEACHER = "runs/quickstart-teacher"
STARTS: dict[str, list[str]] = {
    "ppo": ["ppo"],
    "dapo": ["dapo"],
    "distillation": ["grpo", f"models.reference={TEACHER}", "algorithm.kl.coefficient=0"],
}
"""The quickstart recipe that a workflow starts from, and what it overrides; the recipe of grpo, unless listed here."""


@dataclass(frozen=True)
class Curve:
    """One run.

    Attributes:
        workflow: Name of the workflow.
        seed: Seed of the data order and of sampling.
        steps: Steps after which accuracy was measured.
        accuracy: Share of held-out additions answered correctly, decoded greedily.
        seconds: Duration of all steps, without evaluation.
    """

    workflow: str
    seed: int
    steps: list[int]
    accuracy: list[float]
    seconds: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="steps of each run")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one worker and one core")
    parser.add_argument("--workflows", nargs="+", choices=WORKFLOWS, default=WORKFLOWS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark", help="folder for data, models and runs")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    prepare(folder)
    if "distillation" in options.workflows:
        teach(folder, options.steps)
    # Seeds take turns: after a third of the time there is one curve of each workflow.
    runs = [(workflow, seed) for seed in options.seeds for workflow in options.workflows]
    with ThreadPoolExecutor(options.parallel) as pool:
        curves = list(pool.map(lambda run: train(run[0], run[1], options.steps, folder), runs))
    results = {"steps": options.steps, "parallel": options.parallel, "runs": [asdict(curve) for curve in curves]}
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    draw(curves, options.picture)
    print(table(curves))


def prepare(folder: Path) -> None:
    """Make the quickstart's data, and its model after imitation, unless they exist."""
    if (folder / "runs/quickstart-base/config.json").exists():
        return
    folder.mkdir(parents=True, exist_ok=True)
    call([str(ROOT / "examples/quickstart/prepare.py")], folder, "prepare")
    call(leaderless("train", str(ROOT / "recipes/quickstart/sft.yaml")), folder, "sft")
    call(leaderless("export", "runs/quickstart-sft", "runs/quickstart-base"), folder, "export")


def teach(folder: Path, steps: int) -> None:
    """Train the teacher of distillation, unless it exists."""
    if (folder / TEACHER / "config.json").exists():
        return
    train("grpo", SEEDS[0], steps, folder)
    call(leaderless("export", f"runs/{name_of('grpo', SEEDS[0])}", TEACHER), folder, "teacher")


def train(workflow: str, seed: int, steps: int, folder: Path) -> Curve:
    """Run a workflow with a seed."""
    recipe, *overrides = STARTS.get(workflow, ["grpo"])
    name = name_of(workflow, seed)
    overrides += [f"workflow={workflow}", f"name={name}", f"seed={seed}", f"steps={steps}"]
    overrides += ["evaluation.every_steps=10", "loggers=[]", "run.trace_steps=0", "run.recorded_prompts=0"]
    call(
        leaderless("train", str(ROOT / f"recipes/quickstart/{recipe}.yaml"), *overrides, "--workers", "1"), folder, name
    )
    records = [json.loads(line) for line in (folder / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    measured = [
        (int(record["step"]), record["evaluation/mean@1"]) for record in records if "evaluation/mean@1" in record
    ]
    seconds = sum(record.get("time/step", 0.0) for record in records)
    print(f"{name}: {measured[-1][1]:.3f} after {seconds:.0f} s", file=sys.stderr)
    return Curve(workflow, seed, [step for step, _ in measured], [value for _, value in measured], round(seconds, 1))


def name_of(workflow: str, seed: int) -> str:
    """The name of a run."""
    return f"bench-{workflow}-{seed}"


def leaderless(*arguments: str) -> list[str]:
    return ["-m", "leaderless", *arguments]


def call(arguments: list[str], folder: Path, name: str) -> None:
    """Run Python on one core in a folder, with its output in a file there."""
    environment = os.environ | {"OMP_NUM_THREADS": "1"}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        code = subprocess.run(
            [sys.executable, *arguments], cwd=folder, env=environment, stdout=log, stderr=subprocess.STDOUT, check=False
        ).returncode
    if code:
        sys.exit(f"{name} failed with exit code {code}; see {folder / name}.log")


def load(path: Path = RESULTS) -> list[Curve]:
    """The results of a benchmark; empty if it has not been run."""
    if not path.exists():
        return []
    return [Curve(**run) for run in json.loads(path.read_text(encoding="utf-8"))["runs"]]


def describe(path: Path = RESULTS) -> str:
    """The conditions of the measurement, in a sentence."""
    results = json.loads(path.read_text(encoding="utf-8"))
    seeds: dict[str, int] = Counter(run["workflow"] for run in results["runs"])
    most = max(seeds.values())
    fewer = ", ".join(f"{name} {count}" for name, count in seeds.items() if count < most)
    exceptions = f" ({fewer})" if fewer else ""
    return f"{results['steps']} steps, {most} seeds{exceptions}, {results['parallel']} runs at a time on one machine."


def by_workflow(curves: Sequence[Curve]) -> dict[str, list[Curve]]:
    return {name: [c for c in curves if c.workflow == name] for name in dict.fromkeys(c.workflow for c in curves)}


def table(curves: Sequence[Curve], link: str = "{}") -> str:
    """A row for each workflow, in Markdown; `link` formats the workflow's name.

    Seconds are those of the fastest seed, since other load on the machine can only add to them.
    """
    lines = [
        f"| workflow | final accuracy | min to max | steps to {GOOD}, by seed | seconds |",
        "| --- " * 5 + "|",
    ]
    for name, runs in by_workflow(curves).items():
        final = [run.accuracy[-1] for run in runs]
        reached = [steps_to(GOOD, run) or "never" for run in runs]
        cells = (
            link.format(name),
            f"{fmean(final):.3f}",
            f"{min(final):.3f} to {max(final):.3f}",
            ", ".join(map(str, reached)),
            f"{min(run.seconds for run in runs):.0f}",
        )
        lines.append(f"| {' | '.join(cells)} |")
    return "\n".join(lines)


def steps_to(accuracy: float, curve: Curve) -> int | None:
    """The first step at which an accuracy was reached; None if it never was."""
    return next((step for step, value in zip(curve.steps, curve.accuracy, strict=True) if value >= accuracy), None)


def draw(curves: Sequence[Curve], path: Path) -> None:
    """A chart for each workflow: the mean over seeds, and a band from the worst to the best; the others in gray."""
    import matplotlib as mpl

    mpl.use("Agg")
    from matplotlib import pyplot as plt

    groups = by_workflow(curves)
    columns = min(4, len(groups))
    rows = -(-len(groups) // columns)
    figure, axes = plt.subplots(
        rows, columns, figsize=(2.2 * columns, 2.1 * rows + 0.3), sharex=True, sharey=True, squeeze=False
    )
    for axis, (name, runs) in zip(axes.flat, groups.items(), strict=False):
        for other in groups.values():
            axis.plot(other[0].steps, means(other), color="0.85", linewidth=0.8)
        values = [[run.accuracy[i] for run in runs] for i in range(len(runs[0].steps))]
        axis.fill_between(runs[0].steps, [min(v) for v in values], [max(v) for v in values], alpha=0.3, linewidth=0)
        axis.plot(runs[0].steps, means(runs), linewidth=1.5)
        axis.set_title(name, fontsize=9)
        axis.tick_params(labelsize=7)
        axis.grid(color="0.93", linewidth=0.6)
    for axis in axes.flat[len(groups) :]:
        axis.set_visible(False)
    figure.supxlabel("step", fontsize=8)
    figure.supylabel("held-out accuracy", fontsize=8)
    figure.tight_layout()
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=130)


def means(runs: Sequence[Curve]) -> list[float]:
    return [fmean(run.accuracy[i] for run in runs) for i in range(len(runs[0].steps))]


if __name__ == "__main__":
    main()
