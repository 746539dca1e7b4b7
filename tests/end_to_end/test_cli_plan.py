"""Commands that start nothing: `plan`, `reward`, `schema`, `report`, `--help`, `--version`."""

from __future__ import annotations

import importlib.metadata
import json
import subprocess
import sys
import time
import tomllib
from collections.abc import Iterator
from pathlib import Path
from xml.etree import ElementTree as ET

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, Outcome, environment, run, succeed
from tests.tiny import tiny_model, write_recipe

from leaderless.config import load_recipe

PROGRAM = """
import io, json, os, sys
from contextlib import redirect_stderr, redirect_stdout
from leaderless.cli.main import main
heavy = {"torch", "transformers", "datasets", "pyarrow", "numpy"}
for line in sys.stdin:
    folder, *arguments = json.loads(line)
    os.chdir(folder)
    sys.argv, code, output, errors = ["leaderless", *arguments], 0, io.StringIO(), io.StringIO()
    with redirect_stdout(output), redirect_stderr(errors):
        try:
            main()
        except SystemExit as end:
            code = int(end.code or 0)
    imported = sorted(heavy & {name.partition(".")[0] for name in sys.modules})
    print(json.dumps([code, output.getvalue(), errors.getvalue(), imported]), flush=True)
"""


class Light:
    """An interpreter of its own, in which one command after the other runs; none may import a large library."""

    def __init__(self) -> None:
        self.process = subprocess.Popen(
            [sys.executable, "-c", PROGRAM],
            env=environment(),
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
        )

    def __call__(self, folder: Path, *arguments: object) -> Outcome:
        """Outcome of a command, after which no large library is imported."""
        assert self.process.stdin is not None
        assert self.process.stdout is not None
        print(json.dumps([str(folder), *map(str, arguments)]), file=self.process.stdin, flush=True)
        answer = self.process.stdout.readline()
        assert answer, "the interpreter has ended"
        code, output, errors, imported = json.loads(answer)
        assert imported == []
        return Outcome(code, output, errors)


@pytest.fixture(scope="module")
def light() -> Iterator[Light]:
    started = Light()
    yield started
    with started.process:
        started.process.terminate()


def test_a_picture_that_cannot_be_written_is_refused(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model())
    missing, folder = tmp_path / "no" / "x.svg", tmp_path / "folder.svg"
    folder.mkdir()
    for path, message in ((missing, "does not exist: make it first"), (folder, "cannot be written: Is a directory")):
        outcome = run(ranks, tmp_path, "plan", recipe, "--picture", path)
        assert outcome.code == 2
        assert message in " ".join(outcome.errors.replace("│", " ").split())
    assert not missing.parent.exists()
    assert [path.name for path in tmp_path.iterdir() if ".svg" in path.name] == ["folder.svg"]


@pytest.mark.parametrize("arguments", [("--help",), ("train", "--help"), ("plan",), ("schema",), ("eval", "--help")])
def test_commands_that_only_say_something_import_no_large_library(
    light: Light, tmp_path: Path, arguments: tuple[str, ...]
) -> None:
    recipe = write_recipe(tmp_path, tiny_model())
    outcome = light(tmp_path, *arguments, *([recipe] if arguments == ("plan",) else []))
    assert outcome.code == 0, outcome.errors
    assert outcome.errors == ""
    assert len(outcome.output) > 200


def test_the_version_is_one_line_with_that_of_torch_which_is_not_imported(light: Light, tmp_path: Path) -> None:
    own = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["version"]
    outcome = light(tmp_path, "--version")
    assert outcome.code == 0, outcome.errors
    assert outcome.output == f"leaderless {own} (torch {importlib.metadata.version('torch')})\n"
    assert outcome.errors == ""


def test_a_recipe_is_refused_without_a_large_library_too(light: Light, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model())
    outcome = light(tmp_path, "train", recipe, "batch.prompts_per_stop=3")
    assert outcome.code == 2
    assert "did you mean 'prompts_per_step'?" in outcome.errors


