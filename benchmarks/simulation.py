"""The pictures of docs/scaling.md that come from simulation.

    pip install --editable .[benchmarks]
    python benchmarks/simulation.py

Takes a few minutes, most of them for the sweeps up to 16,384 ranks.
"""

from __future__ import annotations

import argparse
import shutil
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
H100, H200 = ("--cluster", "recipes/clusters/h100.yaml"), ("--cluster", "recipes/clusters/h200.yaml")
RANKS = "8,64,512,1024,2048,4096,8192,16384"
SWEEPS: dict[str, tuple[str, ...]] = {
    "simulated-ranks": (*H100, "--world-size", RANKS, "--prompts-per-rank", "8"),
    "simulated-ranks-64k": (
        *H100, "--world-size", RANKS, "--prompts-per-rank", "8", "--context", "65536", "rollout.max_sequences=8"
    ),
    "simulated-ranks-32b": (
        *H200, "--world-size", RANKS.removeprefix("8,"), "--prompts-per-rank", "8",
        "models.policy.path=recipes/scaling/qwen2.5-32b", "rollout.max_sequences=16",
    ),
    "simulated-context": (
        *H100, "--world-size", "1024", "--context", "8192,16384,32768,65536", "rollout.max_sequences=8"
    ),
    "simulated-batch": (*H100, "--world-size", "1024", "--prompts", "512,1024,2048,4096,8192,16384,32768,65536"),
}  # fmt: skip
"""Arguments of `leaderless simulate`, by the name of the picture."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweeps", nargs="+", choices=SWEEPS, default=list(SWEEPS))
    parser.add_argument("--folder", type=Path, default=ROOT / "runs/simulation", help="for numbers and pages")
    parser.add_argument("--pictures", type=Path, default=ROOT / "docs/images")
    options = parser.parse_args()
    for name in options.sweeps:
        folder: Path = options.folder.resolve() / name
        command = ("simulate", "recipes/scaling/grpo.yaml", *SWEEPS[name], "--out", str(folder))
        print(f"leaderless {' '.join(command)}", flush=True)
        subprocess.run([sys.executable, "-m", "leaderless", *command], cwd=ROOT, check=True)
        shutil.copy(folder / "simulation.png", options.pictures / f"{name}.png")


if __name__ == "__main__":
    main()
