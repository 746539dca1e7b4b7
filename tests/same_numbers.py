"""Compares the numbers of short runs, bit for bit, with those of another commit.

    python -m tests.same_numbers REVISION [--cases grpo-1 ppo-1] [--keep FOLDER]

A change that is not meant to change numbers proves it with this. The recipes of the quickstart run for 20 steps
with the sources of both commits and the same libraries: from the same weights, each step must report the same
reward, length, loss, gradient norm and evaluation, and the last checkpoint must hold the same bytes of weights and
optimizer states. Seconds, bytes and speeds are not compared. Both sides run one after the other, on one thread each.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

ROOT = Path(__file__).parents[1]
SFT_STEPS = 300
"""Steps of supervised fine-tuning beforehand: enough that some answers are right and some are wrong."""
UNSTEADY = ("time", "seconds/", "throughput/", "memory/", "data/wait")
"""Prefixes of names of numbers that differ from run to run."""
RENAMED = {"eval/": "evaluation/"}
"""Prefixes of names in older commits, and the names they have now."""


class Case(NamedTuple):
    """A run to compare.

    Attributes:
        recipe: File of `recipes/quickstart`, without its ending.
        workers: Number of workers.
        settings: Further settings.
    """

    recipe: str
    workers: int
    settings: tuple[str, ...] = ()


CASES = {
    "grpo-1": Case("grpo", 1),
    "grpo-2": Case("grpo", 2),
    "grpo-2+2": Case("grpo", 4, ("layout.rollout.ranks=0-1", "layout.policy.ranks=2-3")),
    "ppo-1": Case("ppo", 1),
    "ppo-2": Case("ppo", 2),
    "dapo-1": Case("dapo", 1),
    "dapo-2": Case("dapo", 2),
}


class Numbers(NamedTuple):
    """Results of a run.

    Attributes:
        steps: Numbers of each step, by name.
        tensors: Digest of each tensor of the last checkpoint, by file and name.
    """

    steps: list[dict[str, float]]
    tensors: dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--keep", type=Path, help="folder that keeps the other commit's runs for the next comparison")
    options = parser.parse_args()
    commit = _git("rev-parse", "--short=12", options.revision)
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as scratch:
        other = (options.keep or Path(scratch)) / f"{commit}-{options.steps}"
        sources = Path(scratch) / "sources"
        _git("worktree", "add", "--detach", "--quiet", str(sources), commit)
        try:
            start = _prepare(sources, other)
            num_different = sum(
                [_compare(name, sources, other, start, Path(scratch) / "here", options.steps) for name in options.cases]
            )
        finally:
            _git("worktree", "remove", "--force", str(sources))
    sys.exit(1 if num_different else 0)


def _prepare(sources: Path, folder: Path) -> Path:
    """Make the model that all runs begin with, with the sources of the other commit, unless it exists."""
    start = folder / "start"
    if not start.exists():
        building = folder / "building"
        shutil.rmtree(building, ignore_errors=True)
        (building / "runs").mkdir(parents=True)
        _python(sources, building, "-c", _PREPARE.format(examples=str(sources / "examples/quickstart")))
        _leaderless(sources, building, "train", str(sources / "recipes/quickstart/sft.yaml"), f"steps={SFT_STEPS}")
        _leaderless(sources, building, "export", "runs/quickstart-sft", "runs/quickstart-base")
        building.rename(start)
    return start


_PREPARE = "import sys; sys.path.insert(0, '{examples}'); import prepare; from pathlib import Path; \
prepare.prepare(Path('runs/quickstart-data'))"


def _compare(name: str, sources: Path, other: Path, start: Path, here: Path, steps: int) -> bool:
    """Run a case with both sources and print what differs."""
    kept = other / f"{name}.json"
    if not kept.exists():
        kept.write_text(json.dumps(_run(CASES[name], sources, start, other / name, steps)))
    before = Numbers(*json.loads(kept.read_text()))
    now = _run(CASES[name], ROOT, start, here / name, steps)
    differences = _differences(before, now)
    values = sum(len(step) for step in now.steps)
    print(f"{name}: " + ("; ".join(differences) or f"{values} numbers and {len(now.tensors)} tensors are the same"))
    return bool(differences)


def _run(case: Case, sources: Path, start: Path, folder: Path, steps: int) -> Numbers:
    """Train in a new folder, which is removed afterwards."""
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "runs").mkdir(parents=True)
    for part in ("quickstart-base", "quickstart-data"):
        (folder / "runs" / part).symlink_to(start.resolve() / "runs" / part)
    recipe = str(sources / "recipes/quickstart" / f"{case.recipe}.yaml")
    settings = (f"steps={steps}", "name=compared", "checkpoint.asynchronous=false", *case.settings)
    _leaderless(sources, folder, "train", recipe, "--workers", str(case.workers), *settings)
    run = folder / "runs" / "compared"
    numbers = Numbers(_metrics(run / "metrics.jsonl"), _digests(run / "checkpoints" / f"step-{steps:06d}"))
    shutil.rmtree(folder)
    return numbers


def _metrics(file: Path) -> list[dict[str, float]]:
    records = []
    for line in file.read_text(encoding="utf-8").splitlines():
        record: dict[str, float] = {}
        for name, value in json.loads(line).items():
            if not name.startswith(UNSTEADY) and not name.endswith("_per_s"):
                record[_current(name)] = value
        records.append(record)
    return records


def _current(name: str) -> str:
    """The current name of a number."""
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def _digests(checkpoint: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                digest = hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest()
                digests[f"{file.relative_to(checkpoint)}: {name}"] = digest
    return digests


def _differences(before: Numbers, now: Numbers) -> list[str]:
    """One sentence for each number that differs in some step, and one for tensors."""
    found = []
    if len(before.steps) != len(now.steps):
        found.append(f"{len(before.steps)} and {len(now.steps)} lines of numbers")
    names = list(dict.fromkeys(name for step in (*before.steps, *now.steps) for name in step))
    for name in names:
        pairs = [(old.get(name), new.get(name)) for old, new in zip(before.steps, now.steps, strict=False)]
        unlike = [place for place, (old, new) in enumerate(pairs) if repr(old) != repr(new)]
        if unlike:
            old, new = pairs[unlike[0]]
            found.append(
                f"{name} differs in {len(unlike)} of {len(pairs)} lines, first in line {unlike[0]}: {old} {new}"
            )
    tensors = {name for name in {*before.tensors, *now.tensors} if before.tensors.get(name) != now.tensors.get(name)}
    if tensors:
        found.append(f"{len(tensors)} of {len(now.tensors)} tensors differ, among them {min(tensors)}")
    return found


def _leaderless(sources: Path, folder: Path, *arguments: str) -> None:
    _python(sources, folder, "-m", "leaderless", *arguments)


def _python(sources: Path, folder: Path, *arguments: str) -> None:
    environment = {**os.environ, "PYTHONPATH": str(sources / "src"), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, *arguments], cwd=folder, env=environment, capture_output=True, text=True, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(arguments)} in {folder} ended with {done.returncode}:\n{done.stdout}\n{done.stderr}")


def _git(*arguments: Sequence[str] | str) -> str:
    command = ["git", "-C", str(ROOT), *map(str, arguments)]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
