"""A run continues by itself when workers are killed or hang and when machines are lost and come back."""

from __future__ import annotations

import json
import signal
import socket
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

import psutil
import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, metrics, start, succeed
from tests.end_to_end.failing import WORKFLOW
from tests.tiny import tiny_model, write_recipe

STEPS = 3
END_S = 60.0
SETTINGS = {
    "workflow": "failing.yaml",
    "reward": {"tests.end_to_end.failing:leave_behind": 1.0},
    "checkpoint.every_steps": 1,
    "run.reward_processes": 1,
    "steps": STEPS,
}
NO_REWARD_PROCESS = ("run.reward_processes=0", "reward={exact_match: 1.0}")
"""Settings with which a worker starts no other process."""


@pytest.fixture
def recipe(tmp_path: Path) -> Path:
    (tmp_path / "failing.yaml").write_text(WORKFLOW)
    return write_recipe(tmp_path, tiny_model(num_layers=1), SETTINGS)


def disturb(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, failures: str) -> None:
    """Let workers of later processes fail, and make their temporary files easy to find."""
    for name in ("once", "temporary"):
        (tmp_path / name).mkdir()
    monkeypatch.setenv("FAIL", failures)
    monkeypatch.setenv("FAIL_ONCE", str(tmp_path / "once"))
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))


class Family:
    """All processes that have ever been seen among the descendants of some."""

    def __init__(self, *processes: subprocess.Popen[str]) -> None:
        self.processes = [psutil.Process(process.pid) for process in processes]
        self.seen: set[psutil.Process] = set()
        self.names: set[str] = set()

    def look(self) -> None:
        for process in self.processes:
            if process.is_running():
                for child in process.children(recursive=True):
                    self.seen.add(child)
                    with suppress(psutil.NoSuchProcess):
                        self.names.add(" ".join(child.cmdline()))

    def wait_until(self, condition: Callable[[], object], seconds: float = 600.0) -> None:
        end = time.monotonic() + seconds
        while not condition():
            assert time.monotonic() < end
            self.look()
            time.sleep(0.2)

    def left(self) -> list[str]:
        """Processes that are still running; they are ended."""
        _, alive = psutil.wait_procs(self.seen, timeout=END_S)
        names = [" ".join(process.cmdline()) or process.name() for process in alive]
        for process in alive:
            process.kill()
        return names


def events(folder: Path, kind: str) -> list[dict[str, object]]:
    lines = (folder / "events.jsonl").read_text().splitlines()
    return [event for event in map(json.loads, lines) if event["event"] == kind]


def test_a_run_whose_ranks_are_killed_and_hang_is_the_undisturbed_run(
    ranks: RankPool, tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "")
    succeed(ranks, tmp_path, "train", recipe, "name=calm", num_ranks=2)
    disturb(tmp_path, monkeypatch, "killed@0@2 hang@1@3")
    # Wait, since a kill might come before a checkpoint that is still being written.
    settings = ("checkpoint.asynchronous=false", "run.stall_timeout_s=8")
    process = start(tmp_path, "leaderless", "train", recipe, "--workers", 2, *settings)
    family = Family(process)
    family.wait_until(lambda: process.poll() is not None)
    outcome = finish(process)
    assert outcome.code == 0, outcome
    assert outcome.errors == ""
    run = tmp_path / "runs/tiny"
    assert metrics(run) == metrics(tmp_path / "runs/calm"), "to the last bit"

    restarts = events(run, "restart")
    assert [(event["rank"], event["from_step"], event["lost_steps"]) for event in restarts] == [(0, 1, 0), (1, 2, 0)]
    assert [event["from_step"] for event in events(run, "resumed")] == [1, 2]
    assert "rank 0 was ended by SIGKILL" in outcome.output
    assert outcome.output.count("(restart 1 of 3)") == 2, "progress gives restarts back"
    (stall,) = events(run, "stall")
    hung = "in fail, in user function tests.end_to_end.failing:hang, at step 3"
    assert (stall["rank"], stall["step"]) == (1, 3)
    assert str(stall["cause"]).endswith(hung)
    assert hung in outcome.output
    assert "in hang" in (run / "errors/stacks-rank-1.txt").read_text()
    assert "in all_reduce" in (run / "errors/stacks-rank-0.txt").read_text()

    assert family.left() == []
    assert any("sleep 600" in name for name in family.names), "and what a reward has left behind is ended"
    assert list((tmp_path / "temporary").iterdir()) == []


