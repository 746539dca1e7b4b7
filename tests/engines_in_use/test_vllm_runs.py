"""Whole runs in which vLLM generates; `make test-vllm` has an environment for them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from examples.signal_game.prepare import prepare
from tests.end_to_end.test_team import write_game
from tests.tiny import tiny_model, write_recipe

PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON")
"""Python of an environment with vLLM."""
APART = {"layout": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}}
LORA = {"lora": {"rank": 4}}
LETTERS = {"format": {"pattern": r"[^0-9]*"}}
"""A reward that an untrained model gets now and then."""
pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make test-vllm` runs this with vLLM")


def train(folder: Path, changes: Mapping[str, object], workers: int) -> list[dict[str, float]]:
    """The metrics of each step of a short run, in which the policy changes fast."""
    settings = {"rollout.engine": "vllm", "steps": 3, "reward": LETTERS, "run.timeout_s": 300, **changes}
    model = {"path": tiny_model(head_dim=32), "lora": settings.pop("lora", None)}
    recipe = write_recipe(folder, "", {"models.policy": model, **settings})
    return steps_in(folder / "runs" / "tiny", recipe, workers, "optimizer.learning_rate=0.003")


def steps_in(run: Path, recipe: Path, workers: int, *more: str) -> list[dict[str, float]]:
    """The metrics of each step of a recipe, which writes into the folder of a run."""
    command = [sys.executable, "-m", "leaderless", "train", str(recipe), "--workers", str(workers), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SERVER = {"rollout.external.python": PYTHON}
CASES: Mapping[str, tuple[Mapping[str, object], int]] = {
    "server": (SERVER, 1),
    "server of each of two ranks": (SERVER, 2),
    "server of a pool of its own": ({**SERVER, **APART}, 2),
    "servers that make one engine": ({**SERVER, "layout": {"rollout": {"tp": 2}}}, 2),
    "servers of a pool that make one engine": (
        {**SERVER, "layout": {"rollout": {"ranks": "0-1", "tp": 2}, "policy": {"ranks": "2"}}},
        3,
    ),
    "server that is sent adapters": ({**SERVER, **LORA}, 2),
    "server of a pool that is sent adapters": ({**SERVER, **APART, **LORA}, 2),
    "servers of one engine that are sent adapters": ({**SERVER, **LORA, "layout": {"rollout": {"tp": 2}}}, 2),
    "in process": ({}, 1),
    "in two processes": ({}, 2),
    "in two processes that are sent adapters": (LORA, 2),
    "in four processes that make two engines": ({"layout": {"rollout": {"tp": 2}}}, 4),
}
"""Changes of the recipe, and the number of workers."""


@pytest.fixture(scope="module")
def steps_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], list[dict[str, float]]]:
    """The metrics of each step of a case; each is run once."""

    @functools.cache
    def run(case: str) -> list[dict[str, float]]:
        changes, workers = CASES[case]
        if "rollout.external.python" not in changes and find_spec("vllm") is None:
            pytest.skip("needs vLLM in this environment")
        return train(tmp_path_factory.mktemp("run"), changes, workers)

    return run


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_each_step_is_sampled_with_the_weights_that_it_trains(
    steps_of: Callable[[str], list[dict[str, float]]], case: str
) -> None:
    steps = steps_of(case)
    assert len(steps) == 3
    for numbers in steps:
        assert numbers["mismatch/abs_max"] < 1e-4
    assert steps[-1]["policy/grad_norm"] > 0


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", [case for case in CASES if "make" in case])
def test_an_engine_of_several_ranks_samples_what_engines_of_one_rank_do(
    steps_of: Callable[[str], list[dict[str, float]]], case: str
) -> None:
    for numbers, expected in zip(steps_of(case), steps_of("server"), strict=True):
        for name in ("rollout/response_tokens", "reward/mean", "policy/grad_norm", "policy/entropy"):
            assert numbers[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("way", ["server", "in process"])
def test_agents_with_adapters_on_one_model_share_an_engine(tmp_path: Path, way: str) -> None:
    if way == "in process" and find_spec("vllm") is None:
        pytest.skip("needs vLLM in this environment")
    path = str(prepare(tmp_path) / "planner")
    models = {"planner": {"path": path, "lora": {"rank": 4}}, "solver": {"path": path, "lora": {"rank": 2}}}
    external = {"python": PYTHON if way == "server" else None}
    rollout = {"engine": "vllm", "max_response_tokens": 1, "max_sequences": 64, "external": external}
    place = {"directory": str(tmp_path / "runs"), "timeout_s": 300, "reward_processes": 0}
    recipe, run = write_game(tmp_path, "dr_mas", {}, models=models, rollout=rollout, run=place), tmp_path / "runs/team"
    steps = steps_in(run, recipe, 1)
    assert len(steps) == 3
    for numbers in steps:
        mismatches = [value for name, value in numbers.items() if name.startswith("mismatch/abs_max/")]
        assert len(mismatches) == 2, "each role has its own"
        assert max(mismatches) < 1e-4
    assert steps[-1]["planner/grad_norm"] > 0
    assert steps[-1]["solver/grad_norm"] > 0
    assert len([*(run / "logs").glob("vllm-*")]) == (way == "server")


@pytest.mark.timeout(900)
def test_new_weights_are_taken_while_responses_are_in_progress(tmp_path: Path) -> None:
    channel = {"capacity": 1, "mode": "continuous", "cache": "recompute"}
    layout = {node: {"ranks": str(int(node != "rollout"))} for node in ("rollout", "reward", "policy")}
    more = {"layout": layout, "channels": {"rollout": channel}, "steps": 5, "rollout.max_response_tokens": 24}
    steps = train(tmp_path, {**SERVER, **more}, 2)
    assert len(steps) == 5
    assert max(numbers["staleness/oldest"] for numbers in steps) <= 1
    (journal,) = (tmp_path / "runs" / "tiny" / "journal").glob("*shard*")
    events = [event for line in journal.read_text().splitlines() for event in json.loads(line)["events"]]
    taken = [iteration for num_steps, kind, iteration in events if kind == "weights" and num_steps > 0]
    assert {1, 2, 3} <= {*taken}
