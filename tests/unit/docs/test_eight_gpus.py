"""The figures of docs/guides/eight-gpus.md next to the plan and the simulation of its recipe."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from leaderless.base.devices import find_accelerator
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


def test_a_plan_for_accelerators_is_in_their_type_wherever_it_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    def weights(*options: str) -> int:
        phases: dict[str, dict[str, int]] = printed("plan", *options)["memory_bytes"]["accelerator"]["phases"]
        return phases["policy generates"]["engine's weights"]

    monkeypatch.chdir(ROOT)
    assert find_accelerator() is None
    assert weights("--memory", "80") == weights("models.policy.compute_dtype=bfloat16")
    single = "models.policy.compute_dtype=float32"
    assert weights() == weights("--memory", "80", single) == 2 * weights("--memory", "80")
    said = " ".join(CliRunner().invoke(app, ["plan", RECIPE, SHAPE]).output.split())
    assert "Models compute in float32 on this machine, and in bfloat16 on accelerators: add --memory GIB." in said


def test_an_estimate_is_in_the_type_of_the_cluster(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(ROOT)
    file, constants = tmp_path / "cluster.yaml", Path("recipes/clusters/h100.yaml").read_text(encoding="utf-8")
    file.write_text(constants.replace("device:\n", "device:\n  compute_dtype: float32\n", 1), encoding="utf-8")

    def estimated(cluster: Path | str, *options: str) -> Any:
        return printed("simulate", "--cluster", str(cluster), *options)["estimate"]

    half, whole = estimated("recipes/clusters/h100.yaml"), estimated(file)
    assert half == estimated(file, "models.policy.compute_dtype=bfloat16")
    assert half["tokens_per_s"] > whole["tokens_per_s"]


def test_the_page_has_the_speed_that_is_simulated(lines: list[str]) -> None:
    estimate = printed("simulate", "--cluster", "recipes/clusters/h100.yaml")["estimate"]
    assert f"about {round(estimate['tokens_per_s'], -3):,.0f} tokens per second" in "\n".join(lines)
