"""Runs whose policy moves a body: they learn, do not depend on ranks, and continue after a kill."""

from __future__ import annotations

import json
import re
import shutil
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, run, succeed
from tests.small_bodies import body_recipe, settings_of
from tests.small_vla import write_small_pi05, write_small_vla

from leaderless.embodied.data.lerobot import Demonstrations
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner.workflow.builtin_stages import BODY_METRICS

BY_STEP: dict[str, object] = {
    "workflow": "ppo",
    "algorithm": {"advantage": {"type": "body_gae", "reward": "action"}},
    "models": {"critic": {"body": {"type": "mlp", "options": {"chunk": 2, "per_step": True}}}},
}
"""PPO with an advantage for each step of a decision."""
UNSTEADY = ("time", "seconds/", "sent/", "throughput/", "memory/", "body/steps_per_s", "data/wait")


def numbers(folder: Path, name: str = "line") -> list[dict[str, float]]:
    rows = RunDirectory(folder / "runs" / name).read_metrics()
    return [{key: value for key, value in row.items() if not key.startswith(UNSTEADY)} for row in rows]


def test_a_policy_learns_and_the_report_shows_its_episodes(ranks: RankPool, tmp_path: Path) -> None:
    changes = {"evaluation.every_steps": 25, "batch.responses_per_prompt": 8, "rollout.temperature": 0.8}
    body_recipe(tmp_path, steps=25, **changes)  # type: ignore[arg-type]
    succeed(ranks, tmp_path, "train", "recipe.yaml")
    first, *_, last = [row["evaluation/mean@1"] for row in numbers(tmp_path) if "evaluation/mean@1" in row]
    assert first < 0.7
    assert last > 0.8
    assert all(row["mismatch/abs_max"] < 1e-5 for row in numbers(tmp_path) if "mismatch/abs_max" in row)
    reported = {name for row in numbers(tmp_path) for name in row if name.startswith("body/")}
    assert reported | {"body/steps_per_s"} == {f"body/{name}" for name in BODY_METRICS}
    refused = run(ranks, tmp_path, "serve", "runs/line")
    assert refused.code == 2
    assert "moves a body, and writes no text" in " ".join(refused.errors.split())
    page = (tmp_path / "runs/line/report.html").read_text()
    assert "data:image/png;base64," in page
    assert "go to the middle" in page
    assert re.search(r"done after \d decisions", page)


def test_ranks_change_no_number_and_a_stopped_run_continues_as_if_it_had_not_been(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "one").mkdir()
    (tmp_path / "two").mkdir()
    (tmp_path / "stopped").mkdir()
    ppo = {
        "workflow": "ppo",
        "algorithm": {"advantage": {"type": "body_gae"}},
        "models": {role: {"body": {"type": "mlp", "options": {"normalize": True}}} for role in ("policy", "critic")},
        "batch": {"updates_per_step": 4, "epochs_per_step": 2},
        "evaluation.every_steps": 2,
        "checkpoint": {"every_steps": 2},
    }
    for name in ("one", "two", "stopped"):
        body_recipe(tmp_path / name, **ppo)  # type: ignore[arg-type]
    succeed(ranks, tmp_path / "one", "train", "recipe.yaml")
    expected = numbers(tmp_path / "one")
    succeed(ranks, tmp_path / "two", "train", "recipe.yaml", num_ranks=2)
    for row, other in zip(numbers(tmp_path / "two"), expected, strict=True):
        assert row.keys() == other.keys()
        assert row == pytest.approx(other, abs=2e-5)
    succeed(ranks, tmp_path / "stopped", "train", "recipe.yaml", "steps=2")
    succeed(ranks, tmp_path / "stopped", "train", "recipe.yaml")
    assert numbers(tmp_path / "stopped") == expected


def test_advantages_of_steps_train_a_policy_and_a_critic(ranks: RankPool, tmp_path: Path) -> None:
    body_recipe(tmp_path, steps=2, **BY_STEP)  # type: ignore[arg-type]
    succeed(ranks, tmp_path, "train", "recipe.yaml")
    for row in numbers(tmp_path):
        assert row["policy/grad_norm"] > 0
        assert row["critic/grad_norm"] > 0


