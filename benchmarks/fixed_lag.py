"""A fixed lag: the seconds of runs whose pools generate and train at the same time, next to what arithmetic promises.

    python benchmarks/fixed_lag.py

An engine that sleeps instead of generating, and a training back end that sleeps instead of updating (see
`fixed_lag_parts`), make the seconds of each iteration known; all else is the real command, `leaderless train`. One pool
generates and the other trains: in lockstep, or with a channel of one or two iterations between them. Every worker is a
process. The settings take turns, and every run is saved as soon as it is done.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import sys
import tempfile
from pathlib import Path

from fixed_lag_report import RESULTS, Results, Run, Times, constant_times, drawn_times, promised_seconds, table
from made import prepare, train

SETTINGS = (
    "batch={prompts_per_step: 8, responses_per_prompt: 4}",
    "rollout={engine: 'fixed_lag_parts:make_engine', max_response_tokens: 8}",
    "training={backend: 'fixed_lag_parts:make_trainer'}",
    "run={reward_processes: 0}",
)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--ranks", nargs="+", type=int, default=(1, 2), help="ranks of each of the two pools")
    parser.add_argument("--lags", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    all_times = {"constant": constant_times(options.iterations), "drawn": drawn_times(options.iterations)}
    results = Results(cores=len(os.sched_getaffinity(0)), iterations=options.iterations, runs=[])
    for ranks in options.ranks:
        for name, times in all_times.items():
            for lag in options.lags:
                run = Run(ranks=ranks, times=name, lag=lag, promised_s=promised_seconds(times, lag), measured_s=0.0)
                run["measured_s"] = measured_seconds(times, ranks, lag)
                results["runs"].append(run)
                print(f"{run}", file=sys.stderr)
                options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


def measured_seconds(times: Times, ranks: int, lag: int) -> float:
    """Seconds of a run from the begin of its first iteration to the end of its last, by the clocks of its parts."""
    with tempfile.TemporaryDirectory(prefix="fixed-lag-") as name:
        folder = Path(name)
        prepare(folder, hidden_size=16, num_layers=1, prompt_tokens=8)
        shutil.copy(Path(__file__).with_name("fixed_lag_parts.py"), folder)
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
        generating, training = f"0-{ranks - 1}", f"{ranks}-{2 * ranks - 1}"
        pools = {"rollout": generating, "reward": generating, "advantage": training, "policy": training}
        settings = [
            *SETTINGS,
            f"steps={len(times['generation'])}",
            f"layout={json.dumps({node: {'ranks': pool} for node, pool in pools.items()})}",
            *([f"channels={{rollout: {{capacity: {lag}}}}}"] if lag else []),
        ]
        train(folder, "run", settings, num_workers=2 * ranks)
        spans = [json.loads(line) for file in folder.glob("spans-*.jsonl") for line in file.read_text().splitlines()]
    return float(max(end for _, _, end in spans) - min(begin for _, begin, _ in spans))


if __name__ == "__main__":
    main()