def test_a_plan_for_1024_workers_takes_seconds(ranks: RankPool, tmp_path: Path) -> None:
    begin = time.monotonic()
    recipe = ROOT / "recipes/gsm8k/grpo.yaml"
    model = f"models.policy.path={tiny_model('qwen3')}"
    picture = tmp_path / "plan.svg"
    changes = (model, "data.max_prompt_tokens=64", "rollout.max_response_tokens=64")
    options = ("--world-size", 1024, "--json", "--picture", picture, "--memory", 80)
    plan = json.loads(succeed(ranks, tmp_path, "plan", recipe, *changes, *options))
    seconds = time.monotonic() - begin
    assert plan["world_size"] == 1024
    assert plan["fit"]["fits"]
    assert {node["name"] for node in plan["nodes"]} >= {"rollout", "reward", "old", "reference", "advantage", "policy"}
    assert ET.parse(picture).getroot().tag.endswith("svg")
    assert seconds < 60, "less than five, where no other processes use the same cores"


def test_a_plan_says_what_every_worker_does(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model())
    layout = "layout={rollout: {ranks: 0-1}, policy: {ranks: 2-3}}"
    picture = tmp_path / "graph.svg"
    options = ("--world-size=4", "--memory=80", "--picture", picture)
    output = " ".join(succeed(ranks, tmp_path, "plan", recipe, layout, *options).split())
    fits = "On accelerators with 80 GiB each fits the fullest rank takes"
    for words in ("rollout", "reshard", "weights", "0-1", "2-3", "6 prompts, 24 samples", fits, f"picture: {picture}"):
        assert words in output
    assert not (tmp_path / "runs").exists(), "nothing is started"
    assert "rollout" in picture.read_text()
    outcome = run(ranks, tmp_path, "plan", recipe, "layout.rolout.ranks=0", "--world-size=2")
    assert outcome.code == 2
    assert "did you mean 'rollout'?" in " ".join(outcome.errors.split())


def test_the_schema_knows_every_setting_of_the_recipes_that_come_along(ranks: RankPool, tmp_path: Path) -> None:
    schema = json.loads(succeed(ranks, tmp_path, "schema"))
    assert schema["$schema"].startswith("https://json-schema.org/")
    recipes = sorted(path for path in (ROOT / "recipes").rglob("*.yaml") if path.parent.name != "clusters")
    assert len(recipes) >= 3
    for path in recipes:
        assert load_recipe(path).recipe.model_dump(exclude_unset=True).keys() <= schema["properties"].keys()
    assert schema["additionalProperties"] is False


def test_a_report_can_be_written_again(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"steps": 1})
    succeed(ranks, tmp_path, "train", recipe)
    page = tmp_path / "runs/tiny/report.html"
    before = page.read_text()
    page.unlink()
    assert f"report: {page}" in succeed(ranks, tmp_path, "report", page.parent)
    assert page.read_text() == before
    outcome = run(ranks, tmp_path, "report", tmp_path)
    assert outcome.code == 2
    assert "holds no config.yaml" in outcome.errors


def test_rewards_are_tried_without_large_libraries(light: Light, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"reward": {"exact_match": 1.0, "format": {"pattern": "[0-9]+"}}})
    done = light(tmp_path, "reward", recipe, "--rows", 2)
    assert done.code == 0, done.errors
    assert "the expected answer" in " ".join(done.output.split())
    assert done.output.count("found") == 4


def test_rewards_are_not_tried_on_rows_that_cannot_be_trained_on(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"reward": {"exact_match": 1.0}})
    for setting in ("prompt", "answer", "source"):
        outcome = run(ranks, tmp_path, "reward", recipe, f"data.train.{setting}=kin")
        assert (outcome.code, f"data.train.{setting}: row 1 has no column 'kin'" in outcome.errors) == (2, True)
    (tmp_path / "rows.parquet").write_bytes(b"no Parquet" * 9)
    outcome = run(ranks, tmp_path, "reward", recipe, "data.train.path=rows.parquet")
    assert (outcome.code, "rows.parquet is not a readable Parquet file" in outcome.errors) == (2, True)


def test_a_reward_that_fails_is_shown_with_its_traceback(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"reward": {"tests.unit.reward_functions:what_is_said": 1.0}})
    failed = run(ranks, tmp_path, "reward", recipe, "--rows", 1, "--response", "error")
    assert failed.code == 1
    assert "KeyError: 'missing'" in failed.output
    assert "reward_functions.py" in failed.output
    for bad in (["--response", "a", "--responses", "b"], ["--responses", "no/such/file"]):
        assert run(ranks, tmp_path, "reward", recipe, *bad).code == 2
