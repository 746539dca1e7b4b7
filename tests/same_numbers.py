"""Compares the numbers of short runs, bit for bit, with those of another commit.

    python -m tests.same_numbers REVISION [--cases grpo-1 sac-2] [--keep FOLDER]

A change that is not meant to change numbers proves it with this. Recipes of the quickstart, of agents, of preferences
and of robots run for some steps with the sources of both commits and the same libraries: from the same weights, each
step must report the same reward, length, loss, gradient norm and evaluation, and the last checkpoint must hold the same
bytes of weights and optimizer states. Runs of continuous generation follow the journal of one run of the other commit.
Seconds, bytes and speeds are not compared, nor what only the newer commit reports. Both sides run one after the other,
on one thread for each worker, and both are only given commands and recipes, so that it does not matter where their
modules are.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import NamedTuple

from safetensors import safe_open

ROOT = Path(__file__).parents[1]
NAME = "compared"
PREPARATIONS = {
    "quickstart": (
        "examples.quickstart.prepare",
        "leaderless train recipes/quickstart/sft.yaml steps=300",  # some answers are right, and some are wrong
        "leaderless export runs/quickstart-sft runs/quickstart-base",
    ),
    "calculator": (
        "examples.calculator.prepare",
        "leaderless train recipes/agents/calculator/sft.yaml steps=100",
        "leaderless export runs/calculator-sft runs/calculator-base",
    ),
    "signal": ("examples.signal_game.prepare",),
    "preferences": ("examples.preferences.prepare",),
    "robot": (
        "leaderless demonstrate recipes/quickstart/robot_imitation.yaml runs/quickstart-demonstrations --episodes 40",
        "leaderless train recipes/quickstart/robot_imitation.yaml steps=30",
        "leaderless export runs/quickstart-imitation runs/quickstart-imitated",
    ),
}
"""Commands that make the models and the data that runs begin with; the other commit executes them, once."""
UNSTEADY = re.compile(r"(time|seconds|sent/seconds|throughput|memory)(/|$)|data/wait|.*(_s|/engine_busy)(/|$)")
"""Names of numbers that differ from run to run."""
RENAMED = {"eval/": "evaluation/"}
"""Prefixes of names in older commits, and the names they have now."""


class Case(NamedTuple):
    """A run to compare.

    Attributes:
        recipe: File of `recipes`, without its ending.
        prepared: Name in `PREPARATIONS`.
        steps: Number of steps.
        workers: Number of workers.
        settings: Further settings.
        is_followed: Whether the run depends on time, so that both commits follow the journal of a run before.
    """

    recipe: str
    prepared: str
    steps: int
    workers: int
    settings: tuple[str, ...] = ()
    is_followed: bool = False


def _pools(generating: str, training: str) -> tuple[str, ...]:
    """Settings by which two ranks generate and two ranks train, given the nodes of both."""
    pools = {"0-1": generating, "2-3": training}
    return tuple(f"layout.{node}.ranks={ranks}" for ranks, nodes in pools.items() for node in nodes.split())


_POOLS = _pools("rollout", "policy")
_LOOPS = _pools("rollout reward", "old reference advantage policy")
_AHEAD = "channels={rollout: {capacity: 2}}"
_CONTINUOUS = "channels={rollout: {capacity: 2, mode: continuous}}"
_CALCULATOR = (
    "batch.prompts_per_step=16",
    "batch.responses_per_prompt=8",
    "evaluation={every_steps: 3, max_prompts: 48}",
)
_TEAM = _pools("planner_rollout solver_rollout", "planner solver critic")
_TASKS = ("data.train.path=recipes/robots/tasks.jsonl", "data.evaluation.path=recipes/robots/held_out.jsonl")
_ROBOT = (*_TASKS, "batch.prompts_per_step=16", "evaluation={every_steps: 3, max_prompts: 32}")
_SAC = (
    *_TASKS,
    "models.policy={body: {type: squashed, options: {chunk: 2, hidden_size: 16}}}",
    "body={type: table, num_environments: 4, demonstrations: runs/quickstart-demonstrations}",
    "batch.prompts_per_step=4",
    "algorithm.sac={batch_size: 32, hidden_size: 16, critic_updates: 2, first_decisions: 16}",
    "evaluation={every_steps: 3, max_prompts: 16}",
)
CASES = {
    "grpo-1": Case("quickstart/grpo", "quickstart", 20, 1),
    "grpo-2": Case("quickstart/grpo", "quickstart", 20, 2),
    "grpo-2+2": Case("quickstart/grpo", "quickstart", 20, 4, _POOLS),
    "ppo-1": Case("quickstart/ppo", "quickstart", 20, 1),
    "ppo-2": Case("quickstart/ppo", "quickstart", 20, 2),
    "dapo-1": Case("quickstart/dapo", "quickstart", 20, 1),
    "dapo-2": Case("quickstart/dapo", "quickstart", 20, 2),
    "lora-1": Case("quickstart/lora", "quickstart", 10, 1),
    "lora-2": Case("quickstart/lora", "quickstart", 10, 2),
    "lora-2+2": Case("quickstart/lora", "quickstart", 10, 4, _POOLS),
    "ahead-2+2": Case("quickstart/grpo", "quickstart", 10, 4, (*_LOOPS, _AHEAD)),
    "continuous-2+2": Case("quickstart/grpo", "quickstart", 10, 4, (*_LOOPS, _CONTINUOUS), is_followed=True),
    "calculator-1": Case("agents/calculator/grpo", "calculator", 6, 1, _CALCULATOR),
    "calculator-2": Case("agents/calculator/grpo", "calculator", 6, 2, _CALCULATOR),
    "calculator-2+2": Case("agents/calculator/grpo", "calculator", 6, 4, (*_CALCULATOR, *_POOLS)),
    "calculator-continuous-2+2": Case(
        "agents/calculator/grpo",
        "calculator",
        6,
        4,
        (*_CALCULATOR, *_pools("rollout reward", "advantage policy"), _CONTINUOUS),
        is_followed=True,
    ),
    "marft-1": Case("agents/signal/marft", "signal", 10, 1),
    "marft-2": Case("agents/signal/marft", "signal", 10, 2),
    "marft-2+2": Case("agents/signal/marft", "signal", 10, 4, _TEAM),
    "dpo-1": Case("preferences/dpo", "preferences", 20, 1),
    "dpo-2": Case("preferences/dpo", "preferences", 20, 2),
    "imitation-1": Case("quickstart/robot_imitation", "robot", 10, 1),
    "imitation-2": Case("quickstart/robot_imitation", "robot", 10, 2),
    "robot-1": Case("quickstart/robot", "robot", 6, 1, _ROBOT),
    "robot-2": Case("quickstart/robot", "robot", 6, 2, _ROBOT),
    "robot-2+2": Case("quickstart/robot", "robot", 6, 4, (*_ROBOT, *_POOLS)),
    "sac-1": Case("robots/rlpd", "robot", 10, 1, _SAC),
    "sac-2": Case("robots/rlpd", "robot", 10, 2, _SAC),
    "sac-2+2": Case("robots/rlpd", "robot", 10, 4, (*_SAC, *_pools("act", "policy"))),
}


class Numbers(NamedTuple):
    """Results of a run.

    Attributes:
        steps: Numbers of each line of each log, by name.
        tensors: Digest of each tensor of the last checkpoint, by file and name, and of each file of transitions.
    """

    steps: list[dict[str, float]]
    tensors: dict[str, str]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit to compare with")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(CASES))
    parser.add_argument("--keep", type=Path, help="folder that keeps the other commit's runs for the next comparison")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="same-numbers-") as scratch, other_sources(options.revision) as sources:
        other = (options.keep or Path(scratch)).resolve() / commit_of(options.revision)
        num_different = sum([_compare(name, sources, other, Path(scratch) / "here") for name in options.cases])
    sys.exit(1 if num_different else 0)


def commit_of(revision: str) -> str:
    """Short name of a commit."""
    return _git("rev-parse", "--short=12", revision)


@contextmanager
def other_sources(revision: str) -> Iterator[Path]:
    """A folder with the files of another commit, until the end of the block."""
    with tempfile.TemporaryDirectory(prefix="sources-") as folder:
        sources = Path(folder) / "sources"
        _git("worktree", "add", "--detach", "--quiet", str(sources), revision)
        try:
            yield sources
        finally:
            _git("worktree", "remove", "--force", str(sources))


def _compare(name: str, sources: Path, other: Path, here: Path) -> bool:
    """Run a case with both sources and print what differs."""
    case, begin = CASES[name], time.monotonic()
    try:
        start = prepare(case.prepared, sources, other)
        before, journal = _other_numbers(name, sources, start, other)
        now = numbers_of(run(case, ROOT, start, here / name, follow=journal))
        is_same, found = compared(before, now, may_add=True)
    except RuntimeError as error:
        is_same, found = False, str(error)
    print(f"{name}: {found} ({time.monotonic() - begin:.0f} s)", flush=True)
    shutil.rmtree(here, ignore_errors=True)
    return not is_same


def _other_numbers(name: str, sources: Path, start: Path, other: Path) -> tuple[Numbers, Path | None]:
    """Results of the other commit, and the run that has to be followed if the case depends on time."""
    case, kept, journal = CASES[name], other / f"{name}.json", other / f"{name}-journal"
    known = json.loads(kept.read_text()) if kept.exists() else {}
    if known.get("case") != json.loads(json.dumps(case)):
        if case.is_followed:
            shutil.rmtree(journal, ignore_errors=True)
            run(case, sources, start, other / name).rename(journal)
        done = run(case, sources, start, other / name, follow=journal if case.is_followed else None)
        known = {"case": case, "numbers": numbers_of(done)}
        kept.write_text(json.dumps(known))
        shutil.rmtree(other / name)
    return Numbers(*known["numbers"]), journal if case.is_followed else None


def prepare(name: str, sources: Path, folder: Path) -> Path:
    """Make what runs begin with, unless it exists.

    Args:
        name: Name in `PREPARATIONS`.
        sources: Files of the other commit.
        folder: Folder that keeps it.

    Returns:
        The folder of models and data.
    """
    start = folder / f"start-{name}"
    if not start.exists():
        building = folder / f"building-{name}"
        working_folder(building, sources)
        for command in PREPARATIONS[name]:
            execute(sources, building, *shlex.split(command))
        (building / "runs").rename(start)
        shutil.rmtree(building)
    return start


def run(case: Case, sources: Path, start: Path, folder: Path, *, follow: Path | None = None) -> Path:
    """Train to the end.

    Args:
        case: Run.
        sources: Files of a commit.
        start: Models and data.
        folder: New folder to train in.
        follow: Earlier run whose journal this run follows.

    Returns:
        The folder of the run.
    """
    execute(sources, folder, *open_run(case, sources, start, folder), *([f"run.follow={follow}"] if follow else []))
    return folder / "runs" / NAME


def open_run(case: Case, sources: Path, start: Path, folder: Path) -> list[str]:
    """Make a folder to train in.

    Args:
        case: Run.
        sources: Files of a commit.
        start: Models and data.
        folder: Folder to make.

    Returns:
        The command that trains there.
    """
    working_folder(folder, sources, start)
    settings = (f"steps={case.steps}", f"name={NAME}", "checkpoint.asynchronous=false", "loggers=[]", *case.settings)
    # Alone, a run is spared a process that launches it, which takes as long as some steps.
    place = ["--in-process"] if case.workers == 1 else ["--workers", str(case.workers)]
    return ["leaderless", "train", f"recipes/{case.recipe}.yaml", *place, *settings]


def working_folder(folder: Path, sources: Path, *starts: Path) -> None:
    """Make a folder in which commands find the recipes and examples of a commit, and what they begin with.

    Args:
        folder: Folder to make.
        sources: Files of the commit.
        starts: Folders of models and data.
    """
    shutil.rmtree(folder, ignore_errors=True)
    (folder / "runs").mkdir(parents=True)
    for part in ("recipes", "examples"):
        (folder / part).symlink_to(sources / part)
    for path in (path for start in starts for path in start.iterdir()):
        (folder / "runs" / path.name).symlink_to(path)


def numbers_of(run: Path) -> Numbers:
    """Results of a run that has ended.

    Args:
        run: Folder of the run.
    """
    lines = [
        line for log in sorted(run.glob("metrics*.jsonl")) for line in log.read_text(encoding="utf-8").splitlines()
    ]
    newest = max((run / "checkpoints").glob("step-*"))
    transitions = {
        str(file.relative_to(run)): hashlib.sha256(file.read_bytes()).hexdigest()
        for file in sorted(run.glob("transitions/**/*.bin"))
    }
    return Numbers([json.loads(line) for line in lines], _digests(newest) | transitions)


def _digests(checkpoint: Path) -> dict[str, str]:
    digests = {}
    for file in sorted(checkpoint.rglob("*.safetensors")):
        with safe_open(file, framework="np") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                digest = hashlib.sha256(tensors.get_tensor(name).tobytes()).hexdigest()
                digests[f"{file.relative_to(checkpoint)}: {name}"] = digest
    return digests


def compared(before: Numbers, now: Numbers, *, may_add: bool = False) -> tuple[bool, str]:
    """Whether two runs have the same results, and what differs or how much is the same.

    With `may_add`, the second run may report numbers that the first one does not know.
    """
    found = []
    olds, news = ([_steady(record) for record in numbers.steps] for numbers in (before, now))
    if len(olds) != len(news):
        found.append(f"{len(olds)} and {len(news)} lines of numbers")
    known = dict.fromkeys(name for step in olds for name in step)
    added = dict.fromkeys(name for step in news for name in step if name not in known)
    for name in known if may_add else known | added:
        pairs = [(old.get(name), new.get(name)) for old, new in zip(olds, news, strict=False)]
        unlike = [place for place, (old, new) in enumerate(pairs) if repr(old) != repr(new)]
        if unlike:
            old, new = pairs[unlike[0]]
            found.append(
                f"{name} differs in {len(unlike)} of {len(pairs)} lines, first in line {unlike[0]}: {old} {new}"
            )
    tensors = {name for name in {*before.tensors, *now.tensors} if before.tensors.get(name) != now.tensors.get(name)}
    if tensors:
        found.append(f"{len(tensors)} of {len(now.tensors)} tensors differ, among them {min(tensors)}")
    count = sum(name in known for step in news for name in step)
    same = f"{count} numbers and {len(now.tensors)} tensors are the same"
    found = found or [same]
    return found == [same], "; ".join([*found, *(f"{name} is new" for name in added)])


def _steady(record: dict[str, float]) -> dict[str, float]:
    """The numbers of a line that do not depend on time, by their current names."""
    return {_current(name): value for name, value in record.items() if not UNSTEADY.match(name)}


def _current(name: str) -> str:
    """The current name of a number."""
    for old, new in RENAMED.items():
        if name.startswith(old):
            return new + name.removeprefix(old)
    return name


def environment(sources: Path) -> dict[str, str]:
    """Environment of commands of a commit.

    Args:
        sources: Files of the commit.
    """
    return {**os.environ, "PYTHONPATH": str(sources / "src"), "OMP_NUM_THREADS": "1"}


def execute(sources: Path, folder: Path, *arguments: str) -> None:
    """Execute `python -m ARGUMENTS` in a folder.

    Args:
        sources: Files of a commit.
        folder: Folder.
        arguments: Name of the module, and its arguments.

    Raises:
        RuntimeError: It has failed; the message has its output.
    """
    process = start_command(arguments, sources, folder)
    output, errors = process.communicate()
    if process.returncode:
        raise RuntimeError(f"{shlex.join(arguments)} ended with {process.returncode}:\n{output}\n{errors}")


def start_command(arguments: Sequence[str], sources: Path, folder: Path) -> subprocess.Popen[str]:
    """Start `python -m ARGUMENTS`.

    Args:
        arguments: Name of the module, and its arguments.
        sources: Files of a commit.
        folder: Folder to work in.
    """
    return subprocess.Popen(
        [sys.executable, "-m", *arguments],
        cwd=folder,
        env=environment(sources),
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )


def _git(*arguments: str) -> str:
    command = ["git", "-C", str(ROOT), *arguments]
    return subprocess.run(command, check=True, capture_output=True, text=True).stdout.strip()


if __name__ == "__main__":
    main()
