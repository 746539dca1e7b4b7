"""The first minutes: the quickstart and new projects, from the installed package alone."""

from __future__ import annotations

import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, environment, finish, metrics, run, start, succeed
from tests.tiny import tiny_model

from leaderless.cli.quickstart_project import demonstrations
from leaderless.cli.quickstart_project.data import NUM_HELD_OUT_PROBLEMS, NUM_PROBLEMS, write_word_problems
from leaderless.cli.quickstart_project.demonstrations import (
    CommandError,
    Show,
    show_language,
    show_pretrained,
    show_robot,
)
from leaderless.cli.quickstart_project.project import write_project
from leaderless.config import RecipeError, load_recipe
from leaderless.config import packaged_files as packaged_recipes
from leaderless.config.packaged_files import find_packaged, how_to_install, how_to_make, recipes_folder


def test_a_new_project_trains_and_its_tests_pass(ranks: RankPool, tmp_path: Path) -> None:
    output = succeed(ranks, tmp_path, "new", "own task")
    assert "leaderless train recipe.yaml" in output
    project = tmp_path / "own task"
    succeed(ranks, project, "train", "recipe.yaml", "steps=12", "loggers=[]")
    lines = [line for line in metrics(project / "runs/own-task") if "reward/mean" in line]
    assert lines[-1]["reward/mean"] > 2 * lines[0]["reward/mean"], "it learns from the first steps on"
    assert lines[-1]["reward/failed"] == 0
    tested = finish(start(project, "pytest", "-q", "-p", "no:cacheprovider", "--rootdir", project))
    assert tested.code == 0, tested.output
    questions = [(project / f"data/{part}.jsonl").read_text().splitlines() for part in ("train", "test")]
    assert not set(questions[0]) & set(questions[1])


def test_a_new_project_takes_another_model(tmp_path: Path) -> None:
    write_project(tmp_path / "one", "Qwen/Qwen3-0.6B")
    assert load_recipe(tmp_path / "one/recipe.yaml").recipe.models["policy"].path == "Qwen/Qwen3-0.6B"
    assert not (tmp_path / "one/model").exists()
    assert "Which digit is larger" in (tmp_path / "one/data/train.jsonl").read_text()


def test_a_folder_with_files_is_not_overwritten(ranks: RankPool, tmp_path: Path) -> None:
    (tmp_path / "notes.txt").write_text("kept")
    outcome = run(ranks, tmp_path, "new", ".")
    assert outcome.code == 2
    assert "exists already, and is not an empty folder: name another one" in outcome.errors
    assert [path.name for path in tmp_path.iterdir()] == ["notes.txt"]


