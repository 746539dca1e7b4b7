"""Curves of distillation on the quickstart: a teacher that has learned to add, several divergences, and seeds.

    python benchmarks/distillation.py && python docs/generate.py

The teacher is the quickstart's model after steps of grpo; each student starts from the same model before them. All have
the same prompts with a seed, and one response to each. An interrupted benchmark continues where it stopped; remove its
folder to start again.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

from algorithms import ROOT, TEACHER, call, leaderless, prepare

RESULTS = ROOT / "docs/algorithms/distillation.json"
SEEDS = (0, 1, 2)
EVERY = 4
"""Steps from one evaluation to the next."""
PROMPTS = 128
"""Prompts of a step, each with one response."""
WAYS: Mapping[str, tuple[str, ...]] = {
    "sampled token": ("workflow=distillation",),
    "reverse KL": ("workflow=gkd",),
    "forward KL": ("workflow=gkd", "algorithm.distillation.divergence=forward_kl"),
    "Jensen-Shannon": ("workflow=gkd", "algorithm.distillation.divergence=jensen_shannon"),
    "reverse KL, top 4": ("workflow=gkd", "algorithm.distillation.top_k=4"),
}
"""Settings of each way to learn from the teacher, by its name in the picture."""


class Curve(NamedTuple):
    """Accuracy of a student, and what its updates minimize, over steps."""

    way: str
    seed: int
    steps: list[int]
    accuracy: list[float]
    divergence: list[float | None]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=24, help="steps of each student")
    parser.add_argument("--teacher-steps", type=int, default=60, help="steps of grpo that make the teacher")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time, each with one worker and one core")
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=WAYS)
    parser.add_argument("--seeds", nargs="+", type=int, default=SEEDS)
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/benchmark", help="folder for data, models and runs")
    options = parser.parse_args()
    folder: Path = options.folder.resolve()
    prepare(folder)
    accuracy = teach(folder, options.teacher_steps)
    runs = [(way, seed) for seed in options.seeds for way in options.ways]
    with ThreadPoolExecutor(options.parallel) as pool:
        curves = list(pool.map(lambda run: train(*run, options.steps, folder), runs))
    imitation_steps, imitated = measured(folder / "runs/quickstart-sft/metrics.jsonl")[-1]
    settings = {"steps": options.steps, "prompts": PROMPTS, "teacher_steps": options.teacher_steps}
    settings |= {"imitation_steps": imitation_steps, "student": imitated["evaluation/mean@1"], "teacher": accuracy}
    results = settings | {"runs": [curve._asdict() for curve in curves]}
    RESULTS.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")


def teach(folder: Path, steps: int) -> float:
    """The accuracy of the teacher, which is trained unless it exists."""
    records = folder / "runs/distillation-teacher/metrics.jsonl"
    if not (folder / TEACHER / "config.json").exists():
        overrides = ["name=distillation-teacher", f"steps={steps}", f"evaluation.every_steps={steps}", "loggers=[]"]
        recipe = str(ROOT / "recipes/quickstart/grpo.yaml")
        call(leaderless("train", recipe, *overrides, "--workers", "1"), folder, "distillation-teacher")
        call(leaderless("export", "runs/distillation-teacher", TEACHER), folder, "teacher")
    return measured(records)[-1][1]["evaluation/mean@1"]


def train(way: str, seed: int, steps: int, folder: Path) -> Curve:
    """Train a student in one of the ways with a seed."""
    name = f"distillation-{way.replace(' ', '-').replace(',', '').lower()}-{seed}"
    overrides = [*WAYS[way], f"name={name}", f"seed={seed}", f"steps={steps}", f"models.reference={TEACHER}"]
    overrides += [f"evaluation.every_steps={EVERY}", "loggers=[]", "run.trace_steps=0", "run.recorded_prompts=0"]
    overrides += ["algorithm.kl.coefficient=0", "batch.responses_per_prompt=1", f"batch.prompts_per_step={PROMPTS}"]
    recipe = str(ROOT / "recipes/quickstart/grpo.yaml")
    call(leaderless("train", recipe, *overrides, "--workers", "1"), folder, name)
    found = measured(folder / "runs" / name / "metrics.jsonl")
    measure = "distillation/divergence" if way == "sampled token" else "policy/divergence"
    curve = Curve(
        way,
        seed,
        [step for step, _ in found],
        [record["evaluation/mean@1"] for _, record in found],
        [None if measure not in record else round(record[measure], 5) for _, record in found],
    )
    print(f"{name}: {curve.accuracy[-1]:.3f}", file=sys.stderr)
    return curve


def measured(path: Path) -> list[tuple[int, dict[str, float]]]:
    """The records of the steps after which accuracy was measured."""
    records = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    return [(int(record["step"]), record) for record in records if "evaluation/mean@1" in record]


if __name__ == "__main__":
    main()
