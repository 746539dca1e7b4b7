"""Runs whose numbers go bad: the update is skipped, the run rolls back, or it stops, in the same way on every rank."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import pytest
import torch
from rich.console import Console
from tests.distributed.ranks import RankPool
from tests.end_to_end.alone import run_alone
from tests.end_to_end.bad_numbers import GRPO, PPO
from tests.end_to_end.cli import metrics, run
from tests.tiny import tiny_model, write_recipe
from torch import Tensor

from leaderless.data.batch import Batch
from leaderless.observability.console import Display
from leaderless.observability.events import GuardStop
from leaderless.observability.run_directory import RunDirectory
from leaderless.planner import Cluster, make_plan
from leaderless.planner.workflow import load_recipe, resolve_workflow
from leaderless.stages.context import StageContext
from leaderless.worker.build.process import open_worker
from leaderless.worker.rank_info import RankInfo

PROMPTS = 6
BAD_STEP = 3
BAD = f"{PROMPTS * (BAD_STEP - 1)}-{PROMPTS * BAD_STEP - 1}"
"""The prompts of that step, if no step is repeated."""
ONE_BAD = "12-12"
"""One of them, which is on one of two ranks."""
NONE_BAD = "1-0"
POOLS = {"rollout": {"ranks": "0"}, "reward": {"ranks": "0"}, "advantage": {"ranks": "1"}, "policy": {"ranks": "1"}}


@dataclass
class Seen:
    """What one rank saw of a run.

    Attributes:
        steps: Number of each step that was run.
        asked: Prompts of each step.
        weights: Weights of the trained roles on this rank, after each step.
        versions: Policy versions of these roles, after each step.
        numbers: Metrics of each step, on the first rank.
        error: Reason why a guard stopped the run.
    """

    steps: list[int] = field(default_factory=list)
    asked: list[list[int]] = field(default_factory=list)
    weights: list[dict[str, Tensor]] = field(default_factory=list)
    versions: list[dict[str, int]] = field(default_factory=list)
    numbers: list[dict[str, float]] = field(default_factory=list)
    error: str = ""


def train(
    recipe_file: str, overrides: Sequence[str], bad: str, left_out: int = 0, jump: Mapping[int, int] | None = None
) -> Seen:
    """Be one worker of a run.

    Args:
        bad: First and last prompt whose numbers go bad.
        left_out: Step whose policy update is skipped, not by a guard.
        jump: Position in the data at which a step begins, where it is not where the previous step ended.
    """
    os.environ["BAD_PROMPTS"] = bad
    recipe = load_recipe(recipe_file, overrides).recipe
    place = RankInfo.from_environment()
    plan = make_plan(recipe, resolve_workflow(recipe.workflow), Cluster(place.world_size))
    seen = Seen()
    with open_worker(recipe, plan, place, Display(Console(), is_shown=False)) as worker:
        stages, run_step = dict(worker.chain.stages), worker.run_step

        def rollout(batch: Batch, context: StageContext) -> Batch:
            seen.asked[-1] += batch.ids.tolist()
            return stages["rollout"](batch, context)

        def reward(batch: Batch, context: StageContext) -> Batch:
            last = torch.tensor([float(row[-1]) if len(row) else 0.0 for row in batch.jagged("tokens").rows()])
            valid = torch.ones(len(batch), dtype=torch.bool)
            return batch.with_columns(rewards=last % 7, reward_valid=valid, reward_details=tuple({} for _ in valid))

        def update(batch: Batch, context: StageContext) -> Batch:
            return batch if context.step == left_out else stages["policy"](batch, context)

        def watched_step() -> dict[str, float]:
            seen.asked.append([])
            for loader in worker.chain.loaders.values():
                loader.position = (jump or {}).get(worker.progress.step + 1, loader.position)
            seen.numbers.append(run_step())
            seen.steps.append(worker.progress.step)
            trained = worker.parts.roles.trained()
            seen.weights.append({f"{r}.{n}": w.clone() for r, e in trained.items() for n, w in e.full_weights()})
            seen.versions.append({role: engine.policy_version for role, engine in trained.items()})
            return seen.numbers[-1]

        own = {"rollout": rollout, "reward": reward, "policy": update}
        worker.chain.stages = {**stages, **{name: stage for name, stage in own.items() if name in stages}}
        worker.run_step = watched_step
        try:
            worker.run()
        except GuardStop as error:
            seen.error = str(error)
    return seen


@pytest.fixture
def start(ranks: RankPool, tmp_path: Path):
    """Trains in a folder, or continues training."""

    def run(name: str, bad: str, *args: object, world_size: int = 1, base: str = "grpo", **changes: object):
        (tmp_path / "bad.yaml").write_text(PPO if base == "ppo" else GRPO.replace("BASE", base))
        settings = {
            "workflow": str(tmp_path / "bad.yaml"),
            "batch.prompts_per_step": PROMPTS,
            "run.trace_steps": 0,
            "steps": 4,
            **{key.replace("__", "."): value for key, value in changes.items()},
        }
        recipe = write_recipe(tmp_path, tiny_model(num_layers=1), settings)
        return ranks.run(world_size, train, str(recipe), [f"name={name}"], bad, *args, init_group=False)

    return run


@pytest.fixture
def folder(tmp_path: Path):
    return lambda name: RunDirectory(tmp_path / "runs" / name)


def events(directory: RunDirectory) -> list[tuple[object, ...]]:
    return [(event.step, event.guard, event.action, event.node) for _, event in directory.read_events() if event]


def same(some: Mapping[str, Tensor], others: Mapping[str, Tensor], role: str = "") -> bool:
    """Whether all weights of a role are the same to the last bit."""
    assert some.keys() == others.keys()
    names = [name for name in some if name.startswith(role)]
    assert names
    return all(torch.equal(some[name], others[name]) for name in names)


@pytest.mark.parametrize(
    ("world_size", "layout"), [pytest.param(1, {}, marks=pytest.mark.thorough), (2, {}), (2, POOLS)]
)
def test_a_skipped_update_is_as_if_it_had_never_been_asked_for(start, folder, world_size: int, layout: dict) -> None:
    changes = {"layout": layout} if layout else {}
    results = start("skipped", ONE_BAD, world_size=world_size, **changes)
    wanted = start("wanted", NONE_BAD, BAD_STEP, world_size=world_size, **changes)
    for result, expected in zip(results, wanted, strict=True):
        assert result.steps == [1, 2, 3, 4]
        assert result.asked == expected.asked
        assert result.versions == expected.versions
        for weights, others in zip(result.weights, expected.weights, strict=True):
            assert len(weights) == len(others) == 0 or same(weights, others)
    holder = results[-1]
    assert [versions["policy"] for versions in holder.versions] == [1, 2, 2, 3]
    assert same(holder.weights[1], holder.weights[2])
    assert not same(holder.weights[2], holder.weights[3])
    directory = folder("skipped")
    bad = [(3, "non_finite_loss", "skip", "policy"), (3, "non_finite_gradient", "skip", "policy")]
    assert events(directory) == bad
    logged = [line.get("guard/skipped/policy") for line in metrics(directory.path)]
    assert logged == [None, None, 1, 1]


def test_a_run_goes_back_to_the_checkpoint_and_past_what_went_wrong(start, folder) -> None:
    guards = {"non_finite_loss": "roll_back", "non_finite_gradient": "roll_back"}
    changes = {"guards": guards, "checkpoint": {"every_steps": 2, "keep": 9}}
    placed = changes | {"layout": POOLS}
    results = start("back", BAD, world_size=2, **placed)
    wanted = start("wanted", NONE_BAD, 0, {3: 3 * PROMPTS}, world_size=2, **placed)
    result, expected = results[-1], wanted[-1]
    assert result.steps == [1, 2, 3, 3, 4]
    assert same(result.weights[1], result.weights[2]), "the bad step changed nothing"
    assert [v["policy"] for v in result.versions] == [1, 2, 2, 3, 4]
    assert all(same(result.weights[i], expected.weights[i - 1]) for i in (3, 4))
    asked = [sorted(set().union(*(r.asked[i] for r in results))) for i in range(5)]
    assert asked == [list(range(PROMPTS * i, PROMPTS * (i + 1))) for i in range(5)], "each prompt once"
    directory = folder("back")
    assert [event[1:3] for event in events(directory)] == [(guard, "roll_back") for guard in guards]
    lines = metrics(directory.path)
    assert [line["step"] for line in lines] == [1, 2, 3, 4]
    assert [line.get("guard/roll_backs") for line in lines] == [None, None, 1, 1]
    times = [line["time_s"] for line in metrics(directory.path, with_times=True)]
    assert times == sorted(times)
    # A run that was killed before its next checkpoint skips the same prompts, and counts the same.
    shutil.rmtree(directory.checkpoints / "step-000004")
    again = start("back", BAD, world_size=2, **placed)[-1]
    assert again.steps == [3, 4]
    assert same(again.weights[-1], result.weights[-1])
    assert len(events(directory)) == 2
    assert [line.get("guard/roll_backs") for line in metrics(directory.path)] == [None, None, 1, 1]


def test_a_run_stops_where_it_may_not_or_cannot_go_back(start, folder) -> None:
    guards = {"non_finite_gradient": "roll_back", "max_roll_backs": 1}
    changes = {"guards": guards, "checkpoint.every_steps": 2}
    (result,) = start("often", "12-999", **changes)
    assert result.steps == [1, 2, 3, 3]
    assert "step 3, node 'policy' of role 'policy': guards.max_roll_backs=1: 2 is above it" in result.error
    assert events(folder("often"))[-1] == (3, "max_roll_backs", "stop", "policy")
    (result,) = start("nowhere", BAD, guards=guards)
    assert result.steps == [1, 2, 3]
    assert "there is no checkpoint to go back to: set checkpoint.every_steps" in result.error


def test_repeated_nodes_pass_over_what_they_had_left_over(start, folder) -> None:
    changes = {"checkpoint": {"every_steps": 1, "keep": 9}, "algorithm.overlong.buffer_tokens": 0}
    guards = {"non_finite_gradient": "roll_back"}
    # The second step takes the surplus of the first, and goes wrong with it.
    (plain,) = start("plain", NONE_BAD, base="dapo", steps=3, **changes)
    first, last = min(plain.asked[1]), max(plain.asked[1])
    (result,) = start("repeat", f"{first}-{last}", base="dapo", steps=3, guards=guards, **changes)
    assert result.steps == [1, 2, 2, 3]
    assert result.asked[:2] == plain.asked[:2]
    assert min(result.asked[2]) == last + 1
    assert [versions["policy"] for versions in result.versions] == [1, 1, 2, 3]
    assert [event[2] for event in events(folder("repeat"))] == ["skip", "roll_back"]


def test_a_guard_of_the_critic_leaves_the_policy_alone(start, folder) -> None:
    (result,) = start("critic", BAD, base="ppo")
    assert [(v["policy"], v["critic"]) for v in result.versions] == [(1, 1), (2, 2), (3, 2), (4, 3)]
    assert same(result.weights[1], result.weights[2], "critic.")
    assert not same(result.weights[1], result.weights[2], "policy.")
    assert {event[3] for event in events(folder("critic"))} == {"critic"}
    assert result.numbers[-1]["guard/skipped/critic"] == 1
    assert "guard/skipped/policy" not in result.numbers[-1]


def test_a_run_whose_updates_are_all_skipped_ends_with_an_error_and_not_over_a_good_checkpoint(start, folder) -> None:
    """After five in a row, or all that a shorter run has; what was saved before the first of them is what stays."""
    saved = {"checkpoint": {"every_steps": 1, "keep": 1}}
    (result,) = start("always", f"{2 * PROMPTS}-999", steps=9, **saved)
    assert result.steps == [1, 2, 3, 4, 5, 6, 7]
    assert "step 7, node 'policy' of role 'policy': guards.max_skips=4: 5 is above it; the run stops" in result.error
    assert "lower the learning rate" in result.error
    assert [path.name for path in folder("always").checkpoints.iterdir()] == ["step-000002"]
    (result,) = start("short", "0-999", steps=3, **saved)
    assert result.steps == [1, 2, 3]
    assert "guards.max_skips=4: all 3 updates of the run were left out; the run stops" in result.error
    assert not folder("short").checkpoints.exists()
    (result,) = start("late", f"{2 * PROMPTS}-999", steps=4, **saved)
    assert not result.error, "an end among a few bad updates is none"
    assert sorted(path.name for path in folder("late").checkpoints.iterdir()) == ["step-000002", "step-000004"]


def test_updates_of_low_entropy_are_skipped_until_it_is_too_often(start, folder) -> None:
    guards = {"entropy_limit": 100.0, "entropy_action": "skip", "max_skips": 1}
    (result,) = start("low", NONE_BAD, guards=guards)
    assert same(result.weights[0], result.weights[1])
    assert result.steps == [1, 2]
    assert "guards.max_skips=1: 2 is above it; the run stops: what makes updates bad does not pass" in result.error
    (result,) = start("warned", NONE_BAD, guards={"entropy_limit": 100.0}, steps=2)
    assert not same(result.weights[0], result.weights[1])
    assert events(folder("warned")) == [(step, "entropy_limit", "warn", "policy") for step in (1, 2)]
    (result,) = start("fine", NONE_BAD, guards={"entropy_limit": 1e-9}, steps=1)
    assert events(folder("fine")) == []
    result, _ = start("two", NONE_BAD, guards={"entropy_limit": 100.0}, steps=1, world_size=2)
    found = [event.value for _, event in folder("two").read_events() if event]
    assert found == [pytest.approx(result.numbers[0]["policy/entropy"])], "the mean over both ranks"


def test_a_run_that_a_guard_stops_says_why_keeps_its_checkpoint_and_goes_on_when_asked_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BAD_PROMPTS", BAD)
    (tmp_path / "bad.yaml").write_text(GRPO.replace("BASE", "grpo"))
    settings = {"workflow": "bad.yaml", "guards.non_finite_gradient": "stop", "checkpoint.every_steps": 1, "steps": 3}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), settings)
    outcome = run_alone(tmp_path, "train", recipe)
    assert outcome.code == 1
    said = "step 3, node 'policy' of role 'policy': guards.non_finite_gradient: the value is nan; the run stops"
    assert f"error GuardStop: {said}: lower the learning rate" in outcome.errors
    assert "Traceback" not in outcome.errors
    assert f"guard {said}" in outcome.output
    run = tmp_path / "runs/tiny"
    assert sorted(path.name for path in (run / "checkpoints").iterdir()) == ["step-000001", "step-000002"][-2:]
    report = (run / "report.html").read_text()
    assert "Guards have acted: 1 skipped update, 1 stop." in report
    outcome = run_alone(tmp_path, "train", recipe, "guards.non_finite_gradient=skip")
    assert outcome.code == 0, outcome
    assert [line["step"] for line in metrics(run)] == [1, 2, 3]
    assert [event[2] for event in events(RunDirectory(run))] == ["stop", "skip", "skip"]


@pytest.mark.parametrize(
    ("action", "limit", "code", "recorded"),
    [("stop", 0.5, 1, 1), ("warn", 0.5, 0, 2), ("roll_back", 0.9, 1, 2)],
)
def test_failed_rewards_above_a_share_are_acted_on(
    tmp_path: Path, action: str, limit: float, code: int, recorded: int
) -> None:
    guards = {"reward_failures_action": action, "reward_failures_limit": limit}
    reward = {"tests.end_to_end.own_code:always_fail": 1.0}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), {"reward": reward, "guards": guards})
    outcome = run_alone(tmp_path, "train", recipe)
    assert outcome.code == code, outcome
    found = events(RunDirectory(tmp_path / "runs/tiny"))
    assert found[0] == (1, "reward_failures_limit", action, "reward")
    assert len(found) == recorded, "to go back without a checkpoint is to stop"
    assert ("guards.reward_failures_limit=" in outcome.errors) == (code == 1)
    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert all(line["reward/failed_share"] == 1 for line in lines)


def test_a_reward_that_always_fails_is_named_before_the_first_step_and_stops_all_ranks_together(
    ranks: RankPool, tmp_path: Path
) -> None:
    name = "tests.end_to_end.own_reward:broken"
    changes = {"reward": {name: 1.0}, "steps": 3, "batch.prompts_per_step": 8, "batch.responses_per_prompt": 4}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), changes)
    outcome = run(ranks, tmp_path, "train", recipe, num_ranks=2)  # all ranks have the same exit code
    assert outcome.code == 1
    assert f"reward {name} cannot grade the expected response to a row of data.train: LookupError" in outcome.output
    assert f"reward {name} failed: LookupError: no such server" in outcome.output
    assert f"reward {name} has failed 8 times in a row: it grades no more responses of this step" in outcome.output
    assert "guards.reward_failures_limit=0.5: 1 is above it; the run stops" in outcome.errors
    assert f"raise its timeout_s or the limit (the first was {name}: LookupError: no such server" in outcome.errors
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [1]


def test_a_reward_that_hangs_each_time_holds_no_run(tmp_path: Path) -> None:
    reward = {"tests.end_to_end.own_reward:asleep": {"timeout_s": 0.2}}
    changes = {"reward": reward, "steps": 3, "batch.prompts_per_step": 16, "run.reward_processes": 1}
    outcome = run_alone(tmp_path, "train", write_recipe(tmp_path, tiny_model(num_layers=1), changes))
    assert outcome.code == 1
    assert "TimeoutError: took longer than 0.2 s" in outcome.errors
    (line,) = metrics(tmp_path / "runs/tiny")
    assert line["reward/failed"] == 64
