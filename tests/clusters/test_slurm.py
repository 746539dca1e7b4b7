"""Written jobs in a real Slurm on this machine: a time limit, a preemption, and a job that is canceled."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
from tests.clusters import slurm
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import ROOT, succeed
from tests.tiny import tiny_model, write_recipe

pytestmark = pytest.mark.skipif(bool(slurm.missing()), reason=slurm.missing())

REWARD = """
import pathlib, time

def grade(sample):
    if not pathlib.Path("fast").exists():
        time.sleep(0.2)
    return float(len(sample.response))
"""
STEPS = 120


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, str]]:
    with slurm.cluster(tmp_path_factory.mktemp("slurm")) as found:
        yield found


@pytest.fixture
def submit(ranks: RankPool, tmp_path: Path, environment: dict[str, str]) -> Iterator[Callable[..., str]]:
    """Writes a job, submits it, and returns its number; what is left of it is canceled."""
    (tmp_path / "slow.py").write_text(REWARD)
    program = tmp_path / "leaderless"
    program.write_text(f'#!/bin/sh\nexec {sys.executable} -m leaderless "$@"\n')
    program.chmod(0o755)
    settings = {"reward": {"slow:grade": 1.0}, "steps": STEPS, "run.reward_processes": 1, "run.grace_s": 20}
    settings |= {"batch.prompts_per_step": 2, "batch.responses_per_prompt": 4, "run.max_restarts": 0}
    recipe = write_recipe(tmp_path, tiny_model(), settings)
    path = f"export PATH={tmp_path}:$PATH PYTHONPATH={ROOT / 'src'}:{ROOT}:{tmp_path}"

    def make(*options: str) -> str:
        given = [
            word
            for option in ("gpus_per_node=0", f"setup=[{json.dumps(path)}]", *options)
            for word in ("--option", option)
        ]
        succeed(ranks, tmp_path, "submit", recipe.name, "--to", "slurm", "--workers", 1, *given)
        done = slurm.call(
            environment, "sbatch", "--parsable", f"--chdir={tmp_path}", str(tmp_path / "tiny.slurm.sbatch")
        )
        return done.strip()

    yield make
    slurm.call(environment, "scancel", "--user=root")


def wait_for(what: Callable[[], bool], folder: Path, seconds: float = 900) -> None:
    end = time.monotonic() + seconds
    while not what():
        logs = [path.read_text() for path in folder.glob("tiny-*.log")]
        assert time.monotonic() < end, logs
        time.sleep(0.5)


def state(environment: dict[str, str], job: str) -> dict[str, str]:
    words = slurm.call(environment, "scontrol", "show", "job", job).split()
    return dict(word.split("=", 1) for word in words if "=" in word)


def steps(folder: Path) -> list[int]:
    log = folder / "runs/tiny/metrics.jsonl"
    return [json.loads(line)["step"] for line in log.read_text().splitlines()] if log.exists() else []


def test_before_the_time_limit_a_run_saves_its_step_and_continues_in_the_next_start(
    submit: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit("time=3", "warn_s=30")
    wait_for(lambda: int(state(environment, job)["Restarts"]) > 0, tmp_path)
    stopped_after = steps(tmp_path)[-1]
    assert stopped_after < STEPS, "it would have taken longer"
    (tmp_path / "fast").touch()
    wait_for(lambda: state(environment, job)["JobState"] in {"COMPLETED", "FAILED", "TIMEOUT"}, tmp_path)
    found = state(environment, job)
    log = (tmp_path / f"tiny-{job}.log").read_text()
    assert found["JobState"] == "COMPLETED", log
    assert steps(tmp_path) == list(range(1, STEPS + 1)), "no step is lost, and none is done twice"


def test_a_preempted_run_saves_its_step_and_continues_when_there_is_room(
    submit: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit("time=30", "partition=low")
    wait_for(lambda: len(steps(tmp_path)) > 3, tmp_path)
    other = slurm.call(
        environment, "sbatch", "--parsable", "-p", "high", "-n2", "-o/dev/null", "--wrap", "sleep 3"
    ).strip()
    wait_for(lambda: state(environment, other)["JobState"] == "COMPLETED", tmp_path)
    assert len(steps(tmp_path)) < STEPS
    (tmp_path / "fast").touch()
    wait_for(lambda: state(environment, job)["JobState"] in {"COMPLETED", "FAILED", "CANCELLED"}, tmp_path)
    assert state(environment, job)["JobState"] == "COMPLETED", (tmp_path / f"tiny-{job}.log").read_text()
    assert steps(tmp_path) == list(range(1, STEPS + 1))


def test_a_canceled_run_does_not_come_back(
    submit: Callable[..., str], environment: dict[str, str], tmp_path: Path
) -> None:
    job = submit("time=30")
    wait_for(lambda: len(steps(tmp_path)) > 3, tmp_path)
    slurm.call(environment, "scancel", job)
    wait_for(lambda: state(environment, job)["JobState"] == "CANCELLED", tmp_path)
    time.sleep(5)
    assert state(environment, job)["JobState"] == "CANCELLED"
    assert list((tmp_path / "runs/tiny/checkpoints").iterdir()), "what it had done is saved"
