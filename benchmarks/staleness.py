"""What old rows cost: learning curves of the quickstart under several bounds of staleness, for several seeds.

    python benchmarks/staleness.py  # the table goes into docs/performance/asynchrony.md

One rank generates continuously and one trains; with a bound of 0 they go in lockstep. All runs begin with the same
model after supervised fine-tuning. The runs of a seed take turns; each is saved as soon as it is done, and an
interrupted benchmark continues where it stopped.
"""

from __future__ import annotations

import argparse
import json
import shutil
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import fmean, stdev

from quickstart_runs import NUM_LAST, RECIPE, ROOT, make_base, read, run

RESULTS = ROOT / "docs/performance/staleness.json"
LAYOUT = "{rollout: {ranks: 0}, reward: {ranks: 0}, reference: {ranks: 1}, advantage: {ranks: 1}, policy: {ranks: 1}}"


@dataclass(frozen=True)
class Outcome:
    """One run.

    Attributes:
        bound: Largest staleness in optimizer steps; 0 for lockstep.
        seed: Seed of the order of the prompts and of the sampling.
        curve: Held-out accuracy, evaluation by evaluation.
        staleness: Mean age of the trained tokens in optimizer steps.
        oldest: Largest mean age of the oldest tokens of a step's samples.
        seconds: Duration of all steps.
    """

    bound: int
    seed: int
    curve: list[float]
    staleness: float
    oldest: float
    seconds: float

    @property
    def accuracy(self) -> float:
        """Held-out accuracy at the end."""
        return fmean(self.curve[-NUM_LAST:])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--bounds", nargs="+", type=int, default=[0, 1, 2, 4, 8])
    parser.add_argument("--seeds", nargs="+", type=int, default=[0, 1, 2])
    parser.add_argument("--steps", type=int, default=200)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    make_base()
    outcomes: list[Outcome] = []
    if options.results.exists():
        outcomes = [Outcome(**found) for found in json.loads(options.results.read_text(encoding="utf-8"))]
    for seed in options.seeds:
        for bound in options.bounds:
            if any((one.bound, one.seed) == (bound, seed) for one in outcomes):
                continue
            outcomes.append(measure(bound, seed, options.steps))
            text = json.dumps([asdict(one) for one in outcomes], indent=1)
            options.results.write_text(text + "\n", encoding="utf-8")
    print(table(outcomes))


def measure(bound: int, seed: int, steps: int) -> Outcome:
    """Train once."""
    folder = ROOT / f"runs/staleness-{bound}-{seed}"
    channel = f"{{rollout: {{capacity: {bound}, mode: continuous}}}}" if bound else "{}"
    run(
        *("-m", "leaderless", "train", RECIPE, "--workers", "2", "--fresh"),
        *(f"name={folder.name}", f"seed={seed}", f"steps={steps}", f"layout={LAYOUT}", f"channels={channel}"),
        *("algorithm.correction={type: truncate}", "loggers=[]", "checkpoint.every_minutes=0"),
    )
    rows = read(folder / "metrics.jsonl")
    evaluations = rows if bound == 0 else read(folder / "metrics-evaluation.jsonl")
    trained = [row for row in rows if "policy/loss" in row]
    outcome = Outcome(
        bound=bound,
        seed=seed,
        curve=[row["evaluation/mean@1"] for row in evaluations if "evaluation/mean@1" in row],
        staleness=fmean(row.get("rollout/staleness", 0.0) for row in trained),
        oldest=max(row.get("staleness/oldest", 0.0) for row in trained),
        seconds=sum(row["time/step"] for row in trained),
    )
    shutil.rmtree(folder)
    return outcome


def table(outcomes: Sequence[Outcome]) -> str:
    """The outcomes as a table in Markdown."""
    lines = [
        "| bound | accuracy at the end | spread over seeds | mean staleness | oldest | seconds |",
        "| --- " * 6 + "|",
    ]
    for bound in sorted({one.bound for one in outcomes}):
        own = [one for one in outcomes if one.bound == bound]
        ends = [100 * one.accuracy for one in own]
        spread = stdev(ends) if len(ends) > 1 else 0.0
        lines.append(
            f"| {bound} | {fmean(ends):.1f} % | {spread:.1f} | {fmean(one.staleness for one in own):.2f} | "
            f"{max(one.oldest for one in own):.2f} | {fmean(one.seconds for one in own):.0f} |"
        )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
