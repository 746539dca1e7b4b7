"""The figures of docs/guides/eight-gpus.md next to the plan and the simulation of its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leaderless.cli.main import app

ROOT = Path(__file__).parents[3]
RECIPE = "recipes/gsm8k/eight_gpus_vllm.yaml"
SHAPE = "models.policy.path=recipes/scaling/qwen2.5-7b"
"""The model's `config.json`, which is all that planning needs."""


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The lines of the page, at the root of the repository."""
    monkeypatch.chdir(ROOT)
    return (ROOT / "docs/guides/eight-gpus.md").read_text(encoding="utf-8").splitlines()


def printed(command: str, *options: str) -> Any:
    """What a command prints as JSON about the recipe on eight ranks."""
    outcome = CliRunner().invoke(app, [command, RECIPE, SHAPE, "--world-size", "8", "--json", *options])
    assert outcome.exit_code == 0, outcome.output
    return json.loads(outcome.output)


def test_the_page_has_the_memory_that_is_planned_and_it_fits(lines: list[str]) -> None:
    plan = printed("plan", "--memory", "80")
    assert plan["fit"]["fits"]
    memory = plan["memory_bytes"]["accelerator"]
    assert memory["phases"].keys() >= {"policy generates", "policy trains"}
    for phase in ("policy generates", "policy trains"):
        planned = sum(memory["resident"].values()) + sum(memory["phases"][phase].values())
        row = next(line for line in lines if line.startswith(f"| the {phase}"))
        assert row.endswith(f"| {planned / 2**30:.0f} |")


def test_the_page_has_the_speed_that_is_simulated(lines: list[str]) -> None:
    estimate = printed("simulate", "--cluster", "recipes/clusters/h100.yaml")["estimate"]
    assert f"about {round(estimate['tokens_per_s'], -3):,.0f} tokens per second" in "\n".join(lines)
