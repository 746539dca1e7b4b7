"""Secrets of the environment are in no file of a run, nor in its output, even if a user's error quotes them."""

from __future__ import annotations

from pathlib import Path

import pytest
from tests.end_to_end.alone import run_alone
from tests.end_to_end.leaking import WORKFLOW
from tests.tiny import tiny_model, write_recipe

SECRETS = {name: f"secret-of-{name}-0815" for name in ("HF_TOKEN", "WANDB_API_KEY", "AWS_SECRET_ACCESS_KEY")}


@pytest.mark.parametrize("leak", ["", "yes"])
def test_secrets_stay_in_the_environment(
    leak: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    for name, value in {**SECRETS, "LEAK": leak}.items():
        monkeypatch.setenv(name, value)
    (tmp_path / "leaking.yaml").write_text(WORKFLOW)
    changes = {
        "workflow": "leaking.yaml",
        "reward": {"tests.end_to_end.leaking:quote_token": 1.0},
        "loggers": ["tensorboard"],
        "run.recorded_prompts": 6,
        "checkpoint.every_steps": 1,
        "guards.reward_failures_limit": None,
    }
    recipe = write_recipe(tmp_path, tiny_model(), changes)
    outcome = run_alone(tmp_path, "train", recipe)
    assert outcome.code == (1 if leak else 0), outcome.errors
    shown = outcome.output + outcome.errors + "".join(capfd.readouterr())
    files = {path: path.read_bytes() for path in (tmp_path / "runs").rglob("*") if path.is_file()}
    if leak:
        assert "403 for <AWS_SECRET_ACCESS_KEY>" in shown, "the rest of the error is there"
    else:
        kinds = {"config.yaml", "plan.json", "metrics.jsonl", "report.html", "state.json"}
        assert kinds <= {path.name for path in files}
        assert any(b"401 for https://<HF_TOKEN>@host; headers <WANDB_API_KEY>" in data for data in files.values())
    for value in SECRETS.values():
        assert value not in shown
        assert [path for path, data in files.items() if value.encode() in data] == []
