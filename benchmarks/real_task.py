"""A pretrained model that learns word problems: ours next to TRL, from the same weights, problems and settings.

    python benchmarks/real_task.py MODEL --trl-python VENV/bin/python

MODEL is a folder, or a name on the hub. Both train by `recipes/quickstart/word_problems.yaml`, several times with other
seeds: the same number of prompts, responses and updates, learning rate, loss and reward, and no KL penalty. Measured
are the mean reward of each step and the accuracy on 256 held-out problems before and after. With `--adapters`, ours
trains adapters, too. Seconds are measured apart, with `--seconds`: some steps of each side, on a machine that does
nothing else.

TRL has a separate environment: `python -m venv VENV && VENV/bin/pip install "torch>=2.11,<2.14" trl datasets`. The
sides take turns. Every run is saved as soon as it is done, and a second call continues where the first was interrupted.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import fmean, median
from typing import Any

import leaderless
from leaderless.cli.quickstart_project.data import write_word_problems
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.workflow import load_recipe

ROOT = Path(__file__).resolve().parents[1]
RECIPE = ROOT / "recipes/quickstart/word_problems.yaml"
RESULTS = ROOT / "docs/performance/real_task.json"
PICTURE = ROOT / "docs/images/real-task.png"
TITLES = {"leaderless": "leaderless", "trl": "TRL", "adapters": "leaderless, adapters"}
ADAPTERS = ("models.policy.lora.rank=16", "optimizer.learning_rate=1e-4")
ACCURACY = "evaluation/mean@1"
Run = dict[str, Any]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", help="folder, or name on the hub")
    parser.add_argument("--trl-python", type=Path, help="Python of an environment with TRL; without it, only ours runs")
    parser.add_argument("--trl-batch", type=int, default=16, help="sequences in each pass of TRL")
    parser.add_argument("--adapters", action="store_true", help="train adapters, too")
    parser.add_argument("--seeds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--seconds", action="store_true", help="measure the seconds of steps, and nothing else")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    options = parser.parse_args()
    model = str(Path(options.model).resolve()) if Path(options.model).is_dir() else options.model
    results = json.loads(options.results.read_text()) if options.results.exists() else {"runs": []}
    results |= {"model": Path(model).name, "cores": len(os.sched_getaffinity(0))}
    done = {(run["side"], run["seed"]) for run in results["runs"]}
    sides = ["leaderless", *["trl"] * bool(options.trl_python), *["adapters"] * options.adapters]
    for seed in range(options.seeds):
        for side in sides if seed % 2 == 0 else reversed(sides):
            if (side, seed) in done and not options.seconds:
                continue
            with tempfile.TemporaryDirectory(prefix="real-task-") as folder:
                write_word_problems(Path(folder) / "runs/quickstart-problems")
                if side == "trl":
                    found = train_with_trl(Path(folder), model, seed, options)
                else:
                    found = train(Path(folder), model, seed, options.steps, ADAPTERS if side == "adapters" else ())
            seconds = found.pop("seconds")
            if options.seconds:
                results.setdefault("seconds", {}).setdefault(side, []).extend(seconds)
            else:
                results["runs"].append({"side": side, "seed": seed, **found})
            options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
            print(f"{side}, seed {seed}: {found['accuracy']:.1%}, {median(seconds):.1f} s a step", file=sys.stderr)
    draw(results, options.picture)
    print(table(results))


def train(home: Path, model: str, seed: int, num_steps: int, more: Sequence[str]) -> Run:
    """A run of `leaderless train`, on all cores."""
    settings = [f"models.policy.path={model}", f"seed={seed}", f"steps={num_steps}", "loggers=[]", *more]
    settings.append(f"evaluation.every_steps={num_steps}")
    run([sys.executable, "-m", "leaderless", "train", str(RECIPE), "--workers", "1", *settings], home)
    rows = list(RunDirectory(home / "runs/quickstart-real").read_metrics())
    before, after = (row[ACCURACY] for row in rows if ACCURACY in row)
    rewards, seconds = ([row[name] for row in rows if row["step"]] for name in ("reward/mean", "time/step"))
    versions = {name: version(name) for name in ("transformers", "torch")} | {"leaderless": leaderless.__version__}
    return {"versions": versions, "rewards": rewards, "seconds": seconds, "before": before, "accuracy": after}


def train_with_trl(home: Path, model: str, seed: int, options: argparse.Namespace) -> Run:
    """The same with TRL, on all cores."""
    recipe = load_recipe(RECIPE).recipe
    job = {
        "model": model,
        "train": "runs/quickstart-problems/train.jsonl",
        "held_out": "runs/quickstart-problems/test.jsonl",
        "output": "trl",
        "result": "trl.json",
        "prompts": recipe.batch.prompts_per_step,
        "responses": recipe.batch.responses_per_prompt,
        "batch": options.trl_batch,
        "max_response_tokens": recipe.rollout.max_response_tokens,
        "learning_rate": recipe.optimizer.learning_rate,
        "schedule": recipe.optimizer.schedule,
        "steps": options.steps,
        "seed": seed,
        "threads": len(os.sched_getaffinity(0)),
    }
    (home / "job.json").write_text(json.dumps(job), encoding="utf-8")
    run([str(options.trl_python.absolute()), str(Path(__file__).with_name("real_task_trl.py")), "job.json"], home)
    found: Run = json.loads((home / "trl.json").read_text(encoding="utf-8"))
    return found


def run(command: Sequence[str], home: Path) -> None:
    """Run a command to its end, which shows what it does."""
    names = {"OMP_NUM_THREADS"} if "leaderless" in command else {"OMP_NUM_THREADS", "PYTHONPATH"}
    environment = {name: value for name, value in os.environ.items() if name not in names}
    done = subprocess.run(command, cwd=home, env=environment, stdout=sys.stderr, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}")


def table(results: Run) -> str:
    """Accuracy and seconds a step of each side, in Markdown: medians, with the smallest and the largest."""
    lines = [
        "| | runs | held-out accuracy before | after | reward of the last five steps | seconds a step |",
        "| --- | ---: | ---: | ---: | ---: | ---: |",
    ]
    before = median(run["before"] for run in results["runs"] if "before" in run)
    for side, title in TITLES.items():
        runs = [run for run in results["runs"] if run["side"] == side]
        if runs:
            after = spread((run["accuracy"] for run in runs), "{:.1%}")
            late = spread((fmean(run["rewards"][-5:]) for run in runs), "{:.2f}")
            seconds = spread(results.get("seconds", {}).get(side, ()), "{:.1f}")
            lines.append(f"| {title} | {len(runs)} | {before:.1%} | {after} | {late} | {seconds} |")
    return "\n".join(lines)


def conditions(results: Run) -> str:
    """The model, the machine and the packages, in a sentence."""
    versions = {name: number for run in results["runs"] for name, number in run["versions"].items()}
    packages = ", ".join(f"{name} {number}" for name, number in versions.items())
    return f"{results['model']} on {results['cores']} cores; {packages}."


def spread(values: Iterable[float], form: str) -> str:
    """The median, and the smallest and the largest of several values; a dash for none."""
    if not (values := list(values)):
        return "–"
    low, *_, high = ordered = sorted(values) * 2
    text = form.format(median(ordered))
    return text if low == high else f"{text} ({form.format(low)} to {form.format(high)})"


def draw(results: Run, path: Path) -> None:
    """The reward of each step of each side, and the accuracy before and after: each seed, and the mean."""
    from matplotlib import pyplot as plt

    figure, axes = plt.subplots(figsize=(8, 4), layout="constrained")
    for color, (side, title) in enumerate(TITLES.items()):
        runs = [run for run in results["runs"] if run["side"] == side]
        curves = [run["rewards"] for run in runs]
        for run, curve in zip(runs, curves, strict=True):
            axes.plot(range(1, len(curve) + 1), curve, color=f"C{color}", alpha=0.25, linewidth=1)
            axes.plot(len(curve), run["accuracy"], "o", color=f"C{color}")
        if runs:
            mean = [fmean(values) for values in zip(*curves, strict=True)]
            axes.plot(range(1, len(mean) + 1), mean, color=f"C{color}", linewidth=2, label=title)
    axes.set_xlabel("step")
    axes.set_ylabel("mean reward; dots: held-out accuracy at the end")
    axes.set_ylim(0, 1.02)
    axes.xaxis.get_major_locator().set_params(integer=True)
    axes.legend(loc="lower right")
    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, dpi=110)
    plt.close(figure)


if __name__ == "__main__":
    main()
