"""Whole runs in which vLLM generates; `make test-vllm` has an environment for them."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.tiny import tiny_model, write_recipe

PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON")
"""Python of an environment with vLLM."""
APART = {"layout": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}}
LETTERS = {"format": {"pattern": r"[^0-9]*"}}
"""A reward that an untrained model gets now and then."""
pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make test-vllm` runs this with vLLM")


def train(folder: Path, changes: Mapping[str, object], workers: int) -> list[dict[str, float]]:
    """The metrics of each step of a short run, in which the policy changes fast."""
    recipe = write_recipe(
        folder, tiny_model(head_dim=32), {"rollout.engine": "vllm", "steps": 3, "reward": LETTERS, **changes}
    )
    command = [sys.executable, "-m", "leaderless", "train", str(recipe), "--workers", str(workers)]
    command.append("optimizer.learning_rate=0.003")
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    lines = (folder / "runs" / "tiny" / "metrics.jsonl").read_text().splitlines()
    return [json.loads(line) for line in lines]


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    ("changes", "workers"),
    [
        ({"rollout.external.python": PYTHON}, 1),
        ({"rollout.external.python": PYTHON}, 2),
        ({"rollout.external.python": PYTHON, **APART}, 2),
        ({}, 1),
        ({}, 2),
    ],
    ids=["server", "server of each of two ranks", "server of a pool of its own", "in process", "in two processes"],
)
def test_each_step_is_sampled_with_the_weights_that_it_trains(
    tmp_path: Path, changes: Mapping[str, object], workers: int
) -> None:
    if "rollout.external.python" not in changes and find_spec("vllm") is None:
        pytest.skip("needs vLLM in this environment")
    steps = train(tmp_path, changes, workers)
    assert len(steps) == 3
    for numbers in steps:
        assert numbers["mismatch/abs_max"] < 1e-4
    assert steps[-1]["policy/grad_norm"] > 0
