"""Text is trained without the wings: bodies and servers, which nothing below them imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.arrows import PACKAGE, WINGS
from tests.end_to_end.cli import metrics
from tests.tiny import tiny_model, write_additions, write_recipe

import leaderless

USE = """
import json, sys
from pathlib import Path

import leaderless
from leaderless import Run

assert Path(leaderless.__file__).is_relative_to(sys.argv[1]), leaderless.__file__
if __name__ == "__main__":
    run = Run(sys.argv[2])
    planned = run.plan(6).world_size
    run.train(workers=int(sys.argv[3]))
    print(json.dumps([planned, run.evaluate(), run.generate(["1+1="])]))
"""


def copy_without_wings(folder: Path) -> None:
    """Copy the package but for the wings, with what is compiled of it, which its files keep valid by their times."""
    source = Path(leaderless.__file__).parent
    shutil.copytree(source, folder / PACKAGE, ignore=lambda inside, _: WINGS if Path(inside) == source else ())


@pytest.mark.parametrize("workers", [1, pytest.param(2, marks=pytest.mark.thorough)])
def test_grpo_is_planned_trained_and_evaluated_without_the_wings(tmp_path: Path, workers: int) -> None:
    copy_without_wings(tmp_path / "src")
    assert not {*WINGS} & {path.name for path in (tmp_path / "src" / PACKAGE).iterdir()}
    rows = write_additions(tmp_path / "test.jsonl", 4)
    held_out = {"path": str(rows), "prompt": "question", "answer": "answer", "template": "plain"}
    recipe = write_recipe(tmp_path, tiny_model(), {"name": "bare", "steps": 1, "data.evaluation": held_out})
    program = tmp_path / "use.py"
    program.write_text(USE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, str(program), str(tmp_path / "src"), str(recipe), str(workers)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    world_size, scores, responses = json.loads(done.stdout.splitlines()[-1])
    assert world_size == 6
    assert scores["evaluation/failed"] == 0
    assert len(responses) == 1
    assert [line["step"] for line in metrics(tmp_path / "runs/bare")] == [1]
