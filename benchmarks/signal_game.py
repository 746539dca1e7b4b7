"""Two tiny policies that have to agree on a language, for several seeds: does the planner get its share of the credit?

    pip install --editable .[benchmarks]
    python benchmarks/signal_game.py  # the table goes into docs/algorithms/marft.md

A planner sees one of eight digits and sends one symbol; a solver sees only the symbol and says the digit. All variants
begin with the same models for a seed. An interrupted benchmark continues where it stopped; remove its folder to start
again.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import asdict, dataclass
from pathlib import Path
from random import Random
from statistics import fmean

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/algorithms/signal_game.json"
DIGITS = "01234567"
GOOD, NUM_PERMUTATIONS = 0.95, 200
SOLVERS = ("solver_rollout", "solver_old", "solver", "advantage")
POOLS = [f"layout.{name}.ranks=0" for name in ("planner_rollout", "planner_old", "planner", "reward", "samples")]
POOLS += [f"layout.{name}.ranks=1" for name in SOLVERS]
VARIANTS: Mapping[str, tuple[str, int, list[str]]] = {
    "Dr. MAS, one pool": ("dr_mas", 1, []),
    "Dr. MAS, two pools": ("dr_mas", 2, POOLS),
    "MARFT, one pool": ("marft", 1, []),
    "MARFT, two pools": ("marft", 2, [*POOLS, "layout.critic.ranks=1", "layout.values.ranks=1"]),
    "solver alone": ("dr_mas", 1, [f"workflow={ROOT}/examples/signal_game/solver_alone.yaml"]),
}
"""Recipe, number of workers, and overrides of each variant."""


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        variant: Name of the variant.
        seed: Seed of the models, the order of the tasks and the sampling.
        curve: Share of sampled plays that were won, step by step.
        greedy: Share of digits that the final policies get right, decoded greedily. An untrained planner's most likely
            message differs a little from digit to digit, so that a solver alone does better than with sampled ones.
        permuted: Share of digits that they get right with permuted messages, mean over random permutations.
        seconds: Duration of all steps.
    """

    variant: str
    seed: int
    curve: list[float]
    greedy: float
    permuted: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """Share of sampled plays that were won in the last ten steps."""
        return fmean(self.curve[-10:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=150, help="steps of each run")
    parser.add_argument("--parallel", type=int, default=2, help="runs at a time")
    parser.add_argument("--seeds", nargs="+", type=int, default=list(range(8)))
    parser.add_argument("--variants", nargs="+", choices=VARIANTS, default=list(VARIANTS))
    parser.add_argument(
        "--folder", type=Path, default=ROOT / "runs/signal-benchmark", help="folder for models and runs"
    )
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs = [(variant, seed) for variant in options.variants for seed in options.seeds]
    with ThreadPoolExecutor(options.parallel) as pool:
        outcomes = list(pool.map(lambda run: measured(*run, options.steps, options.folder.resolve()), runs))
    results = {"steps": options.steps, "runs": [asdict(outcome) for outcome in outcomes]}
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(outcomes))


def measured(variant: str, seed: int, steps: int, folder: Path) -> Outcome:
    """Train a variant with a seed, and let its final policies play."""
    recipe, num_workers, overrides = VARIANTS[variant]
    name = "".join(letter if letter.isalnum() else "-" for letter in f"{variant}-{seed}-{steps}")
    home = folder / f"seed-{seed}"
    home.mkdir(parents=True, exist_ok=True)
    done = home / f"{name}.json"
    if done.exists():
        return Outcome(**json.loads(done.read_text(encoding="utf-8")))
    call(["-m", "examples.signal_game.prepare", str(seed)], home, f"{name}-prepare")
    overrides = [*overrides, f"name={name}", f"seed={seed}", f"steps={steps}", "loggers=[]"]
    overrides += ["run.trace_steps=0", "run.recorded_prompts=0", "run.reward_processes=0"]
    file = str(ROOT / f"recipes/agents/signal/{recipe}.yaml")
    call(["-m", "leaderless", "train", file, *overrides, "--workers", str(num_workers)], home, name)
    for role in ("planner", "solver"):
        if role == "planner" and variant == "solver alone":
            continue
        call(["-m", "leaderless", "export", f"runs/{name}", f"{name}/{role}", "--role", role], home, f"{name}-{role}")
    planner = home / "runs/signal/planner" if variant == "solver alone" else home / name / "planner"
    messages, answers = replies(planner), replies(home / name / "solver")
    records = [json.loads(line) for line in (home / "runs" / name / "metrics.jsonl").read_text().splitlines()]
    outcome = Outcome(
        variant,
        seed,
        [round(2 * record["reward/mean"], 4) for record in records],  # the solver gets the reward of both
        fmean(answers[messages[digit]] == digit for digit in DIGITS),
        round(permuted(messages, answers), 4),
        round(sum(record.get("time/step", 0.0) for record in records), 1),
    )
    done.write_text(json.dumps(asdict(outcome)), encoding="utf-8")
    print(f"{name}: {outcome.accuracy:.3f}, permuted {outcome.permuted:.3f}", file=sys.stderr)
    return outcome


