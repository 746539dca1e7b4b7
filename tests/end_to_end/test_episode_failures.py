"""Failures of episodes in a run: counted the same on any number of ranks, warned of, and graded again once mended."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from random import Random

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, run, succeed
from tests.tiny import tiny_model, write_recipe

from leaderless.config.failures import FAILURE_KINDS
from leaderless.environments.protocol import Environment, Observation, Task, Turn
from leaderless.environments.tools import Call, ToolCalls, tool
from leaderless.observability.episode_files import episode_files, read_episode_file
from leaderless.rewards.protocol import RewardInput

GRADER = f"{__name__}:grader"


class Fragile(Environment):
    """Says random digits. Some letters of the policy break it, or are calls of a tool that breaks."""

    def reset(self, task: Task, rng: Random) -> Observation:
        self.rng, self.turn = rng, 0
        return f"{task['question']}{rng.randrange(10)}"

    @tool
    def broken(self) -> str:
        """Raise an error."""
        raise KeyError("no such row")

    def act(self, text: str) -> Turn:
        self.turn += 1
        if "7" in text:
            raise ValueError("unlucky")
        if "6" in text:
            raise ConnectionResetError("no server")
        return Turn(f"<{self.rng.randrange(10)}>", reward=0.125 * len(text), done=self.turn == 3 or "3" in text)


def read_calls(text: str) -> ToolCalls:
    """A `5` calls the tool, and a `4` is a call that cannot be read."""
    if "4" in text:
        return ToolCalls(text, [Call("", problem="it is a four")])
    return ToolCalls("", [Call("broken")]) if "5" in text else ToolCalls(text)


def grader(sample: RewardInput) -> float:
    """The share of digits; until it is mended, answers of an even length cannot be graded."""
    if len(sample.response) % 2 == 0 and not Path("mended").exists():
        raise RuntimeError("the grader is broken")
    return sum(letter.isdigit() for letter in sample.response) / max(1, len(sample.response))


SETTINGS = {
    "environment": {
        "type": f"{__name__}:Fragile",
        "tool_format": f"{__name__}:read_calls",
        "max_turns": 4,
        "max_episode_tokens": 90,
    },
    "reward": {GRADER: 1.0},
    "optimizer.learning_rate": 1e-2,
    "data.max_prompt_tokens": 10,
    "batch.prompts_per_step": 8,
    "batch.micro_batch_tokens": 256,
    "guards": {"reward_failures_limit": None},
    "steps": 2,
}


@pytest.fixture(scope="module")
def folder(ranks: RankPool, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a recipe, and with its runs on one rank and on two."""
    folder = tmp_path_factory.mktemp("failures")
    write_recipe(folder, tiny_model(num_layers=1), SETTINGS)
    for count in (1, 2):
        succeed(ranks, folder, "train", "recipe.yaml", f"name=on{count}", num_ranks=count)
    return folder


def lines_of(run_folder: Path, step: int, what: str) -> list[dict[str, object]]:
    files = episode_files(run_folder / "episodes")
    return [line for file in files if file[:3] == ("step", step, what) for line in read_episode_file(file.path)]


def test_counts_and_numbers_do_not_depend_on_the_number_of_ranks(folder: Path) -> None:
    one, two = metrics(folder / "runs/on1"), metrics(folder / "runs/on2")
    names = [f"failure/{kind}" for kind in FAILURE_KINDS]
    names += ["episode/failed", "episode/repeated", "reward/failed", "reward/failed_share", "group/no_signal"]
    for first, second in zip(one, two, strict=True):
        assert {name: first[name] for name in names} == pytest.approx({name: second[name] for name in names})
        for name in ("reward/mean", "policy/grad_norm"):
            assert first[name] == pytest.approx(second[name], rel=1e-3), name
    met = {name for line in one for name in names if line[name]}
    assert {f"failure/{kind}" for kind in ("policy", "environment", "tool", "grader", "infrastructure")} <= met


def test_metrics_are_what_the_journal_says(folder: Path) -> None:
    for line in metrics(folder / "runs/on2"):
        played = lines_of(folder / "runs/on2", int(line["step"]), "played")
        assert len(played) == 32
        met = Counter(kind for one in played for kind in {note["kind"] for note in one["failures"]})  # type: ignore[attr-defined]
        for kind in FAILURE_KINDS[:-1]:
            if kind != "grader":
                assert line[f"failure/{kind}"] == pytest.approx(met[kind] / 32)
        graded = lines_of(folder / "runs/on2", int(line["step"]), "graded")
        broken = [one for one in graded if not one["is_valid"] and "environment" not in str(one["details"])[:16]]
        assert line["failure/grader"] == pytest.approx(len(broken) / 32)
        valid = [float(str(one["reward"])) for one in graded if one["is_valid"]]
        assert line["reward/mean"] == pytest.approx(sum(valid) / len(valid)), "what failed is not 0, but absent"
        assert line["reward/failed"] == 32 - len(valid)


