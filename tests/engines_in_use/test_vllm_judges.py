"""Whole runs in which a judge that is a role of the recipe answers with vLLM; see `make test-vllm`."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path

import pytest
from tests.tiny import CHARACTERS, scatter_vectors, tiny_model, write_additions, write_recipe

from leaderless.models.loading.tiny import write_tiny_model

PYTHON = os.environ.get("LEADERLESS_VLLM_PYTHON")
"""Python of an environment with vLLM."""
pytestmark = pytest.mark.skipif(PYTHON is None, reason="`make test-vllm` runs this with vLLM")
SERVER = {"engine": "vllm", "external": {"python": PYTHON}}
OF_ITS_OWN = {"rollout": {"ranks": "0"}, "reward": {"ranks": "1-2", "tp": 2}, "advantage": {"ranks": "0"}}
CASES: Mapping[str, tuple[Mapping[str, object], Mapping[str, object], int]] = {
    "server next to the policy": (SERVER, {}, 1),
    "in the process of the policy": ({"engine": "vllm"}, {}, 1),
    "servers of ranks of its own that make one engine": (SERVER, OF_ITS_OWN | {"policy": {"ranks": "0"}}, 3),
}
"""Engine of the judge, layout, and number of workers."""
WORDS = "{% for message in messages %}{{ message['role'] }}: {{ message['content'] }}\n{% endfor %}"


@pytest.fixture(scope="module")
def judge(tmp_path_factory: pytest.TempPathFactory) -> str:
    """A model that vLLM can run, and that is asked in a chat."""
    folder = tmp_path_factory.mktemp("judge")
    path = write_tiny_model(folder, CHARACTERS, family="qwen3", hidden_size=128, chat_template=WORDS, seed=3)
    scatter_vectors(path)
    return str(path)


def recipe_in(folder: Path, judge: str, changes: Mapping[str, object]) -> Path:
    """A recipe whose responses the judge grades, in training and held-out ones."""
    held_out = {"path": str(write_additions(folder / "test.jsonl", 5)), "prompt": "question", "template": "plain"}
    options = {"role": "judge", "prompt": "{prompt} {response}", "max_question_tokens": 320, "max_answer_tokens": 4}
    parse = {"function": "tests.end_to_end.own_reward:points_of"}
    settings = {
        "models.judge": judge,
        "reward": {"judge": {**options, "retries": 1, "parse": parse}},
        "data.evaluation": held_out,
        "evaluation": {"every_steps": 2, "correct_at": 0.5},
        "guards.reward_failures_limit": None,
        "run.recorded_prompts": 6,
        "run.timeout_s": 300,
    }
    return write_recipe(folder, tiny_model(head_dim=32), {**settings, **changes})


def run(command: str, recipe: Path, workers: int, *more: str) -> str:
    """What a command prints that must succeed."""
    arguments = [sys.executable, "-m", "leaderless", command, str(recipe), "--workers", str(workers), *more]
    done = subprocess.run(arguments, capture_output=True, text=True, timeout=840, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def train(
    folder: Path, judge: str, engine: Mapping[str, object], layout: Mapping[str, object], workers: int
) -> tuple[list[dict[str, float]], dict[int, object]]:
    """The metrics of each step, and what the judge has said of each response to the first prompts of the first step."""
    run("train", recipe_in(folder, judge, {"roles.judge.rollout": engine, "layout": layout}), workers)
    made = folder / "runs/tiny"
    steps = [json.loads(line) for line in (made / "metrics.jsonl").read_text().splitlines()]
    files = (made / "samples").glob("step-000001*.jsonl")
    samples = [json.loads(line) for path in files for line in path.read_text().splitlines()]
    return steps, {one["sample_id"]: one["details"]["judge"] for one in samples}


@pytest.fixture(scope="module")
def native(judge: str, tmp_path_factory: pytest.TempPathFactory) -> tuple[list[dict[str, float]], dict[int, object]]:
    """What the judge says with the native engine, on the rank of the policy."""
    return train(tmp_path_factory.mktemp("native"), judge, {}, {}, 1)


@pytest.mark.timeout(900)
@pytest.mark.parametrize("case", CASES)
def test_a_judge_with_vllm_says_what_the_native_engine_says(
    judge: str, native: tuple[list[dict[str, float]], dict[int, object]], tmp_path: Path, case: str
) -> None:
    engine, layout, workers = CASES[case]
    if "external" not in engine and find_spec("vllm") is None:
        pytest.skip("needs vLLM in this environment")
    expected, told = native
    steps, said = train(tmp_path, judge, engine, layout, workers)
    assert len(said) == 24
    assert said == told
    trained = [line for line in steps if line["step"]]
    assert len(trained) == 2
    assert 0 < trained[0]["judge/failed_share"] < 1, "some verdicts cannot be read"
    assert trained[-1]["policy/grad_norm"] > 0
    for line, other in zip(steps, expected, strict=True):
        compared = {"reward/mean", "evaluation/mean@1", "policy/grad_norm"} & {*other}
        assert compared
        assert {name: line[name] for name in compared} == pytest.approx({name: other[name] for name in compared}, 1e-3)


@pytest.mark.timeout(900)
def test_an_evaluation_answers_with_one_engine_of_two_ranks_and_judges_with_one_of_each(
    judge: str, tmp_path: Path
) -> None:
    scores = []
    for name, engine, workers in (("native", {}, 1), ("vllm", SERVER, 2)):
        (tmp_path / name).mkdir()
        layout = {"rollout": {"tp": 2}} if engine else {}
        changes = {"rollout": {**engine, "max_response_tokens": 6}, "layout": layout}
        changes["roles.judge.rollout"] = {"engine": "native", "external": {"python": None}, "max_response_tokens": 6}
        recipe = recipe_in(tmp_path / name, judge, changes)
        scores.append(json.loads(run("eval", recipe, workers, "--json")))
    assert scores[1] == pytest.approx(scores[0])