def replies(path: Path) -> dict[str, str]:
    """What a policy says to each symbol, and to nothing, decoded greedily."""
    model, tokenizer = AutoModelForCausalLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    tokens = {symbol: tokenizer.encode(symbol) or [tokenizer.eos_token_id] for symbol in ("", *DIGITS)}
    with torch.no_grad():
        best = {symbol: int(model(torch.tensor([ids])).logits[0, -1].argmax()) for symbol, ids in tokens.items()}
    return {symbol: tokenizer.decode([token], skip_special_tokens=True) for symbol, token in best.items()}


def permuted(messages: Mapping[str, str], answers: Mapping[str, str]) -> float:
    """Share of digits that the solver gets right if the planner's messages go to the wrong plays."""
    random, shares = Random(0), []
    for _ in range(NUM_PERMUTATIONS):
        sent = [messages[digit] for digit in DIGITS]
        random.shuffle(sent)
        shares.append(fmean(answers[message] == digit for digit, message in zip(DIGITS, sent, strict=True)))
    return fmean(shares)


def call(arguments: list[str], folder: Path, name: str) -> None:
    """Run Python on one core in a folder, with its output in a file there."""
    environment = os.environ | {"OMP_NUM_THREADS": "1", "PYTHONPATH": f"{ROOT}/src:{ROOT}"}
    with (folder / f"{name}.log").open("w", encoding="utf-8") as log:
        command = [sys.executable, *arguments]
        code = subprocess.run(command, cwd=folder, env=environment, stdout=log, stderr=log, check=False).returncode
    if code:
        raise SystemExit(f"{name} failed, see {folder / name}.log")


def table(outcomes: Sequence[Outcome]) -> str:
    """The results as a table in Markdown."""
    lines = [
        "| variant | seeds at 0.95 or more | plays won, all seeds | median steps to 0.95 | messages permuted |",
        "| --- | --- | --- | --- | --- |",
    ]
    for variant in dict.fromkeys(outcome.variant for outcome in outcomes):
        own = [outcome for outcome in outcomes if outcome.variant == variant]
        good = sum(outcome.accuracy >= GOOD for outcome in own)
        steps = sorted(first_good(outcome.curve) or 10**6 for outcome in own)[len(own) // 2]
        shares, wrong = [one.accuracy for one in own], fmean(one.permuted for one in own)
        reached = str(steps) if steps < 10**6 else "never"
        lines.append(
            f"| {variant} | {good} of {len(own)} | {min(shares):.3f} to {max(shares):.3f} | {reached} | {wrong:.3f} |"
        )
    return "\n".join(lines)


def first_good(curve: Sequence[float], window: int = 5) -> int | None:
    """First step at which the mean of the last steps is good; None if there is none."""
    ends = range(window, len(curve) + 1)
    return next((end for end in ends if fmean(curve[end - window : end]) >= GOOD), None)


def load() -> list[Outcome]:
    """The newest results; none before the first benchmark."""
    if not RESULTS.exists():
        return []
    return [Outcome(**run) for run in json.loads(RESULTS.read_text(encoding="utf-8"))["runs"]]


if __name__ == "__main__":
    main()
