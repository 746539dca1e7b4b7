"""Continues runs that another commit has begun.

    python -m tests.resumes REVISION [--cases grpo-2 sac-1] [--keep FOLDER]

Short runs are killed with the sources of the other commit, after some steps, and continue with those of the working
tree. The numbers and tensors must be those of a run that the other commit has trained undisturbed. A run that depends
on time is compared with a run of the working tree that follows its journal. A run may be refused instead, with exit
code 2, and the message is printed.
"""

from __future__ import annotations

import argparse
import json
import shutil
import signal
import sys
import tempfile
import time
from pathlib import Path

import psutil
from tests.same_numbers import (
    CASES,
    NAME,
    ROOT,
    Case,
    Numbers,
    commit_of,
    compared,
    numbers_of,
    open_run,
    other_sources,
    prepare,
    run,
    start_command,
)

RESUMED = (
    "grpo-1",
    "grpo-2+2",
    "lora-2",
    "ahead-2+2",
    "continuous-2+2",
    "calculator-2",
    "calculator-continuous-2+2",
    "marft-1",
    "dpo-1",
    "robot-2",
    "sac-1",
)
"""Cases of `tests.same_numbers`, unless others are named."""
STEPS, KILLED_AFTER = 6, 3
REFUSED = 2
"""Exit code of a command whose recipe or run is refused."""
DEADLINE_S = 1800


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("revision", help="commit that begins the runs")
    parser.add_argument("--cases", nargs="+", choices=CASES, default=list(RESUMED))
    parser.add_argument("--keep", type=Path, help="folder that keeps the other commit's runs for the next time")
    options = parser.parse_args()
    with tempfile.TemporaryDirectory(prefix="resumes-") as scratch, other_sources(options.revision) as sources:
        other = (options.keep or Path(scratch)).resolve() / commit_of(options.revision)
        failed = [name for name in options.cases if not _continues(name, sources, other, Path(scratch) / "here")]
    sys.exit(1 if failed else 0)


def _continues(name: str, sources: Path, other: Path, here: Path) -> bool:
    """Whether a run continues with the same numbers, or is refused; print which."""
    case, begin = CASES[name]._replace(steps=STEPS), time.monotonic()
    case = case._replace(settings=(*case.settings, "checkpoint.every_steps=1"))
    start = prepare(case.prepared, sources, other)
    killed = other / f"{name}-killed"
    if not killed.exists():
        _kill(case, sources, start, other / f"{name}-begun").rename(killed)
        shutil.rmtree(other / f"{name}-begun")
    command = open_run(case, ROOT, start, here / name)
    continued = here / name / "runs" / NAME
    shutil.copytree(killed, continued)
    done = start_command(command, ROOT, here / name)
    output, errors = done.communicate()
    if done.returncode:
        print(f"{name}: ended with {done.returncode}:\n{output}\n{errors}", flush=True)
        return done.returncode == REFUSED
    if case.is_followed:
        expected = numbers_of(run(case, ROOT, start, here / f"{name}-followed", follow=continued))
    else:
        expected = _undisturbed(name, case, sources, start, other)
    is_same, found = compared(expected, numbers_of(continued))
    print(f"{name}: continues, {found} ({time.monotonic() - begin:.0f} s)", flush=True)
    return is_same


def _undisturbed(name: str, case: Case, sources: Path, start: Path, other: Path) -> Numbers:
    """Results of a run of the other commit that was not killed."""
    kept = other / f"{name}-undisturbed.json"
    if not kept.exists():
        kept.write_text(json.dumps(numbers_of(run(case, sources, start, other / f"{name}-whole"))))
        shutil.rmtree(other / f"{name}-whole")
    return Numbers(*json.loads(kept.read_text()))


def _kill(case: Case, sources: Path, start: Path, folder: Path) -> Path:
    """Train with the other commit, and kill all processes after some steps; return the folder of the run."""
    process = start_command(open_run(case, sources, start, folder), sources, folder)
    checkpoint = folder / "runs" / NAME / "checkpoints" / f"step-{KILLED_AFTER:06d}"
    deadline = time.monotonic() + DEADLINE_S
    while not checkpoint.exists() and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.02)
    if process.poll() is None:
        launcher = psutil.Process(process.pid)
        for one in (launcher, *launcher.children(recursive=True)):  # the launcher first: it would restart workers
            one.kill()
    output, errors = process.communicate()
    last = folder / "runs" / NAME / "checkpoints" / f"step-{case.steps:06d}"
    if process.returncode != -signal.SIGKILL or not checkpoint.exists() or last.exists():
        raise RuntimeError(f"was not killed between {checkpoint} and {last}:\n{output}\n{errors}")
    return folder / "runs" / NAME


if __name__ == "__main__":
    main()
