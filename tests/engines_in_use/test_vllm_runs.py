"""Whole runs in which vLLM generates; `make test-vllm` has an environment for them."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path

import psutil
import pytest
from examples.signal_game.prepare import prepare
from tests.end_to_end.test_restarts import free_port
from tests.end_to_end.test_team import write_game
from tests.tiny import tiny_model, write_recipe

from leaderless.config import RecipeError
from leaderless.config.rollout import ExternalConfig
from leaderless.rollout.external.arguments import check_installed

PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON")
"""Python of an environment with vLLM."""
APART = {"layout": {"rollout": {"ranks": "0"}, "policy": {"ranks": "1"}}}
LORA = {"lora": {"rank": 4}}
LETTERS = {"format": {"pattern": r"[^0-9]*"}}
"""A reward that an untrained model gets now and then."""
pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make test-vllm` runs this with vLLM")


FAST = ("optimizer.learning_rate=0.003",)
"""With this, the policy changes fast."""


def train(folder: Path, changes: Mapping[str, object], workers: int) -> list[dict[str, float]]:
    """The metrics of each step of a short run."""
    return steps_in(folder / "runs" / "tiny", recipe_for(folder, changes), workers, *FAST)


def recipe_for(folder: Path, changes: Mapping[str, object]) -> Path:
    """The recipe of a short run."""
    settings = {"rollout.engine": "vllm", "steps": 3, "reward": LETTERS, "run.timeout_s": 300, **changes}
    model = {"path": tiny_model(head_dim=32), "lora": settings.pop("lora", None)}
    if (dtype := settings.pop("compute_dtype", None)) is not None:
        model["compute_dtype"] = dtype
    return write_recipe(folder, "", {"models.policy": model, **settings})


def steps_in(run: Path, recipe: Path, workers: int, *more: str) -> list[dict[str, float]]:
    """The metrics of each step of a recipe, which writes into the folder of a run."""
    command = [sys.executable, "-m", "leaderless", "train", str(recipe), "--workers", str(workers), *more]
    done = subprocess.run(command, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return steps_of_run(run)


def steps_of_run(run: Path) -> list[dict[str, float]]:
    """The metrics of each step in the folder of a run."""
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


SERVER = {"rollout.external.python": PYTHON}
ARGUMENTS = {"enable_prefix_caching": False, "max_num_batched_tokens": 512, "kv_cache_dtype": "auto"}
CASES: Mapping[str, tuple[Mapping[str, object], int]] = {
    "server": (SERVER, 1),
    "server with arguments of its own": ({**SERVER, "rollout.external.arguments": ARGUMENTS}, 1),
    "server of each of two ranks": (SERVER, 2),
    "server of a pool of its own": ({**SERVER, **APART}, 2),
    "servers that make one engine": ({**SERVER, "layout": {"rollout": {"tp": 2}}}, 2),
    "servers that are stages of one engine": ({**SERVER, "layout": {"rollout": {"pp": 2}}}, 2),
    "servers that are stages and are sent adapters": ({**SERVER, **LORA, "layout": {"rollout": {"pp": 2}}}, 2),
    "servers that divide stages": ({**SERVER, "layout": {"rollout": {"pp": 2, "tp": 2}}}, 4),
    "in two processes that are stages": ({"layout": {"rollout": {"pp": 2}}}, 2),
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


def test_an_argument_that_vllm_does_not_have_is_refused_before_anything_is_loaded(tmp_path: Path) -> None:
    assert PYTHON is not None
    external = ExternalConfig(python=PYTHON, arguments={"max_num_batch_tokens": 512})
    with pytest.raises(RecipeError, match=r"vLLM [\d.]+ has no argument .*did you mean 'max_num_batched_tokens'\?"):
        check_installed("vllm", external, "policy")


@pytest.mark.timeout(900)
@pytest.mark.parametrize(
    "case", [case for case in CASES if ("make" in case or "stages" in case) and "adapters" not in case]
)
def test_an_engine_of_several_ranks_samples_what_engines_of_one_rank_do(
    steps_of: Callable[[str], list[dict[str, float]]], case: str
) -> None:
    for numbers, expected in zip(steps_of(case), steps_of("server"), strict=True):
        for name in ("rollout/response_tokens", "reward/mean", "policy/grad_norm", "policy/entropy"):
            assert numbers[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("layout", [{"tp": 2}, {"pp": 2}])
def test_an_engine_over_two_machines_samples_what_engines_of_one_rank_do(
    tmp_path: Path, steps_of: Callable[[str], list[dict[str, float]]], layout: dict[str, int]
) -> None:
    """Two launchers of one worker each stand for two machines, whose processes share no memory."""
    recipe = recipe_for(tmp_path, {**SERVER, "layout": {"rollout": layout}})
    place = ["--workers", "1", "--nodes", "2", "--rendezvous", f"127.0.0.1:{free_port()}"]
    command = [sys.executable, "-m", "leaderless", "train", str(recipe), *place, *FAST]
    launchers = [subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True) for _ in "ab"]
    said = [launcher.communicate(timeout=840)[0] for launcher in launchers]
    assert [launcher.returncode for launcher in launchers] == [0, 0], "\n".join(said)
    run = tmp_path / "runs" / "tiny"
    logs = [log.read_text() for log in (run / "logs").glob("vllm-policy-rank-*.log")]
    assert len(logs) == 2
    assert all("SHM communicator disabled" in log for log in logs), "or parts of other machines would wait for ever"
    for numbers, expected in zip(steps_of_run(run), steps_of("server"), strict=True):
        assert numbers["mismatch/abs_max"] < 1e-4
        for name in ("rollout/response_tokens", "reward/mean", "policy/grad_norm", "policy/entropy"):
            assert numbers[name] == pytest.approx(expected[name], rel=1e-3), name


@pytest.mark.timeout(900)
@pytest.mark.parametrize("lora", [None, {"rank": 4}])
def test_engines_elsewhere_sample_what_a_server_does_and_one_that_ends_is_replaced(
    tmp_path: Path,
    steps_of: Callable[[str], list[dict[str, float]]],
    lora: object,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert PYTHON is not None
    monkeypatch.setenv("LEADERLESS_TOKEN", "secret")
    ports = [free_port(), free_port()]
    offers = [
        subprocess.Popen([sys.executable, "-m", "leaderless", "engine", "--python", PYTHON, "--port", str(port)])
        for port in ports
    ]
    try:
        changes = {"rollout.external.addresses": [f"127.0.0.1:{port}" for port in ports], "lora": lora}
        recipe = recipe_for(tmp_path, changes)
        expected = steps_of("server that is sent adapters" if lora else "server of each of two ranks")
        for name in ("first", "again"):  # a second run finds the same engines
            found = steps_in(tmp_path / "runs" / name, recipe, 2, *FAST, f"name={name}")
            for numbers, server in zip(found, expected, strict=True):
                assert numbers["mismatch/abs_max"] < 1e-4
                for metric in ("rollout/response_tokens", "reward/mean", "policy/grad_norm", "policy/entropy"):
                    assert numbers[metric] == pytest.approx(server[metric], rel=1e-3), metric
        run = threading.Thread(
            target=steps_in, args=(tmp_path / "runs/longer", recipe, 2, *FAST, "name=longer", "steps=80")
        )
        run.start()
        metrics = tmp_path / "runs/longer/metrics.jsonl"
        while not (metrics.exists() and metrics.read_text()):
            assert run.is_alive()
            time.sleep(0.1)
        (process,) = psutil.Process(offers[0].pid).children()
        process.kill()
        run.join(840)
        steps = steps_of_run(tmp_path / "runs/longer")
        assert len(steps) == 80
        assert max(numbers["mismatch/abs_max"] for numbers in steps) < 1e-4
    finally:
        for offered in offers:
            offered.terminate()
            offered.wait(60)


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