def test_the_quickstarts_run_their_commands(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def command(show: Show, *arguments: str) -> None:
        succeed(ranks, show.folder, *arguments)

    monkeypatch.setattr(Show, "command", command)
    monkeypatch.setattr("leaderless.cli.quickstart_project.demonstrations.NUM_DEMONSTRATIONS", 4)
    few = ("steps=2", "loggers=[]", "batch.prompts_per_step=2")
    show_language(Show(tmp_path, 1, (*few, "evaluation.max_prompts=4")))
    assert "before reinforcement learning" in capsys.readouterr().out
    assert (tmp_path / "runs/quickstart/report.html").exists()
    few = (*few, "evaluation.max_prompts=2")
    show_pretrained(Show(tmp_path, 1, (*few, "data.max_prompt_tokens=256")), tiny_model())
    assert "before reinforcement learning" in capsys.readouterr().out
    assert (tmp_path / "runs/quickstart-real/report.html").exists()
    monkeypatch.setattr(
        Show, "train", lambda show, recipe: show.command("train", recipe, *(few[:3] if "imitation" in recipe else few))
    )
    show_robot(Show(tmp_path, 1))
    shown = capsys.readouterr().out
    assert "512 tables that were never seen" in shown
    assert "before reinforcement learning" in shown


def test_a_quickstart_without_evaluations_ends_well(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "runs/some").mkdir(parents=True)
    (tmp_path / "runs/some/metrics.jsonl").write_text('{"step": 1, "policy/loss": 0.5}\n')
    Show(tmp_path, 1, ("evaluation.every_steps=0",)).result("some", "Accuracy on 4 held-out additions", "to see why")
    shown = capsys.readouterr().out
    assert "Nothing was measured on held-out rows" in shown
    assert "Open runs/some/report.html in a browser to see why." in shown


def test_answers_of_word_problems_are_right(tmp_path: Path) -> None:
    write_word_problems(tmp_path / "first", seed=1)
    write_word_problems(tmp_path / "second", seed=1)
    rows = []
    for name in ("train", "test"):
        text = (tmp_path / f"first/{name}.jsonl").read_text()
        assert text == (tmp_path / f"second/{name}.jsonl").read_text()
        rows += [json.loads(line) for line in text.splitlines()]
    assert len({row["question"] for row in rows}) == len(rows) == NUM_PROBLEMS + NUM_HELD_OUT_PROBLEMS
    for row in rows:
        a, b = map(int, re.findall(r"\d+", row["question"]))
        expected = a + b if " more." in row["question"] else a - b if " away." in row["question"] else a * b
        assert int(row["answer"]) == expected >= 0, row
    kinds = [
        sum(word in row["question"] for row in rows[-NUM_HELD_OUT_PROBLEMS:]) for word in ("more", "away", "in each")
    ]
    assert min(kinds) > NUM_HELD_OUT_PROBLEMS / 5, "each kind is asked"


def test_a_model_is_no_arm(tmp_path: Path, ranks: RankPool) -> None:
    outcome = run(ranks, tmp_path, "quickstart", "--robot", "--model", "some")
    assert outcome.code == 2
    assert "leave one out" in outcome.errors


def test_a_quickstart_ends_where_a_command_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(demonstrations.sys, "executable", "/bin/false")
    with pytest.raises(CommandError) as failed:
        Show(tmp_path, 1).train("recipes/quickstart/sft.yaml")
    assert failed.value.code == 1


def test_recipes_of_the_package_are_found_from_anywhere(
    ranks: RankPool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert "32 prompts, 512 samples" in succeed(ranks, tmp_path, "plan", "recipes/quickstart/grpo.yaml")
    included = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["hatch"]["build"]["targets"]["wheel"]
    assert included["force-include"] == {"recipes": "leaderless/recipes"}
    package = tmp_path / "site-packages/leaderless"
    (package / "recipes").mkdir(parents=True)
    (package / "recipes/a.yaml").touch()
    judged = succeed(ranks, tmp_path, "reward", "recipes/code/grpo.yaml", "--rows", "1")
    assert "reward" in judged, "its rows are part of the package, too"
    assert how_to_install("serve", "search") == "from a copy of the project, pip install --editable '.[serve,search]'"
    monkeypatch.setattr(packaged_recipes, "_PACKAGE", package)
    assert recipes_folder() == package / "recipes"
    assert find_packaged(Path("recipes/a.yaml")) == package / "recipes/a.yaml"
    assert how_to_install("serve", "search") == "pip install 'leaderless[serve,search]'", "there may be no copy"


@pytest.mark.parametrize(
    ("name", "remedy"),
    [
        ("recipes/gsm8k/grp.yaml", "did you mean 'recipes/gsm8k/grpo.yaml'?"),
        ("recipes/../../secret.yaml", "`leaderless new DIR` writes one"),
        ("mine.yaml", "`leaderless new DIR` writes one"),
        ("own/recip.yaml", "did you mean 'own/recipe.yaml'?"),
    ],
)
def test_a_recipe_that_is_not_there_is_refused_with_a_remedy(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    monkeypatch.chdir(tmp_path)
    Path("own").mkdir()
    Path("own/recipe.yaml").touch()
    with pytest.raises(RecipeError) as refused:
        find_packaged(Path(name))
    assert f"{name} does not exist (looked for from {tmp_path})" in str(refused.value)
    assert remedy in str(refused.value)


@pytest.mark.parametrize(("recipe", "option"), [("grpo", ""), ("word_problems", " --real"), ("robot", " --robot")])
def test_what_a_quickstart_makes_is_named(ranks: RankPool, tmp_path: Path, recipe: str, option: str) -> None:
    outcome = run(ranks, tmp_path, "train", f"recipes/quickstart/{recipe}.yaml")
    assert outcome.code == 2
    assert f"`leaderless quickstart{option}` makes it" in outcome.errors


def test_shells_can_complete_commands() -> None:
    words = {"_LEADERLESS_COMPLETE": "complete_bash", "COMP_WORDS": "leaderless qui", "COMP_CWORD": "1"}
    done = subprocess.run(
        [sys.executable, "-c", "import sys; sys.argv[0] = 'leaderless'; from leaderless.cli.main import app; app()"],
        env=environment() | words,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.stdout.split() == ["quickstart"], done.stderr


def test_what_an_example_makes_is_named() -> None:
    """Each script of an example that is run first; the quickstart has its own command."""
    made = {}
    for script in (ROOT / "examples").rglob("*.py"):
        folder = re.search(r'^    (?:prepare|convert)\(.*Path\("(runs/[\w-]+)', script.read_text(), re.MULTILINE)
        if folder is not None and script.parent.name != "online":  # whose script trains, too
            made[folder[1]] = script.relative_to(ROOT)
    assert len(made) >= 11
    for folder, script in made.items():
        said = how_to_make(Path(folder) / "rows.jsonl")
        assert str(script) in said or ".".join(script.with_suffix("").parts) in said, folder


def test_pages_install_the_package_from_a_copy_as_no_index_has_it() -> None:
    for page in [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]:
        assert not re.search(r"pip install '?leaderless", page.read_text(encoding="utf-8")), page
