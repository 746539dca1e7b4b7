"""A whole training step of GRPO: ours next to TRL's, with the same model, prompts, lengths, tokens and cores.

    python benchmarks/training_step.py --trl-python VENV/bin/python

Both train a Qwen2 of five to ten million parameters on 16 prompts with 8 responses each. A step consists of generation,
the log-probabilities of the reference if there is a KL penalty, and one update. The first token of a response
determines its length (see `counting_model`); TRL may only choose among first tokens that give a response the same
length as with leaderless. Ours is the real command, `leaderless train`, and its own metrics are reported.

TRL has a separate environment: `python -m venv VENV && VENV/bin/pip install "torch>=2.11,<2.14" trl datasets`. The two
take turns. Every run is saved as soon as it is done, and a second call continues where the first was interrupted.
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
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path
from statistics import median
from typing import NamedTuple

import torch

import leaderless
from counting_model import FIRST_COUNTER, LONGEST, Lengths, heavy_tailed, write_counting_model, write_prompts
from training_step_report import PICTURE, PROMPTS, RESPONSES, RESULTS, Results, Run, draw, load, table

LEARNING_RATE = 1e-7
"""A rate so low that the weights keep the lengths that are encoded in them."""
PATTERN = r"t\d*[13579](t.*)?"
"""Rewarded responses: those with an odd first token, which is every second one."""
OURS = {"step": "time/step", "generation": "time/rollout", "log_probs": "time/reference", "update": "time/policy"}
WARM_UP = 1
HIDDEN, LAYERS = 256, 6
"""Width and layers of the model."""
LARGE = 2048
"""Rows and columns of the matrices whose product measures the speed of the cores."""


class Workload(NamedTuple):
    """What is trained.

    Attributes:
        prompt_tokens: Tokens of each prompt.
        max_response_tokens: Most tokens of a response.
        lengths: Probability of each length of a response.
        kl: Weight of the KL penalty; without one there is no reference model.
        vocabulary: Number of tokens.
        longest: Length up to which the tokens can count.
    """

    prompt_tokens: int
    max_response_tokens: int
    lengths: Lengths
    kl: float = 0.04
    vocabulary: int = 10_000
    longest: int = LONGEST


WORKLOADS = {
    "plain": Workload(32, 64, {64: 1.0}, kl=0.0, vocabulary=512, longest=64),
    "even": Workload(32, 64, {64: 1.0}),
    "heavy": Workload(32, 512, heavy_tailed(64, 1.1)),
    "prompts": Workload(1024, 64, {64: 1.0}),
}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--trl-python", type=Path, required=True, help="Python of an environment with TRL")
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--repeats", type=int, default=5)
    parser.add_argument("--steps", type=int, default=3, help="measured steps of each run, after one that is left out")
    parser.add_argument("--workers", type=int, default=1, help="workers of leaderless; they share the cores")
    parser.add_argument("--trl-batch", type=int, default=16, help="sequences in each pass of TRL")
    parser.add_argument("--results", type=Path, default=RESULTS)
    parser.add_argument("--picture", type=Path, default=PICTURE)
    parser.add_argument("--again", action="store_true", help="discard earlier runs")
    options = parser.parse_args()
    if options.again:
        options.results.unlink(missing_ok=True)
    with tempfile.TemporaryDirectory(prefix="training-step-") as name:
        folder = Path(name)
        parameters = prepare(folder)
        results = resume(options, parameters)
        for repeat in range(options.repeats):
            for workload in options.workloads:
                measure(folder, workload, repeat, options, results)
    draw(results, options.picture)
    print(table(results))


def prepare(folder: Path) -> dict[str, int]:
    """Write the models and prompts of all workloads; returns the number of parameters of each model."""
    parameters: dict[str, int] = {}
    for name, workload in WORKLOADS.items():
        home = folder / name
        home.mkdir()
        parameters[name] = write_counting_model(
            home / "model", workload.lengths, HIDDEN, LAYERS, workload.vocabulary, workload.longest
        )
        write_prompts(home / "rows.jsonl", workload.prompt_tokens, count=4096)
    return parameters


def resume(options: argparse.Namespace, parameters: dict[str, int]) -> Results:
    """Earlier results, if they were measured in the same way."""
    fresh = Results(
        cores=len(os.sched_getaffinity(0)),
        parameters=parameters,
        workers=options.workers,
        trl_batch=options.trl_batch,
        runs=[],
    )
    found = load(options.results)
    if found is None:
        return fresh
    if {**found, "runs": []} != fresh:
        sys.exit(f"{options.results} was measured in another way; use --again, or another --results")
    return found


def measure(folder: Path, workload: str, repeat: int, options: argparse.Namespace, results: Results) -> None:
    """Run what is missing of one repeat of a workload; the sides take turns in going first."""
    done = {(run["workload"], run["side"], run["repeat"]) for run in results["runs"]}
    sides = ("leaderless", "trl") if repeat % 2 == 0 else ("trl", "leaderless")
    for side in sides:
        if (workload, side, repeat) in done:
            continue
        num_steps = WARM_UP + options.steps
        home, settings = folder / workload, WORKLOADS[workload]
        lengths = sampled_lengths(home, settings, num_steps, options.workers)
        peak = product_flops()
        if side == "leaderless":
            versions, steps = train(home, settings, num_steps, options.workers, recorded_prompts=0)
        else:
            versions, steps = train_with_trl(home, settings, lengths, options)
        for step, of_step in zip(steps, lengths, strict=True):
            step["forward_flop"] = forward_flop(results["parameters"][workload], settings, of_step)
        results["runs"].append(
            Run(
                workload=workload,
                side=side,
                repeat=repeat,
                versions=versions,
                product_flops=peak,
                steps=steps[WARM_UP:],
            )
        )
        check_tokens(results["runs"], workload)
        options.results.parent.mkdir(parents=True, exist_ok=True)
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
        seconds = median(step["step"] for step in steps[WARM_UP:])
        print(f"{workload}, repeat {repeat}, {side}: {seconds:.2f} s a step", file=sys.stderr)


def product_flops() -> float:
    """Floating-point operations per second of a product of large float32 matrices, on all cores."""
    torch.set_num_threads(len(os.sched_getaffinity(0)))
    left, right = torch.randn(2, LARGE, LARGE)
    seconds: list[float] = []
    for _ in range(7):
        begin = time.perf_counter()
        left @ right
        seconds.append(time.perf_counter() - begin)
    return 2 * LARGE**3 / median(seconds)


def forward_flop(parameters: int, workload: Workload, lengths: Sequence[int]) -> float:
    """Floating-point operations that a forward pass over a step's samples must do.

    These are two for each weight and token (a prompt counts once for its responses, the head only at sampled tokens),
    and four for each number of a query and each of its keys. Nothing is predicted from the last token of a response.
    """
    inputs, prompt = [length - 1 for length in lengths], workload.prompt_tokens
    head = workload.vocabulary * HIDDEN
    tokens = PROMPTS * prompt + sum(inputs)
    pairs = PROMPTS * prompt * (prompt + 1) / 2 + sum(count * prompt + count * (count + 1) / 2 for count in inputs)
    return 2 * (parameters - 2 * head) * tokens + 2 * head * sum(lengths) + 4 * LAYERS * HIDDEN * pairs


def check_tokens(runs: Sequence[Run], workload: str) -> None:
    """Check that both sides have sampled the same number of tokens in every step."""
    counts = {
        tuple(round(step["response_tokens"]) for step in run["steps"]) for run in runs if run["workload"] == workload
    }
    if len(counts) > 1:
        sys.exit(f"{workload}: the sides sampled different numbers of tokens: {sorted(counts)}")


def train(
    home: Path, workload: Workload, num_steps: int, num_workers: int, *, recorded_prompts: int
) -> tuple[dict[str, str], list[dict[str, float]]]:
    """Some steps of `leaderless train`: versions, and seconds of each phase of each step."""
    recipe: dict[str, object] = {
        "name": "run",
        "workflow": "grpo",
        "models": {"policy": "model"},
        "data": {
            "train": {"path": "rows.jsonl", "prompt": "prompt", "answer": "answer", "template": "plain"},
            "max_prompt_tokens": workload.prompt_tokens,
        },
        "reward": {"format": {"pattern": PATTERN}},
        "batch": {"prompts_per_step": PROMPTS, "responses_per_prompt": RESPONSES},
        "rollout": {"max_response_tokens": workload.max_response_tokens, "max_sequences": PROMPTS * RESPONSES},
        "algorithm": {"kl": {"coefficient": workload.kl}},
        "optimizer": {"learning_rate": LEARNING_RATE},
        "run": {"recorded_prompts": recorded_prompts},
        "loggers": [],
        "steps": num_steps,
    }
    shutil.rmtree(home / "runs", ignore_errors=True)
    (home / "run.yaml").write_text(json.dumps(recipe), encoding="utf-8")
    threads = max(1, len(os.sched_getaffinity(0)) // num_workers)
    command = [sys.executable, "-m", "leaderless", "train", "run.yaml", "--workers", str(num_workers)]
    run(command, home, os.environ | {"OMP_NUM_THREADS": str(threads)})
    lines = [json.loads(line) for line in (home / "runs/run/metrics.jsonl").read_text(encoding="utf-8").splitlines()]
    steps = [
        {phase: line.get(metric, 0.0) for phase, metric in OURS.items()}  # no reference without a penalty
        | {"response_tokens": line["rollout/response_tokens"] * PROMPTS * RESPONSES}
        for line in lines
        if line["step"] > 0
    ]
    return {name: version(name) for name in ("transformers", "torch")} | {"leaderless": leaderless.__version__}, steps


def sampled_lengths(home: Path, workload: Workload, num_steps: int, num_workers: int) -> list[list[int]]:
    """The length of each response of each step, siblings together, as ours samples them."""
    if len(workload.lengths) == 1:
        return [list(workload.lengths) * PROMPTS * RESPONSES] * num_steps
    saved = home / f"lengths-{num_steps}.json"
    if not saved.exists():
        train(home, workload, num_steps, num_workers, recorded_prompts=PROMPTS)
        samples = [
            json.loads(line)
            for file in sorted((home / "runs/run/samples").iterdir())
            for line in file.read_text(encoding="utf-8").splitlines()
        ]
        samples.sort(key=lambda sample: (sample["step"], sample["group_id"], sample["sample_id"]))
        lengths: dict[int, list[int]] = {}
        for sample in samples:
            # The name of each token but the last is a "t" and its number.
            lengths.setdefault(sample["step"], []).append(sample["response"].count("t") + 1)
        saved.write_text(json.dumps(list(lengths.values())), encoding="utf-8")
    found: list[list[int]] = json.loads(saved.read_text(encoding="utf-8"))
    return found


def train_with_trl(
    home: Path, workload: Workload, lengths: Sequence[Sequence[int]], options: argparse.Namespace
) -> tuple[dict[str, str], list[dict[str, float]]]:
    """The same with TRL, one process on all cores."""
    job = {
        "model": str(home / "model"),
        "rows": str(home / "rows.jsonl"),
        "output": str(home / "trl"),
        "result": str(home / "trl.json"),
        "prompts": PROMPTS,
        "responses": RESPONSES,
        "batch": options.trl_batch,
        "prompt_tokens": workload.prompt_tokens,
        "max_response_tokens": workload.max_response_tokens,
        "lengths": lengths,
        "first_counter": FIRST_COUNTER,
        "longest": workload.longest,
        "kl": workload.kl,
        "learning_rate": LEARNING_RATE,
        "pattern": PATTERN,
        "steps": len(lengths),
        "threads": len(os.sched_getaffinity(0)),
    }
    (home / "job.json").write_text(json.dumps(job), encoding="utf-8")
    script = Path(__file__).with_name("training_step_trl.py")
    environment = {name: value for name, value in os.environ.items() if name not in {"PYTHONPATH", "OMP_NUM_THREADS"}}
    run([str(options.trl_python), str(script), str(home / "job.json")], home, environment)
    found = json.loads((home / "trl.json").read_text(encoding="utf-8"))
    return found["versions"], found["steps"]


def run(command: Sequence[str], home: Path, environment: Mapping[str, str]) -> None:
    """Run a command to its end; if it fails, its output is shown."""
    done = subprocess.run(command, cwd=home, env=environment, capture_output=True, text=True, check=False)
    if done.returncode:
        sys.exit(f"{' '.join(command)} failed with exit code {done.returncode}:\n{done.stdout}\n{done.stderr}")


if __name__ == "__main__":
    main()
