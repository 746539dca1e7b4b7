"""Checkpoints: the seconds of training that each one costs, written while training continues or while it waits.

    python benchmarks/checkpoints.py

Two workers of one core each train a model of about 20 million parameters with GRPO. Runs without checkpoints, with
asynchronous and with synchronous ones take turns. The cost of a checkpoint is the difference in the time of all steps
but the first, divided by the number of checkpoints written in that time.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
import tempfile
from pathlib import Path
from statistics import median

from made import ROOT, prepare, train

RESULTS = ROOT / "docs/scaling/checkpoints.json"
SETTINGS = [
    "batch={prompts_per_step: 8, responses_per_prompt: 4, micro_batch_tokens: 2048}",
    "rollout={max_response_tokens: 32, max_sequences: 64}",
    "checkpoint.every_minutes=0",
]
WAYS = {"none": [], "asynchronous": ["checkpoint.asynchronous=true"], "synchronous": ["checkpoint.asynchronous=false"]}
EVERY = 4


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--checkpoints", type=int, default=2, help="checkpoints measured in each run")
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    last = 1 + EVERY * options.checkpoints
    seconds: dict[str, list[float]] = {way: [] for way in WAYS}
    size = 0
    with tempfile.TemporaryDirectory(prefix="checkpoints-") as name:
        folder = Path(name)
        prepare(folder, hidden_size=512, num_layers=6, prompt_tokens=64)
        for repeat in range(options.repeats):
            for way, settings in WAYS.items():
                every = [f"checkpoint.every_steps={EVERY if way != 'none' else 0}", f"steps={last + 1}"]
                run = f"{way}-{repeat}"
                steps = train(folder, run, [*SETTINGS, *settings, *every], num_workers=2)
                times = {int(step["step"]): step["time_s"] for step in steps}
                seconds[way].append(times[last] - times[1])
                print(f"{way}: {seconds[way][-1]:.2f} s for {last - 1} steps", file=sys.stderr)
                newest = max((folder / "runs" / run / "checkpoints").iterdir())
                size = sum(path.stat().st_size for path in newest.rglob("*") if path.is_file())
    costs = {
        way: [(value - base) / options.checkpoints for value, base in zip(seconds[way], seconds["none"], strict=True)]
        for way in WAYS
        if way != "none"
    }
    results = {"cores": len(os.sched_getaffinity(0)), "checkpoint_bytes": size, "seconds": seconds, "costs": costs}
    options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(f"a checkpoint of {size / 1e6:.0f} MB; a step takes {median(seconds['none']) / (last - 1):.2f} s")
    for way, values in costs.items():
        print(f"{way}: {median(values):.2f} s ({min(values):.2f} to {max(values):.2f}) of training a checkpoint")


if __name__ == "__main__":
    main()
