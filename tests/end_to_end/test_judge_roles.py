"""Runs whose judge is a model of the plan: next to the policy, on its own ranks, after a restart, and on a server."""

from __future__ import annotations

import json
import os
import shutil
import signal
import socket
import time
from collections.abc import Mapping
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, metrics, start, succeed
from tests.end_to_end.test_adopt import NUM_STEPS, SETTINGS, SWITCH, Runs, samples_of
from tests.end_to_end.test_cli_serve import is_healthy
from tests.engines import fake_sglang_python
from tests.tiny import judge_model, tiny_model, write_additions, write_recipe

from leaderless.config.rewards import RewardsConfig
from leaderless.rewards.pool import RewardPool
from leaderless.rewards.protocol import RewardInput

JUDGE = {
    "prompt": "{prompt} {response}",
    "parse": {"function": "tests.end_to_end.own_reward:points_of"},
    "max_answer_tokens": 4,
    "retries": 1,
}
POOLS = {"rollout": "0", "reward": "1", "advantage": "0", "samples": "0", "policy": "0"}
CLOCKS = ("time", "seconds/", "sent/", "throughput", "rollout/tokens_per_s", "memory", "data/", "balance/", "judge/")


def recipe_in(folder: Path, **changes: object) -> Path:
    held_out = {"path": str(write_additions(folder / "test.jsonl", 5)), "prompt": "question", "template": "plain"}
    return write_recipe(
        folder,
        tiny_model(),
        {
            "models.judge": judge_model(),
            "reward": {"judge": {"role": "judge", "max_question_tokens": 320, **JUDGE}},
            "data.evaluation": held_out,
            "evaluation": {"every_steps": 2, "responses_per_prompt": 2, "temperature": 1.0, "correct_at": 0.5},
            "checkpoint": {"every_steps": 1, "asynchronous": False},
            "guards": {"reward_failures_limit": None},
            "run.recorded_prompts": 6,
            **changes,
        },
    )


def recorded(folder: Path) -> dict[int, tuple[object, ...]]:
    """What the judge has said of each response of training, by the number of the sample."""
    found: dict[int, tuple[object, ...]] = {}
    for path in sorted((folder / "runs/tiny/samples").glob("step-*.jsonl")):
        for line in path.read_text().splitlines():
            sample = json.loads(line)
            step = int(path.name.split(".")[0].removeprefix("step-"))
            details = sample["details"]["judge"]
            found[step, sample["sample_id"]] = sample["prompt"], sample["response"], sample["is_valid"], details
    return found


def numbers(line: Mapping[str, float]) -> dict[str, float]:
    return {name: value for name, value in line.items() if not name.startswith(CLOCKS)}


@pytest.fixture(scope="module")
def alone(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run on one rank."""
    folder = tmp_path_factory.mktemp("alone")
    succeed(ranks, folder, "train", recipe_in(folder))
    return folder


def test_a_judge_on_ranks_of_its_own_says_the_same(ranks: RankPool, tmp_path: Path, alone: Path) -> None:
    layout = {node: {"ranks": rank} for node, rank in POOLS.items()}
    succeed(ranks, tmp_path, "train", recipe_in(tmp_path, layout=layout), num_ranks=2)
    said = recorded(alone)
    assert recorded(tmp_path) == said
    assert len(said) == 48
    assert {is_valid for _, _, is_valid, _ in said.values()} == {True, False}, "some verdicts cannot be read"
    first, second = metrics(alone / "runs/tiny"), metrics(tmp_path / "runs/tiny")
    assert 0 < first[0]["evaluation/mean@2"] < 1
    for one, other in zip(first, second, strict=True):
        assert numbers(other) == pytest.approx(numbers(one), rel=1e-3, abs=1e-4)


def test_a_run_that_resumes_has_the_same_rewards_and_asks_nothing_again(ranks: RankPool, alone: Path) -> None:
    before, said = metrics(alone / "runs/tiny"), recorded(alone)
    shutil.rmtree(alone / "runs/tiny/checkpoints/step-000002")
    succeed(ranks, alone, "train", alone / "recipe.yaml")
    after = metrics(alone / "runs/tiny")
    assert recorded(alone) == said
    assert numbers(after[-1]) == pytest.approx(numbers(before[-1]))
    known = 1 - after[-1]["judge/failed_share"]
    assert after[-1]["judge/cached_share"] == pytest.approx(known), "those that fail are not counted as known"
    assert after[-1].get("judge/requests", 0.0) == 0.0


def test_a_server_and_an_evaluation_with_the_same_model_say_the_same(
    ranks: RankPool, tmp_path: Path, alone: Path
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as free:
        port = free.getsockname()[1]
    server = start(tmp_path, "leaderless", "serve", judge_model(), "--port", port, "--name", "judge")
    try:
        scores = json.loads(succeed(ranks, tmp_path, "eval", recipe_in(tmp_path), "--json"))
        end = time.monotonic() + 60
        while not is_healthy(f"http://127.0.0.1:{port}"):
            assert time.monotonic() < end
            assert server.poll() is None, server.communicate()
            time.sleep(0.05)
        said = list(recorded(alone).values())
        settings = {"judge": {"url": f"http://127.0.0.1:{port}/v1", "model": "judge", **JUDGE}}
        samples = [RewardInput(prompt, response, None, {}, False) for prompt, response, _, _ in said]
        with RewardPool(RewardsConfig.model_validate(settings), 0) as pool:
            graded = pool.grade(samples, [None] * len(samples))
    finally:
        os.kill(server.pid, signal.SIGTERM)
        finish(server)
    assert [(one.is_valid, one.details["judge"]) for one in graded] == [tuple(one[2:]) for one in said]
    logged = metrics(alone / "runs/tiny")[0]
    assert scores == pytest.approx({name: value for name, value in logged.items() if name.startswith("evaluation/")})


@pytest.mark.thorough
def test_a_judge_in_an_engine_of_another_environment_says_the_same(
    ranks: RankPool, tmp_path: Path, alone: Path
) -> None:
    engine = {"engine": "sglang", "external": {"python": fake_sglang_python(tmp_path)}}
    succeed(ranks, tmp_path, "train", recipe_in(tmp_path, roles={"judge": {"rollout": engine}}))
    assert recorded(tmp_path) == recorded(alone)


@pytest.mark.thorough
def test_a_judge_that_moves_to_other_ranks_during_a_run_says_the_same(ranks: RankPool, tmp_path: Path) -> None:
    judge = {"role": "judge", "max_question_tokens": 320, "temperature": 1.0, **JUDGE}
    own = {"models.judge": judge_model(), "reward": {"judge": judge}, "guards.reward_failures_limit": None}
    own |= {"evaluation.correct_at": 0.1, "evaluation.responses_per_prompt": 2, "evaluation.temperature": 1.0}
    runs = Runs(ranks, tmp_path, {**SETTINGS, **own})
    before = {"rollout": "0", "reward": "1", "policy": "0"}
    after = {"rollout": "0-1", "reward": "0-1", "policy": "1"}
    switched = runs("switched", before, switches={SWITCH: after})
    runs("resumed", before, SWITCH)
    resumed = runs("resumed", after)
    for step in range(SWITCH + 1, NUM_STEPS + 1):
        assert samples_of(switched, step) == samples_of(resumed, step) != {}
    first, second = (
        {line["step"]: numbers(line) for line in metrics(tmp_path / "runs" / name)} for name in ("switched", "resumed")
    )
    assert first == second
    assert 0 < first[NUM_STEPS]["evaluation/mean@2"] < 1
