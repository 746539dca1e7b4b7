"""Whether demonstrations help an arm that learns by itself: RLPD and SAC on the dummy arm, from the same seeds.

    python benchmarks/rlpd.py && python docs/generate.py

Both are `recipes/robots/rlpd.yaml`, through a server of the arm on this machine; SAC has no demonstrations. Every ten
episodes, 50 held-out ones are played; they are not counted among the steps of the arm.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from until import Row, train_until

ROOT = Path(__file__).resolve().parents[1]
RESULTS = ROOT / "docs/performance/rlpd.json"
ALGORITHMS = ("rlpd", "sac")
MOST_STEPS = 3000
"""Steps of the arm after which a run ends, after the next evaluation."""
EVERY = 10
"""Episodes between evaluations."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, nargs="*", default=[0, 1, 2])
    parser.add_argument("--algorithms", nargs="*", choices=ALGORITHMS, default=list(ALGORITHMS))
    parser.add_argument("--results", type=Path, default=RESULTS)
    options = parser.parse_args()
    table: dict[str, Any] = json.loads(options.results.read_text()) if options.results.exists() else {}
    with tempfile.TemporaryDirectory() as name, arm() as address:
        folder = Path(name)
        command = [sys.executable, ROOT / "examples/robots/rlpd.py", address, "data"]
        subprocess.run(command, cwd=folder, env=environment(), check=True, stdout=sys.stderr)
        for seed in options.seeds:
            for algorithm in options.algorithms:
                curve = learn(folder, address, algorithm, seed)
                table.setdefault(algorithm, {})[str(seed)] = curve
                print(algorithm, seed, curve, flush=True)
                options.results.write_text(json.dumps(table, indent=1) + "\n", encoding="utf-8")


@contextmanager
def arm() -> Iterator[str]:
    """A server of the dummy arm; its address."""
    command = [sys.executable, "-m", "leaderless", "robot", "serve", "dummy", "--port", "0"]
    server = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True, env=environment())
    try:
        assert server.stdout is not None
        line = server.stdout.readline()
        found = re.search(r"127\.0\.0\.1:\d+", line)
        if found is None:
            sys.exit(f"the arm's server said '{line}', and no address")
        yield found[0]
    finally:
        server.terminate()
        server.wait()


def learn(folder: Path, address: str, algorithm: str, seed: int) -> list[tuple[int, float]]:
    """Steps of the arm, and the share of held-out episodes that are a success."""
    settings = {
        "name": f"{algorithm}-{seed}",
        "seed": seed,
        "body.options.addresses": f"[{address}]",
        "body.demonstrations": "data/demonstrations" if algorithm == "rlpd" else "null",
        "data.train.path": "data/train.jsonl",
        "data.evaluation.path": "data/test.jsonl",
        "evaluation.every_steps": EVERY,
        "checkpoint.every_steps": 0,
    }
    changes = [f"{name}={value}" for name, value in settings.items()]
    run = folder / "runs" / f"{algorithm}-{seed}"
    recipe = str(ROOT / "recipes/robots/rlpd.yaml")
    return curve_of(train_until(recipe, changes, run, has_taken_all_steps))


def has_taken_all_steps(rows: list[Row]) -> bool:
    """Whether an evaluation came after the steps that a run may take."""
    curve = curve_of(rows)
    return bool(curve) and curve[-1][0] >= MOST_STEPS


def curve_of(rows: list[Row]) -> list[tuple[int, float]]:
    """Steps of the arm and success, by evaluation."""
    curve, steps = [], 0.0
    for row in rows:
        steps += row.get("body/steps", 0.0)  # a step of training is one episode
        if "evaluation/mean@1" in row:
            curve.append((round(steps), row["evaluation/mean@1"]))
    return curve


def environment() -> dict[str, str]:
    return {**os.environ, "OMP_NUM_THREADS": "1"}


if __name__ == "__main__":
    main()
