"""Text is trained without the wings: bodies and servers, which nothing below them imports."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

from tests.end_to_end.cli import metrics
from tests.tiny import tiny_model, write_additions, write_recipe

import leaderless

EMBODIED = (
    "leaderless.embodied",
    "leaderless.embodied.data.lerobot",
    "leaderless.embodied.data.replay_buffer",
    "leaderless.embodied.data.video_frames",
    "leaderless.embodied.simulators",
    "leaderless.embodied.planning.memory",
    "leaderless.embodied.policies",
    "leaderless.embodied.robots",
    "leaderless.embodied.rollout.policy_rollout",
    "leaderless.embodied.rollout.initial_states",
    "leaderless.embodied.rollout.vector_envs",
    "leaderless.embodied.stages.rollout",
    "leaderless.embodied.stages.demonstrations",
    "leaderless.embodied.stages.embeddings",
    "leaderless.embodied.stages.film_strips",
    "leaderless.embodied.stages.sac",
    "leaderless.embodied.training.policy_engine",
    "leaderless.embodied.training.sharded_replay",
    "leaderless.embodied.training.sac_learner",
    "leaderless.embodied.training.sac_engine",
    "leaderless.embodied.training.decision_units",
)
SERVING = (
    "leaderless.serving.online",
    "leaderless.serving.api",
    "leaderless.serving.online.rollout",
    "leaderless.serving.live_page",
    "leaderless.serving.online.addresses",
)
KEPT = "leaderless.run.standalone_model"
"""Module next to those of the server that loads a model for `Run.generate` as well."""
USE = """
import json, sys
from pathlib import Path

import leaderless
from leaderless import Run

assert Path(leaderless.__file__).is_relative_to(sys.argv[1]), leaderless.__file__
if __name__ == "__main__":
    run = Run(sys.argv[2])
    planned = run.plan(6).world_size
    run.train(workers=2)
    print(json.dumps([planned, run.evaluate(), run.generate(["1+1="])]))
"""


def copy_without_wings(folder: Path) -> int:
    """Copy the package but for the modules of the wings; returns the number of files that are left out."""
    source, left_out = Path(leaderless.__file__).parent, 0
    for path in source.rglob("*"):
        place = path.relative_to(source.parent)
        name = ".".join(place.with_suffix("").parts)
        if name != KEPT and any(name == hidden or name.startswith(f"{hidden}.") for hidden in (*EMBODIED, *SERVING)):
            left_out += path.suffix == ".py"
        elif path.is_file() and "__pycache__" not in place.parts:
            (folder / place).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(path, folder / place)
    return left_out


def test_grpo_is_planned_trained_and_evaluated_without_the_wings(tmp_path: Path) -> None:
    assert copy_without_wings(tmp_path / "src") > 100
    rows = write_additions(tmp_path / "test.jsonl", 4)
    held_out = {"path": str(rows), "prompt": "question", "answer": "answer", "template": "plain"}
    recipe = write_recipe(tmp_path, tiny_model(), {"name": "bare", "steps": 2, "data.evaluation": held_out})
    program = tmp_path / "use.py"
    program.write_text(USE)
    environment = {**os.environ, "PYTHONPATH": str(tmp_path / "src")}
    command = [sys.executable, str(program), str(tmp_path / "src"), str(recipe)]
    done = subprocess.run(command, cwd=tmp_path, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    world_size, scores, responses = json.loads(done.stdout.splitlines()[-1])
    assert world_size == 6
    assert scores["evaluation/failed"] == 0
    assert len(responses) == 1
    assert [line["step"] for line in metrics(tmp_path / "runs/bare")] == [1, 2]
