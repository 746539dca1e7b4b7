"""A run that is ended within a step continues from the border before it, and Ctrl-C leaves a step its time."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import psutil
import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, metrics, start, succeed
from tests.end_to_end.failing import WORKFLOW
from tests.end_to_end.test_restarts import END_S, NO_REWARD_PROCESS, Family, disturb, events
from tests.tiny import tiny_model, write_recipe

STEPS = 4
APART = {"rollout": {"ranks": "0"}, "reward": {"ranks": "0"}, "fail": {"ranks": "1"}, "policy": {"ranks": "1"}}
AHEAD = {"rollout": {"capacity": 1}}
CONTINUOUS = {"rollout": {"capacity": 1, "mode": "continuous"}}


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "failing.yaml").write_text(WORKFLOW)
    settings = {"workflow": "failing.yaml", "run.reward_processes": 0, "run.status_every_s": 0.2, "steps": STEPS}
    return write_recipe(tmp_path, tiny_model(num_layers=1), settings)


def saved(run: Path) -> list[str]:
    """What is in the folder of a run's checkpoints, unfinished ones included."""
    folder = run / "checkpoints"
    return sorted(path.name for path in folder.iterdir()) if folder.exists() else []


@pytest.mark.parametrize(
    ("layout", "channels"),
    [({}, {}), (APART, {}), (APART, AHEAD), (APART, CONTINUOUS)],
    ids=["one pool", "two pools", "a loop ahead", "continuous generation"],
)
def test_a_preempted_run_continues_from_the_border_before_its_step(
    ranks: RankPool, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, layout: dict, channels: dict
) -> None:
    """Rank 1 hangs before the update, and no checkpoint was due before."""
    changes = [f"layout={layout}", f"channels={channels}"]
    if channels != CONTINUOUS:
        monkeypatch.setenv("FAIL", "")
        succeed(ranks, tmp_path, "train", recipe, "name=calm", *changes, num_ranks=2)
    disturb(tmp_path, monkeypatch, "hang@1@3")
    command = ["leaderless", "train", recipe, "--workers", 2, *changes]
    process = start(tmp_path, *command, "run.grace_s=8")
    family, run = Family(process), tmp_path / "runs/tiny"
    family.wait_until((tmp_path / "once/hang@1@3").exists)
    process.send_signal(signal.SIGUSR1)
    outcome = finish(process)
    assert outcome.code == 128 + signal.SIGUSR1, outcome
    assert "if it takes longer than run.grace_s=8 s, the state before it is what remains" in outcome.output
    assert "the state after step 2 is saved, in case the next one is not finished" in outcome.output
    assert "step 3 is abandoned after run.grace_s=8 s; the same command continues from step 2" in outcome.output
    assert saved(run) == ["step-000002"]
    assert family.left() == []
    outcome = finish(start(tmp_path, *command))
    assert outcome.code == 0, outcome
    assert [line["step"] for line in metrics(run)] == list(range(1, STEPS + 1))
    if channels != CONTINUOUS:
        assert metrics(run) == metrics(tmp_path / "runs/calm"), "to the last bit"
    assert not [name for name in saved(run) if name.startswith(".")]


def test_one_rank_that_is_preempted_is_enough(
    ranks: RankPool, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As on one of several machines: the others see it in the folder of the run, and continue without it."""
    monkeypatch.setenv("FAIL", "")
    succeed(ranks, tmp_path, "train", recipe, "name=calm", num_ranks=2)
    disturb(tmp_path, monkeypatch, "hang@0@3")
    process = start(tmp_path, "leaderless", "train", recipe, "--workers", 2, "run.grace_s=8")
    family = Family(process)
    family.wait_until((tmp_path / "once/hang@0@3").exists)
    children = psutil.Process(process.pid).children()
    (second,) = (one for one in children if any(file.path.endswith("rank-1.log") for file in one.open_files()))
    second.send_signal(signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code == 0, outcome
    run = tmp_path / "runs/tiny"
    (restart,) = events(run, "restart")
    assert (restart["rank"], restart["from_step"], restart["lost_steps"]) == (1, 2, 0)
    assert metrics(run) == metrics(tmp_path / "runs/calm"), "to the last bit"
    assert saved(run) == ["step-000002", "step-000004"]
    assert family.left() == []


def test_a_step_that_ends_in_time_takes_the_place_of_the_border_before_it(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(tmp_path, monkeypatch, "pause@0@3")
    process = start(tmp_path, "leaderless", "train", recipe, "--workers", 2, "checkpoint.keep=9")
    run = tmp_path / "runs/tiny"
    Family(process).wait_until((tmp_path / "once/pause@0@3").exists)
    process.send_signal(signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code == 128 + signal.SIGTERM, outcome
    assert "stopped after step 3" in outcome.output
    assert saved(run) == ["step-000002", "step-000003"]


def test_ctrl_c_leaves_a_step_its_time(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    disturb(tmp_path, monkeypatch, "pause@0@2")
    process = start(tmp_path, "leaderless", "train", recipe, "--workers", 2, "run.grace_s=0.5")
    run = tmp_path / "runs/tiny"
    Family(process).wait_until((tmp_path / "once/pause@0@2").exists)
    process.send_signal(signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert "stopping after this step, with a checkpoint; press Ctrl-C again to stop at once" in outcome.output
    assert "stopped after step 2" in outcome.output
    assert saved(run) == ["step-000002"]


@pytest.mark.parametrize("then", [signal.SIGINT, signal.SIGTERM])
def test_what_follows_ctrl_c_ends_a_step_that_hangs(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, then: signal.Signals
) -> None:
    """A second Ctrl-C at once, and another signal within its time, which begins with it."""
    disturb(tmp_path, monkeypatch, "hang@0@2")
    process = start(tmp_path, "leaderless", "train", recipe, *NO_REWARD_PROCESS, "run.grace_s=6")
    family = Family(process)
    family.wait_until((tmp_path / "once/hang@0@2").exists)
    process.send_signal(signal.SIGINT)
    time.sleep(1)
    process.send_signal(then)
    begin = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - begin < END_S
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert saved(tmp_path / "runs/tiny") == (["step-000001"] if then == signal.SIGTERM else [])
    assert family.left() == []
