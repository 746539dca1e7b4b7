"""The way through the package that one step takes, which a reader follows."""

from __future__ import annotations

from pathlib import Path

from tests.step_path import functions_of_a_step

MAX_FILES, MAX_FUNCTIONS = 85, 500
"""Most files and functions; `python -m tests.step_path` lists them. Lower both where fewer are left."""


def test_a_step_runs_through_few_files_and_functions(tmp_path: Path) -> None:
    calls = functions_of_a_step(tmp_path)
    files = {function.file for function in calls}
    assert {"worker/chain.py", "rollout/native/engine.py", "stages/update.py", "training/sharded.py"} <= files
    assert len(files) <= MAX_FILES, sorted(files)
    assert len(calls) <= MAX_FUNCTIONS, sorted(calls)
