"""Generation and training at once against lockstep, on four ranks.

    python benchmarks/asynchrony.py  # the table goes into docs/performance/asynchrony.md

An engine that takes the time of its tokens, and a training back end that takes the time of its own (see
`asynchrony_parts`), stand for a larger model; all else is the real command, `leaderless train`, and every worker is a
process. Lengths of responses have a heavy tail; tools and rewards may be slow. The settings take turns, and each run is
saved as soon as it is done. The first iterations, in which nothing is in flight yet, are left out: rates are samples
per second between two later steps.

Where ranks help, two more workers generate on the devices of those that train. For this, training is light, and tokens
cost more by the sequence than by the step, so that there is time to help in, and work that more ranks do faster.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from statistics import fmean, median
from typing import TypedDict
from unittest.mock import patch

from made import ROOT, prepare, train

RESULTS = ROOT / "docs/performance/asynchrony.json"
ITERATIONS, FIRST = 16, 4
"""Iterations of a run, and those that are left out."""
COMMON = (
    "batch={prompts_per_step: 16, responses_per_prompt: 4}",
    "rollout={engine: 'asynchrony_parts:make_engine', max_response_tokens: 512, max_sequences: 256}",
    "training={backend: 'asynchrony_parts:make_trainer'}",
    "algorithm.correction={type: truncate}",
    "run={reward_processes: 0, recorded_prompts: 0}",
)
WORKLOADS: Mapping[str, Sequence[str]] = {
    "heavy-tailed lengths": (),
    "light training": (),
    "slow rewards": ("reward={'asynchrony_parts:slow_reward': 1.0}", "run.reward_processes=1"),
    "episodes with tools": (
        "environment={type: 'asynchrony_parts:Tools', max_turns: 3, max_episode_tokens: 400, concurrency: 256}",
        "rollout.max_response_tokens=64",
        "reward={}",
        "data.max_prompt_tokens=64",
    ),
}
LIGHT_TRAINING = "light training"
COSTS: Mapping[str, Mapping[str, str]] = {
    LIGHT_TRAINING: {"STEP_S": "0.001", "SEQUENCE_S": "0.0002", "SCORE_S": "0.00003", "UPDATE_S": "0.00007"}
}
"""Other costs of a workload than those of `asynchrony_parts`."""
GENERATING, TRAINING = ("rollout", "reward"), ("advantage", "policy")
POOLS = {node: {"ranks": "0-1"} for node in GENERATING} | {node: {"ranks": "2-3"} for node in TRAINING}
GRADED_LATE = POOLS | {"reward": POOLS["policy"]}
"""Rewards are computed by the ranks that train."""
HELPED = {node: {"ranks": "0-1,4-5"} for node in GENERATING} | {node: POOLS[node] for node in TRAINING}


def channel(
    capacity: int, stragglers: str = "", slack: int = 0, pools: Mapping[str, Mapping[str, str]] = POOLS
) -> tuple[str, ...]:
    """Settings of two pools with a channel between them."""
    mode = f", mode: continuous, stragglers: {stragglers}" if stragglers else ""
    bound = f", max_staleness: {capacity + slack}" if slack else ""
    return f"layout={json.dumps(pools)}", f"channels={{rollout: {{capacity: {capacity}{bound}{mode}}}}}"


def helped(capacity: int, portions: Sequence[int]) -> tuple[str, ...]:
    """Settings of two pools and two ranks that help the first of them on the devices of the second."""
    shared = f"portions: {list(portions)}, helpers: {{4: 2, 5: 3}}"
    return (
        f"layout={json.dumps(HELPED)}",
        f"channels={{rollout: {{capacity: {capacity}, mode: continuous, {shared}}}}}",
    )


WAYS: Mapping[str, Sequence[str]] = {
    "lockstep, all ranks do both": (),
    "lockstep, 2 + 2 ranks": (f"layout={json.dumps(POOLS)}",),
    "fixed lag 2": channel(2),
    "continuous, bound 2": channel(2, "wait"),
    "continuous, depth 1, bound 2, defer": channel(1, "defer", 1),
    "continuous, bound 2, cancel": channel(2, "cancel"),
    "continuous, bound 2, rewards where training is": channel(2, "wait", pools=GRADED_LATE),
    "continuous, bound 4": channel(4, "wait"),
    "continuous, depth 2, bound 4, defer": channel(2, "defer", 2),
    "continuous, bound 2, two more ranks help": helped(2, [3, 3, 1, 1]),
}


class Run(TypedDict):
    """One run: samples per second, mean staleness and largest of the oldest tokens in optimizer steps, and lengths."""

    workload: str
    way: str
    samples_per_s: float
    staleness: float
    oldest: float
    trained_tokens: float
    voided_tokens: float


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--repeats", type=int, default=3)
    parser.add_argument("--workloads", nargs="+", choices=WORKLOADS, default=list(WORKLOADS))
    parser.add_argument("--ways", nargs="+", choices=WAYS, default=list(WAYS))
    parser.add_argument("--keep", action="store_true", help="add to the results that are there")
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    runs: list[Run] = json.loads(options.results.read_text(encoding="utf-8"))["runs"] if options.keep else []
    for _ in range(options.repeats):
        for workload in options.workloads:
            for way in options.ways:
                runs.append(measure(workload, way))
                print(runs[-1], file=sys.stderr)
                text = json.dumps({"cores": len(os.sched_getaffinity(0)), "runs": runs}, indent=1)
                options.results.write_text(text + "\n", encoding="utf-8")
    print(table(runs))


def measure(workload: str, way: str) -> Run:
    """Train once."""
    with tempfile.TemporaryDirectory(prefix="asynchrony-") as name:
        folder = Path(name)
        prepare(folder, hidden_size=16, num_layers=1, prompt_tokens=8)
        shutil.copy(Path(__file__).with_name("asynchrony_parts.py"), folder)
        settings = [*COMMON, f"steps={ITERATIONS}", *WORKLOADS[workload], *WAYS[way]]
        num_workers = 6 if way.endswith("help") else 4
        with patch.dict(os.environ, COSTS.get(workload, {})):
            rows = [row for row in train(folder, "run", settings, num_workers=num_workers) if "policy/loss" in row]
        ahead = {row["step"]: row for row in rows}
        file = folder / "runs/run/metrics-rollout.jsonl"
        if file.exists():
            for line in file.read_text(encoding="utf-8").splitlines():
                numbers = json.loads(line)
                ahead[numbers["step"]] = numbers | ahead.get(numbers["step"], {})
    seconds = rows[-1]["time_s"] - rows[FIRST - 1]["time_s"]
    later = [ahead[row["step"]] for row in rows[FIRST:]]
    return Run(
        workload=workload,
        way=way,
        samples_per_s=64 * (len(rows) - FIRST) / seconds,
        staleness=sum(row.get("rollout/staleness", 0.0) for row in later) / len(later),
        oldest=max(row.get("staleness/oldest", 0.0) for row in later),
        trained_tokens=sum(row["rollout/response_tokens"] for row in later) / len(later),
        voided_tokens=sum(row.get("generation/voided_tokens", 0.0) for row in later),
    )


def table(runs: Sequence[Run]) -> str:
    """The runs as a table in Markdown, as ratios to the faster lockstep."""
    titles = ("workload", "way", "samples/s", "ratio (range)", "staleness", "oldest", "trained tokens", "voided")
    lines = [f"| {' | '.join(titles)} |", "| --- " * len(titles) + "|"]
    for workload in dict.fromkeys(run["workload"] for run in runs):
        own = [run for run in runs if run["workload"] == workload]
        rates = {way: [run["samples_per_s"] for run in own if run["way"] == way] for way in WAYS}
        base = max(median(found) for way, found in rates.items() if way.startswith("lockstep") and found)
        for way, found in rates.items():
            some = [run for run in own if run["way"] == way]
            if some:
                ratio = f"{median(found) / base:.2f} ({min(found) / base:.2f}-{max(found) / base:.2f})"
                staleness = fmean(run["staleness"] for run in some)
                lines.append(
                    f"| {workload} | {way} | {median(found):.1f} | {ratio} | {staleness:.2f} "
                    f"| {max(run['oldest'] for run in some):.2f} | {fmean(run['trained_tokens'] for run in some):.0f} "
                    f"| {fmean(run['voided_tokens'] for run in some):.0f} |"
                )
    return "\n".join(lines)


if __name__ == "__main__":
    main()