def test_a_saved_policy_does_not_need_the_checkpoint_that_it_began_with(ranks: RankPool, tmp_path: Path) -> None:
    checkpoint = write_small_pi05(tmp_path / "published", state_size=2, dim=1)
    policy = {"type": "pi05", "options": {"path": str(checkpoint), "chunk": 2}}
    small = {"batch": {"prompts_per_step": 2, "responses_per_prompt": 2, "micro_batch_tokens": 64}}
    body_recipe(tmp_path, steps=1, **{"models.policy.body": policy, "data.evaluation": None, **small})  # type: ignore[arg-type]
    succeed(ranks, tmp_path, "train", "recipe.yaml")
    shutil.rmtree(checkpoint)
    succeed(ranks, tmp_path, "export", "runs/line", "exported")
    changes = ("models.policy=exported", "name=again")
    succeed(ranks, tmp_path, "train", "recipe.yaml", *changes)
    assert (tmp_path / "runs/again/checkpoints/step-000001/policy/base/tokenizer.json").exists()
    assert numbers(tmp_path, "again")[0]["mismatch/abs_max"] < 1e-4


def test_demonstrations_are_imitated_exported_and_evaluated(ranks: RankPool, tmp_path: Path) -> None:
    body_recipe(tmp_path, workflow="imitation", steps=40)
    assert "5 demonstrations" in succeed(ranks, tmp_path, "demonstrate", "recipe.yaml", "more", "--episodes", 5)
    succeed(ranks, tmp_path, "train", "recipe.yaml")
    succeed(ranks, tmp_path, "export", "runs/line", "exported")
    printed = succeed(ranks, tmp_path, "eval", "recipe.yaml", "models.policy=exported", "workflow=grpo")
    assert len(Demonstrations(tmp_path / "more")) == 5
    accuracy = re.search(r"mean@1\s*.\s*(\d\.\d+)", printed)
    assert accuracy is not None, printed
    assert float(accuracy[1]) > 0.8
    about = json.loads((tmp_path / "exported/config.json").read_text())
    assert (about["model_type"], about["spaces"]["state_size"]) == ("leaderless_body", 2)


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {**BY_STEP, "body.log_prob": "chunk"},
            "algorithm.advantage.reward: is action, but with body.log_prob=chunk all steps",
        ),
        ({**BY_STEP, "models": {"critic": {"body": "mlp"}}}, "set its option per_step to true"),
        ({"body.type": "tables"}, "unknown environment 'tables' (did you mean 'table'?)"),
        ({"body.max_steps": 5}, "episodes of 'tests.small_worlds:Line' have up to 6 steps: raise it"),
        ({"body.options": {"fault": 1}}, "does not take them"),
        ({"batch.micro_batch_tokens": 4}, "an episode may have 6 steps (body.max_steps), which are not divided"),
        ({"batch": {"updates_per_step": 3, "epochs_per_step": 2}}, "updates_per_step=3 is no multiple of"),
        ({"batch": {"updates_per_step": 10, "epochs_per_step": 2}}, "is 10 in 2 epochs, more than the 4 prompts"),
        (
            {
                "models": {
                    "policy": {"body": {"type": "mlp", "options": {"normalize": True}}, "compute_dtype": "bfloat16"}
                }
            },
            "with normalize: true, set it to float32",
        ),
        ({"environment": {"type": "calculator"}}, "environment cannot be combined with `body`"),
        ({"models": {"policy": {"body": "film", "lora": {}}}}, "has no adapters"),
    ],
    ids=str,
)
def test_what_cannot_work_is_refused_before_the_run(
    ranks: RankPool, tmp_path: Path, changes: dict[str, object], message: str
) -> None:
    (tmp_path / "recipe.yaml").write_text(json.dumps(settings_of(tmp_path, **changes)))  # type: ignore[arg-type]
    outcome = run(ranks, tmp_path, "train", "recipe.yaml")
    assert outcome.code == 2, outcome.errors
    assert message in " ".join(outcome.errors.split())


def test_episodes_that_fail_are_left_out_and_counted(ranks: RankPool, tmp_path: Path) -> None:
    body_recipe(tmp_path, steps=3, **{"body.options": {"fails_at": 1.5}})
    succeed(ranks, tmp_path, "train", "recipe.yaml")
    rows = numbers(tmp_path)
    assert any(0 < row["body/failed"] < 1 for row in rows)
    assert all(row["reward/failed"] == pytest.approx(16 * row["body/failed"]) for row in rows)


