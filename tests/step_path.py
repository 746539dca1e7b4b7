"""Functions of the package that one step of training runs.

    python -m tests.step_path

prints them by file, each with the number of its calls: the way that a reader takes to follow a step.
"""

from __future__ import annotations

import sys
import tempfile
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import NamedTuple
from unittest.mock import patch

from tests.tiny import tiny_model, write_additions

import leaderless
from leaderless import Run
from leaderless.worker.worker import Worker

SOURCES = Path(leaderless.__file__).parent
RECIPE = Path(__file__).parents[1] / "recipes/quickstart/grpo.yaml"
STEP = 2
"""The step whose functions count: what the first one sets up is there already."""
BY_THE_CLOCK = {"presence", "status", "watchdog"}
"""Threads that act every few seconds, whatever a step does."""
NO_FUNCTIONS = {"<module>", "<listcomp>", "<dictcomp>", "<setcomp>", "<genexpr>"}
"""Names of code that is a part of the function around it."""


class Function(NamedTuple):
    """A function or lambda.

    Attributes:
        file: File that has it, from the package's folder.
        name: Its qualified name.
        line: First line.
    """

    file: str
    name: str
    line: int


@contextmanager
def counted_calls() -> Iterator[Counter[Function]]:
    """The functions that step 2 of a run within the context calls, on all threads that begin within it."""
    calls, prefix = Counter[Function](), f"{SOURCES}/"
    run_step, is_counting = Worker.run_step, False

    def note(frame: FrameType, event: str, _: object) -> None:
        code = frame.f_code
        if not (is_counting and event == "call" and code.co_filename.startswith(prefix)):
            return
        if code.co_name not in NO_FUNCTIONS and threading.current_thread().name not in BY_THE_CLOCK:
            calls[Function(code.co_filename.removeprefix(prefix), code.co_qualname, code.co_firstlineno)] += 1

    def run_one(worker: Worker) -> dict[str, float]:
        nonlocal is_counting
        is_counting = worker.progress.step + 1 == STEP
        try:
            return run_step(worker)
        finally:
            is_counting = False

    before = sys.getprofile()
    threading.setprofile(note)
    sys.setprofile(note)
    try:
        with patch.object(Worker, "run_step", run_one):
            yield calls
    finally:
        sys.setprofile(before)
        threading.setprofile(None)


def functions_of_a_step(folder: Path) -> Counter[Function]:
    """The functions of one step of the quickstart's GRPO on one worker, whose rewards are computed in its process.

    Args:
        folder: Folder for data and runs.
    """
    settings = {
        "models": {"policy": tiny_model()},
        "data.train.path": str(write_additions(folder / "train.jsonl")),
        "data.evaluation.path": str(write_additions(folder / "test.jsonl", 12)),
        "batch.prompts_per_step": 6,
        "batch.responses_per_prompt": 4,
        "run.directory": str(folder / "runs"),
        "run.reward_processes": 0,
        "steps": 3,
    }
    run = Run(RECIPE, **settings)
    with counted_calls() as calls:
        run.train()
    return calls


def main() -> None:
    with tempfile.TemporaryDirectory() as folder:
        calls = functions_of_a_step(Path(folder))
    file = ""
    for function, count in sorted(calls.items()):
        if function.file != file:
            file = function.file
            print(file)
        print(f"    {function.line:4} {function.name}  {count}")
    print(f"{len({function.file for function in calls})} files, {len(calls)} functions")


if __name__ == "__main__":
    main()