def test_a_kind_above_its_share_is_warned_of_once_with_its_first_error(folder: Path) -> None:
    path = folder / "runs/on2/events.jsonl"
    found = [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]
    first = {one["kind"]: one["error"] for one in found if one["event"] == "episode_failed"}
    assert "the grader is broken" in first["grader"]
    assert first["tool"] == "the tool 'broken' raised KeyError: 'no such row'"
    warned = [(one["kind"], one["step"], one["node"]) for one in found if one.get("guard") == "failures_limit"]
    shares = {name: [line[f"failure/{name}"] for line in metrics(folder / "runs/on2")] for name in FAILURE_KINDS}
    wanted = {
        kind: next(step for step, share in enumerate(values, 1) if share > 0.1)
        for kind, values in shares.items()
        if max(values) > 0.1 and kind != "policy"
    }
    assert {kind: step for kind, step, _ in warned} == wanted
    assert len(warned) == len(wanted), "once in 20 steps"
    assert {node for kind, _, node in warned if kind == "grader"} == {"reward"}
    assert {node for kind, _, node in warned if kind != "grader"} == {"rollout"}


def test_the_run_may_stop_instead_and_says_why(ranks: RankPool, folder: Path) -> None:
    changes = ["name=stopped", "guards.failures_action=stop", "guards.failures_limit=0.2"]
    outcome = run(ranks, folder, "train", "recipe.yaml", *changes, num_ranks=2)
    assert outcome.code == 1
    said = " ".join(outcome.errors.split())
    assert "guards.failures_limit=0.2: " in said
    assert "(episodes with a failure of the kind '" in said
    assert "mend what fails" in said
    assert "(the first was " in said
    assert [line["step"] for line in metrics(folder / "runs/stopped")] == [1]
    calm = ["name=calm", "guards.failures_action=stop", "guards.failures_limit=null", "steps=1"]
    succeed(ranks, folder, "train", "recipe.yaml", *calm)


def test_a_mended_grader_grades_again_what_was_deferred(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    shutil.copytree(folder / "runs/on2", tmp_path / "runs/on2")
    shutil.copy(folder / "train.jsonl", tmp_path)
    journal = {path: path.read_bytes() for path in (tmp_path / "runs/on2/episodes").rglob("*.gz")}
    deferred = {(one["id"], step) for step in (1, 2) for one in lines_of(tmp_path / "runs/on2", step, "deferred")}
    assert deferred

    outcome = run(ranks, tmp_path, "env", "regrade", "runs/on2")
    assert outcome.code == 1
    assert "no reward has changed" in outcome.output
    assert f"{len(deferred)} episodes cannot be graded yet; the first error: {GRADER}: RuntimeError" in outcome.output
    (tmp_path / "mended").touch()
    output = succeed(ranks, tmp_path, "env", "regrade", "runs/on2")
    assert "cannot be graded" not in output
    assert "rewards that have changed" in output
    assert "regraded-2.jsonl.gz and 1 more" in output.replace("\n", "")

    assert {path: path.read_bytes() for path in journal} == journal, "the journal stays as it was"
    changed: set[object] = set()
    for step in (1, 2):
        place = tmp_path / f"runs/on2/episodes/step-{step:06d}"
        assert sorted(path.name for path in place.glob("regraded-*")) == [
            "regraded-1.incomplete.jsonl.gz",
            "regraded-2.jsonl.gz",
        ]
        new = list(read_episode_file(place / "regraded-2.jsonl.gz"))
        old = {(one["id"], one["actor"]): one for one in lines_of(tmp_path / "runs/on2", step, "graded")}
        assert len(new) == len(old) == 32
        for one in new:
            before = old[one["id"], one["actor"]]
            assert one["before"] == {"reward": before["reward"], "is_valid": before["is_valid"]}
            assert one["is_changed"] == (one["is_valid"] != before["is_valid"])
            if one["is_changed"]:
                changed.add((one["id"], step))
                assert one["is_valid"]
            else:
                assert one["reward"] == before["reward"]
    assert changed == deferred

    number = next(iter(deferred))[0]
    output = (
        succeed(ranks, tmp_path, "env", "regrade", "runs/on2", "--episode", str(number), "--step", "2")
        if (number, 2) in deferred
        else succeed(ranks, tmp_path, "env", "regrade", "runs/on2", "--episode", str(number))
    )
    assert "regraded-3.incomplete.jsonl.gz" in output.replace("\n", ""), "one episode is not all of a step"


def test_what_waits_for_its_grade_is_kept_until_then(ranks: RankPool, folder: Path, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SETTINGS)
    short = ["run.kept_episodes=1", "guards.failures_limit=null"]
    succeed(ranks, tmp_path, "train", recipe, *short, "steps=3")
    episodes = tmp_path / "runs/tiny/episodes"

    def kept() -> list[int]:
        return [int(path.name.split("-")[1]) for path in sorted(episodes.glob("step-*"))]

    assert kept() == [1, 2, 3]
    (tmp_path / "mended").touch()
    succeed(ranks, tmp_path, "env", "regrade", "runs/tiny", "--step", "2")
    succeed(ranks, tmp_path, "train", recipe, *short, "steps=4")
    assert [step for step in kept() if lines_of(tmp_path / "runs/tiny", step, "played")] == [1, 3, 4]
    assert list((episodes / "step-000002").iterdir()) == [episodes / "step-000002/regraded-1.jsonl.gz"]
    (tmp_path / "mended").unlink()
    changes = ["name=absent", "environment.failures.grader=absent", "steps=3"]
    succeed(ranks, tmp_path, "train", recipe, *short, *changes)
    kept_steps = {file.step for file in episode_files(tmp_path / "runs/absent/episodes")}
    assert kept_steps == {1, 3}
    assert not list((tmp_path / "runs/absent/episodes").rglob("deferred*"))
