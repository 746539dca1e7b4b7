"""New weights on a slow link: the share of an iteration in which the pool that generates waits for them or takes them.

    python benchmarks/weight_travel.py

The engine and the training back end sleep for known times, as in `fixed_lag.py`, and the rank that generates sleeps in
each transfer of weights; all else is the real command, `leaderless train`. One worker generates and another one trains,
in lockstep or with a channel of one or two iterations between them. The first iterations of each run are left out.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
import tempfile
from pathlib import Path

from fixed_lag import SETTINGS
from fixed_lag_report import Times
from leaderless.observability.clock import total_seconds
from made import prepare, train
from weight_travel_report import GENERATION_S, RESULTS, TRAINING_S, TRAVEL_S, WARM_UP, Results, Run, promised_s, table

PARTS = ("fixed_lag_parts.py", "weight_travel_parts.py")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--iterations", type=int, default=12)
    parser.add_argument("--lags", nargs="+", type=int, default=(0, 1, 2))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    results = Results(iterations=options.iterations, runs=[])
    for lag in options.lags:
        run = measured(options.iterations, lag)
        results["runs"].append(run)
        print(f"{run}", file=sys.stderr)
        options.results.write_text(json.dumps(results, indent=1) + "\n", encoding="utf-8")
    print(table(results))


def measured(iterations: int, lag: int) -> Run:
    """A run of two workers, by the clock of the one that generates."""
    times = Times(generation=[GENERATION_S] * iterations, training=[TRAINING_S] * iterations)
    with tempfile.TemporaryDirectory(prefix="weight-travel-") as name:
        folder = Path(name)
        prepare(folder, hidden_size=16, num_layers=1, prompt_tokens=8)
        for part in PARTS:
            shutil.copy(Path(__file__).with_name(part), folder)
        (folder / "times.json").write_text(json.dumps(times), encoding="utf-8")
        (folder / "travel.json").write_text(json.dumps(TRAVEL_S), encoding="utf-8")
        layout = {"rollout": 0, "reward": 0, "advantage": 1, "policy": 1}
        settings = [
            *(
                setting.replace("fixed_lag_parts:make_engine", "weight_travel_parts:make_engine")
                for setting in SETTINGS
            ),
            f"steps={iterations}",
            f"layout={json.dumps({node: {'ranks': str(rank)} for node, rank in layout.items()})}",
            *([f"channels={{rollout: {{capacity: {lag}}}}}"] if lag else []),
        ]
        train(folder, "run", settings, num_workers=2)
        log = folder / "runs/run" / ("metrics-rollout.jsonl" if lag else "metrics.jsonl")
        rows = [json.loads(line) for line in log.read_text(encoding="utf-8").splitlines()]
    rows = [row for row in rows if row["step"] > WARM_UP]
    states = total_seconds(rows)["0"]
    passed, waited = sum(states.values()), states.get("wait_weights", 0.0) + states.get("weights", 0.0)
    return Run(lag=lag, promised_s=promised_s(lag), measured_s=passed / len(rows), share=waited / passed)


if __name__ == "__main__":
    main()
