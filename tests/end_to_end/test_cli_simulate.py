"""`leaderless simulate`, as a person runs it."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, Outcome, environment, run, succeed
from tests.end_to_end.test_cli_plan import PROGRAM
from tests.unit.recipes import write_model

CLUSTER = ROOT / "recipes/clusters/h100.yaml"
RECIPE = """\
name: tiny
workflow: grpo
models: {policy: model}
data: {train: {path: rows.jsonl}, max_prompt_tokens: 64}
reward: {math: 1.0}
batch: {prompts_per_step: 64, micro_batch_tokens: 1024}
layout: {rollout: {ranks: 0%-50%}, policy: {ranks: 50%-100%}}
steps: 3
"""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A folder with a recipe, the size of its model and a cluster file."""
    (tmp_path / "recipe.yaml").write_text(RECIPE)
    write_model(tmp_path / "model")
    shutil.copy(CLUSTER, tmp_path / "cluster.yaml")
    return tmp_path


def simulate(ranks: RankPool, folder: Path, *arguments: object) -> Outcome:
    return run(ranks, folder, "simulate", "recipe.yaml", "--cluster=cluster.yaml", *arguments)


def said(outcome: Outcome) -> str:
    """The message of a refusal, without the frame around it."""
    assert outcome.code == 2, outcome
    return " ".join(outcome.errors.replace("│", " ").split())


def test_a_step_is_estimated_for_readers_and_for_programs(ranks: RankPool, folder: Path) -> None:
    command = ("simulate", "recipe.yaml", "--cluster=cluster.yaml", "--world-size=16")
    numbers = json.loads(succeed(ranks, folder, *command, "--json"))
    assert numbers["world_size"] == 16
    assert numbers["cluster"]["host"]["devices"] == 8
    output = succeed(ranks, folder, *command)
    assert "a model, not a measurement" in output
    assert f"{numbers['estimate']['tokens_per_s']:,.0f}" in output
    assert "which has" not in output
    small = (folder / "cluster.yaml").read_text().replace("memory_gib: ", "memory_gib: 1.0e-9  # ")
    (folder / "cluster.yaml").write_text(small)
    output = succeed(ranks, folder, *command)
    assert "models and activations take" in output
    assert "of a host, which has" in output
    assert not (folder / "runs").exists(), "nothing is started"


def test_numbers_of_workers_are_compared(ranks: RankPool, folder: Path) -> None:
    command = ("simulate", "recipe.yaml", "--cluster=cluster.yaml", "--world-size=4,16", "--prompts-per-rank=2")
    few, many = json.loads(succeed(ranks, folder, *command, "--json"))
    assert (few["world_size"], many["world_size"]) == (4, 16)
    alone = succeed(ranks, folder, *command[:3], "--world-size=16", "--json", "batch.prompts_per_step=32")
    assert json.loads(alone) == many, "two prompts for each"
    speeds = [one["estimate"]["tokens_per_s"] / one["world_size"] for one in (few, many)]
    assert f"{speeds[1] / speeds[0]:.1%}" in succeed(ranks, folder, *command)


def test_a_wrong_cluster_file_is_placed(ranks: RankPool, folder: Path) -> None:
    text = (folder / "cluster.yaml").read_text()
    (folder / "cluster.yaml").write_text(text.replace("interfaces: 8", "interface: 8"))
    line = text[: text.index("interfaces: 8")].count("\n") + 1
    message = said(simulate(ranks, folder))
    assert f"cluster.yaml:{line}: host.interface: unknown key (did you mean 'interfaces'?)" in message
    (folder / "cluster.yaml").unlink()
    assert "cluster.yaml does not exist" in said(simulate(ranks, folder))


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--world-size=8,0"], "--world-size: is '8,0', but must be a number of workers, or several"),
        (["--world-size=3"], "recipe.yaml:7: layout.rollout.ranks: share '0%-50%': 50% of 3 ranks is no whole number"),
        (["--world-size=512"], "fewer than the 256 data-parallel ranks of node 'rollout'"),
        (["models.policy=/no/model", "--world-size=8"], "models.policy: the size of '/no/model' is not known"),
        (["workflow=dapo", "layout={}", "--world-size=8"], "'dapo' repeats nodes"),
        (["batch.prompt_per_step=8", "--world-size=8"], "did you mean 'prompts_per_step'?"),
    ],
)
def test_what_cannot_be_simulated_is_refused(ranks: RankPool, folder: Path, options: list[str], message: str) -> None:
    assert message in said(simulate(ranks, folder, *options))


def test_torch_is_not_needed(folder: Path) -> None:
    words = [str(folder), "simulate", "recipe.yaml", "--cluster", "cluster.yaml", "--world-size", "8"]
    program, given = [sys.executable, "-c", PROGRAM], json.dumps(words)
    done = subprocess.run(program, input=given, env=environment(), capture_output=True, text=True, check=True)
    code, _, errors, imported = json.loads(done.stdout)
    assert code == 0, errors
    assert imported == ["numpy"]
