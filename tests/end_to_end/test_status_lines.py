"""What commands say while something takes long, where no live line shows it."""

from __future__ import annotations

import re
import subprocess
import time
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.alone import run_alone
from tests.tiny import tiny_model, write_additions, write_recipe

import leaderless
from leaderless.rollout.native.engine import NativeEngine

TIME = r"  0:00:\d\d$"


def slowly(sample: leaderless.RewardInput) -> float:
    """A reward that takes long."""
    time.sleep(0.15)
    return float(len(sample.response) % 2)


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setattr("leaderless.observability.console.STATUS_EVERY_S", 0.0)  # it looks every second
    step = NativeEngine.step

    def slow_step(engine: NativeEngine) -> object:
        time.sleep(0.3)
        return step(engine)

    monkeypatch.setattr(NativeEngine, "step", slow_step)
    held_out = {"path": str(write_additions(tmp_path / "test.jsonl", 8)), "prompt": "question", "answer": "answer"}
    changes = {
        "data.evaluation": held_out | {"template": "plain"},
        "evaluation.every_steps": 1,
        "reward": {f"{__name__}:slowly": 1.0},
        "steps": 1,
    }
    return write_recipe(tmp_path, tiny_model(), changes)


def lines(pattern: str, text: str) -> list[str]:
    return re.findall(f"(?m)^{pattern}{TIME}", text)


def test_training_says_what_it_does_before_and_in_each_step(tmp_path: Path, recipe: Path) -> None:
    done = run_alone(tmp_path, "train", recipe)
    assert done.code == 0, done
    assert lines(r"step 0: evaluating \d/8, \d+ tokens", done.output)
    assert lines(r"step 1: generating \d+/24, \d+ tokens", done.output)
    assert len(lines(r"step 1: reward, [1-9]\d*/24 graded", done.output)) >= 2
    assert "accuracy 0." in done.output
    assert "(step 0)" in done.output


def test_an_evaluation_and_a_trial_of_rewards_say_how_much_is_done(tmp_path: Path, recipe: Path) -> None:
    done = run_alone(tmp_path, "eval", recipe)
    assert done.code == 0, done
    assert lines(r"evaluating \d/8, \d+ tokens", done.errors)
    tried = run_alone(tmp_path, "reward", recipe, "--rows", 10)
    assert tried.code == 0, tried
    assert lines(r"[1-9]\d* responses are graded by '.*'", tried.errors)
    assert "graded" not in tried.output


def leave(sample: leaderless.RewardInput) -> float:
    """A reward that leaves a process in a session of its own."""
    child = subprocess.Popen(["sleep", "600"], start_new_session=True)
    Path("child").write_text(str(child.pid))
    return float(len(sample.response))


def test_a_trial_of_rewards_leaves_no_process(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"reward": {f"{__name__}:leave": 1.0}})
    assert run_alone(tmp_path, "reward", recipe, "--rows", 1, "--response", "1").code == 0
    assert not psutil.pid_exists(int((tmp_path / "child").read_text()))


def test_answering_prompts_says_how_much_is_done(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert len(leaderless.Run(recipe).generate(["1+1=", "2+2="], checkpoint=None, max_tokens=12)) == 2
    assert lines(r"generating \d/2, \d+ tokens", capsys.readouterr().err)