def test_a_step_that_is_not_finished_in_time_is_abandoned(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    disturb(tmp_path, monkeypatch, "hang@0@2")
    process = start(tmp_path, "leaderless", "train", recipe, "run.grace_s=1", *NO_REWARD_PROCESS)
    family = Family(process)
    family.wait_until((tmp_path / "once/hang@0@2").exists)
    process.send_signal(signal.SIGUSR1)
    begin = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - begin < END_S
    assert outcome.code == 128 + signal.SIGUSR1, outcome
    said = "step 2 is abandoned after run.grace_s=1 s; the same command continues from step 1"
    assert said in outcome.output
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [1]
    assert family.left() == []


def wait_for_store(port: int) -> None:
    """The launcher that starts first has the store, and must stay."""
    end = time.monotonic() + 100
    while time.monotonic() < end:
        with suppress(ConnectionRefusedError), socket.create_connection(("127.0.0.1", port)):
            return
        time.sleep(0.2)
    pytest.fail(f"nobody listens on port {port}")


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def test_machines_that_are_lost_and_come_back(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launchers of one worker each stand for two machines."""
    disturb(tmp_path, monkeypatch, "")
    monkeypatch.setenv("PACE_S", "0.2")
    port = free_port()
    command = ["leaderless", "train", recipe, "--workers", 1, "--nodes", "1:2", "steps=100000"]
    command += ["--rendezvous", f"127.0.0.1:{port}", "run.grace_s=30", *NO_REWARD_PROCESS]
    run = tmp_path / "runs/tiny"

    def plan_size() -> int:
        return int(json.loads((run / "plan.json").read_text())["world_size"]) if (run / "plan.json").exists() else 0

    def steps_beyond(step: int) -> bool:
        return bool((run / "metrics.jsonl").exists() and metrics(run) and metrics(run)[-1]["step"] > step)

    staying = start(tmp_path, *command)
    wait_for_store(port)
    lost = start(tmp_path, *command)
    family = Family(staying, lost)
    family.wait_until(lambda: plan_size() == 2 and steps_beyond(1))
    processes = [psutil.Process(lost.pid), *psutil.Process(lost.pid).children(recursive=True)]
    for process in processes:
        process.kill()
    lost.communicate()
    family.wait_until(lambda: plan_size() == 1)
    reached = int(metrics(run)[-1]["step"])
    family.wait_until(lambda: steps_beyond(reached))
    (restart,) = events(run, "restart")
    # A checkpoint is waited for before the next is written: one may be unfinished, another not yet begun.
    assert restart["lost_steps"] in {0, 1, 2}

    back = start(tmp_path, *command)
    family.processes.append(psutil.Process(back.pid))
    family.wait_until(lambda: plan_size() == 2)
    reached = int(metrics(run)[-1]["step"])
    family.wait_until(lambda: steps_beyond(reached))
    assert len(events(run, "restart")) == 1, "to make room for another machine is no failure"

    for process in (staying, back):
        process.send_signal(signal.SIGTERM)
    for outcome in (finish(staying), finish(back)):
        assert outcome.code == 128 + signal.SIGTERM, outcome
    assert [line["step"] for line in metrics(run)] == list(range(1, len(metrics(run)) + 1))
    newest = sorted((run / "checkpoints").glob("step-*"))[-1]
    assert newest.name == f"step-{len(metrics(run)):06d}"
    assert family.left() == []
    assert len(list((tmp_path / "temporary").iterdir())) <= 2, "only those of the machine that was lost at one blow"