BROKEN = {"type": "tests.small_worlds:Broken", "num_environments": 8, "max_steps": 6}
NOT_STOPPED = {"guards": {"reward_failures_limit": None}}


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_run_ends_with_the_reason_if_all_episodes_fail(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    body_recipe(tmp_path, steps=3, body={**BROKEN, "options": {"ranks": [0, 1]}})
    outcome = run(ranks, tmp_path, "train", "recipe.yaml", num_ranks=num_ranks)
    said = " ".join(outcome.errors.split())
    assert "guards.reward_failures_limit=0.5: 1 is above it; the run stops" in said
    assert "RuntimeError: the arm has no power" in said


@pytest.mark.parametrize("workflow", ["grpo", "ppo"])
def test_ranks_whose_episodes_all_fail_train_with_those_of_others(
    ranks: RankPool, tmp_path: Path, workflow: str
) -> None:
    broken: dict[str, object] = {"workflow": workflow, "steps": 2, **NOT_STOPPED}
    for name, where, num_ranks in (("all", [0], 1), ("one", [1], 2)):
        (tmp_path / name).mkdir()
        body_recipe(tmp_path / name, **{**broken, "body": {**BROKEN, "options": {"ranks": where}}})  # type: ignore[arg-type]
        succeed(ranks, tmp_path / name, "train", "recipe.yaml", num_ranks=num_ranks)
    for row in numbers(tmp_path / "all"):
        assert (row["body/failed"], row["policy/grad_norm"]) == (1.0, 0.0)
    for row in numbers(tmp_path / "one"):
        assert row["body/failed"] == 0.5
    assert any(row["policy/grad_norm"] > 0 for row in numbers(tmp_path / "one"))


def test_a_run_leaves_episodes_out_whose_numbers_are_not_finite(ranks: RankPool, tmp_path: Path) -> None:
    body = {"type": "tests.small_worlds:Wrong", "options": {"fault": "nan later", "beyond": 1.5}}
    body_recipe(tmp_path, steps=3, body=body)
    succeed(ranks, tmp_path, "train", "recipe.yaml")
    rows = numbers(tmp_path)
    assert any(0 < row["body/failed"] < 1 for row in rows)
    assert all(row["policy/grad_norm"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("fault", "message"),
    [("gray", "camera 'top' is uint8"), ("start", "episodes of a group do not begin alike: with the task")],
)
def test_a_run_ends_where_its_environment_is_not_as_declared(
    ranks: RankPool, tmp_path: Path, fault: str, message: str
) -> None:
    body_recipe(tmp_path, steps=2, body={"type": "tests.small_worlds:Wrong", "options": {"fault": fault}})
    outcome = run(ranks, tmp_path, "train", "recipe.yaml", num_ranks=2)
    assert outcome.code == 2, outcome.errors
    assert message in " ".join(outcome.errors.split())


def test_a_small_openvla_oft_is_trained_with_the_settings_for_libero(ranks: RankPool, tmp_path: Path) -> None:
    folder, options = write_small_vla(tmp_path / "vla"), {"statistics": "other_arm", "chunk": 2, "cameras": ["top"]}
    tasks = ROOT / "recipes/robots"
    small = {
        "models.policy.body.options": {"path": str(folder), **options},
        "models.policy.compute_dtype": "float32",
        "body": {"type": "tests.small_worlds:Line", "num_environments": 8, "processes": 2, "max_steps": 6},
        "data.train.path": str(tasks / "tasks.jsonl"),
        "data.evaluation.path": str(tasks / "held_out.jsonl"),
        "batch.prompts_per_step": 4,
        "batch.micro_batch_tokens": 4,
        "optimizer.learning_rate": 0.01,
        "evaluation.every_steps": 2,
        "run.directory": str(tmp_path / "runs"),
        "steps": 2,
    }
    changes = [f"{key}={json.dumps(value)}" for key, value in small.items()]
    succeed(ranks, tmp_path, "train", ROOT / "recipes/robots/libero.yaml", *changes)
    rows = numbers(tmp_path, "libero")
    assert all(row["mismatch/abs_max"] < 1e-4 for row in rows if row["step"])
    assert all(row["policy/grad_norm"] > 0 for row in rows if row["step"])
    assert all(row["group/no_signal"] < 1 for row in rows if row["step"])
    assert [row["step"] for row in rows if "evaluation/mean@1" in row] == [0, 2]
