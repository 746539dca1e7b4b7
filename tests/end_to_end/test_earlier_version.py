"""A run that an earlier version has begun: what keeps it from being continued is named, and then it continues.

`earlier_run` was written by revision f2ecc3e with two workers, which trained the recipe below for two steps.
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path

import pytest
from tests.end_to_end.cli import metrics
from tests.tiny import write_additions

from leaderless import Run
from leaderless.config import RecipeError
from leaderless.run.standalone_model import find_model
from leaderless.worker.checkpoint.export import export_model

EARLIER = Path(__file__).parent / "earlier_run"
RECIPE = {
    "name": "tiny",
    "workflow": "grpo",
    "models": {"policy": "model"},
    "data": {
        "train": {"path": "train.jsonl", "prompt": "question", "answer": "answer", "template": "plain"},
        "max_prompt_tokens": 8,
    },
    "reward": {"format": {"pattern": ".*\\d.*"}},
    "batch": {"prompts_per_step": 6, "responses_per_prompt": 4, "micro_batch_tokens": 64},
    "rollout": {"max_response_tokens": 6, "max_sequences": 16},
    "optimizer": {"learning_rate": 1e-3},
    "run": {"directory": "runs", "timeout_s": 60, "reward_processes": 0},
    "loggers": [],
    "steps": 4,
}
NUMBERS = {
    3: {"reward/mean": 0.416667, "policy/grad_norm": 1.029418, "policy/entropy": 3.943988},
    4: {"reward/mean": 0.375, "policy/grad_norm": 1.550566, "policy/entropy": 3.941741},
}
"""Numbers of that revision, of the steps that are missing, in a run that nobody interrupted."""


def test_a_run_of_an_earlier_version_continues_with_the_same_numbers(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    write_additions(Path("train.jsonl"))
    Path("recipe.yaml").write_text(json.dumps(RECIPE))
    shutil.copytree(EARLIER, "runs/tiny")
    export_model(Path("runs/tiny/checkpoints/step-000002"), "policy", Path("model"))
    with pytest.raises(RecipeError) as refused:
        Run("recipe.yaml").train()
    assert str(refused.value).startswith("runs/tiny/config.yaml:")
    assert "optimizer.warmup_steps: unknown key (did you mean 'optimizer.warmup_updates'?)" in str(refused.value)
    assert "algorithm.loop.max_rounds: unknown key (did you mean 'algorithm.repeat.max_rounds'?)" in str(refused.value)
    assert "run.tensorboard: unknown key" in str(refused.value)
    assert "models.policy.optimizer: unknown key: a role has its own optimizer" in str(refused.value)
    assert "if the run was begun with another version, correct this file, or pass --fresh" in str(refused.value)
    with pytest.raises(RecipeError, match="export it, and serve the exported folder"):
        find_model("runs/tiny/checkpoints/step-000002", "policy", print)
    config = Path("runs/tiny/config.yaml")
    for old, new in (("warmup_steps", "warmup_updates"), ("loop", "repeat")):
        config.write_text(config.read_text().replace(f"\n  {old}:", f"\n  {new}:"))
    config.write_text(config.read_text().replace("\n    optimizer: null", "").replace("\n  tensorboard: false", ""))
    Run("recipe.yaml").train()
    lines = {line["step"]: line for line in metrics(Path("runs/tiny"))}
    assert sorted(lines) == [1, 2, 3, 4], "the first two are of the earlier version"
    for step, numbers in NUMBERS.items():
        assert {name: lines[step][name] for name in numbers} == pytest.approx(numbers, rel=1e-4), step
