"""How workers start and end: by our launcher, by torchrun, and by an error."""

from __future__ import annotations

import json
import time
from pathlib import Path

import pytest
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import finish, metrics, start, succeed
from tests.tiny import tiny_model, write_recipe

from leaderless.config.packaged_files import recipes_folder

SETTINGS = {
    "reward": {"format": {"pattern": r".*\d.*"}},
    "batch.prompts_per_step": 5,
    "run.reward_processes": 1,
    "loggers": [],
}
ELASTIC = ("torch.distributed.run", "--rdzv-backend", "c10d", "--rdzv-endpoint", "127.0.0.1:0", "--nproc-per-node", 2)


def test_our_launcher_and_torchrun_give_the_run_of_one_worker(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), SETTINGS)
    own = start(tmp_path, "leaderless", "train", recipe, "name=own", "--workers", 2)
    outcome = finish(own)
    assert outcome.code == 0, outcome.errors
    assert "own: what has changed" in outcome.output
    assert f"report: {tmp_path}/runs/own/report.html" in outcome.output
    elastic = start(tmp_path, *ELASTIC, "-m", "leaderless", "train", recipe, "name=elastic")
    outcome = finish(elastic)
    assert outcome.code == 0, outcome.errors
    assert outcome.output.count("what has changed") == 1, "one worker speaks"
    assert f"report: {tmp_path}/runs/elastic/report.html" in outcome.output
    succeed(ranks, tmp_path, "train", recipe, "name=single")
    expected = metrics(tmp_path / "runs/single")
    for name in ("own", "elastic"):
        assert (tmp_path / "runs" / name / "report.html").exists()
        for line, numbers in zip(metrics(tmp_path / "runs" / name), expected, strict=True):
            assert line == pytest.approx(numbers, rel=1e-4, abs=1e-5)
    assert metrics(tmp_path / "runs/own") == metrics(tmp_path / "runs/elastic")


def layouts_of(folder: Path) -> list[object]:
    return [node["layout"] for node in json.loads((folder / "plan.json").read_text())["nodes"]]


def test_workers_choose_layouts_by_described_machines_and_continue_without_the_description(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), SETTINGS)
    described = tmp_path / "machines.yaml"
    described.write_text((recipes_folder() / "clusters/testbed.yaml").read_text())
    command = ("leaderless", "train", recipe, "--layout", "auto", "--cluster", described.name)
    outcome = finish(start(tmp_path, *ELASTIC, "-m", *command, "steps=1"))
    assert outcome.code == 0, outcome.errors
    said = "s a step by the cost model of 'test bed, 500 Mbit/s a host', which is no measurement"
    assert outcome.output.count(said) == 1, "one worker speaks"
    saved = tmp_path / "runs/tiny/profile.json"
    chosen, layouts = saved.read_text(), layouts_of(tmp_path / "runs/tiny")
    described.unlink()
    outcome = finish(start(tmp_path, *command, "--workers", 2))
    assert outcome.code == 0, outcome.errors
    assert said in outcome.output
    assert (saved.read_text(), layouts_of(tmp_path / "runs/tiny")) == (chosen, layouts)
    outcome = finish(start(tmp_path, *command, "--workers", 2, "--fresh"))
    assert outcome.code == 2, "a run that is begun anew needs the description"
    assert "placement.cluster: machines.yaml does not exist" in outcome.errors


FAILING = """
from pathlib import Path

import leaderless

@leaderless.stage(reads=["rewards"], has_effect=True)
def fail(batch, context):
    if context.process_group.rank == 1 and context.step == 2:
        Path("failed.txt").write_text("now")
        raise KeyError("no such thing")
    return batch
"""
WORKFLOW = """
name: own
nodes:
  rollout: {run: rollout, role: policy}
  reward: {run: reward, after: rollout}
  fail: {run: "failing:fail", after: reward}
  advantage: {run: advantage, after: reward}
  policy: {run: update, role: policy, after: [advantage, fail]}
"""


def test_the_traceback_of_the_worker_that_failed_is_what_the_user_reads(tmp_path: Path) -> None:
    (tmp_path / "failing.py").write_text(FAILING)
    (tmp_path / "own.yaml").write_text(WORKFLOW)
    recipe = write_recipe(
        tmp_path, tiny_model(), SETTINGS | {"workflow": "own.yaml", "steps": 50, "run.max_restarts": 0}
    )
    outcome = finish(start(tmp_path, "leaderless", "train", recipe, "--workers", 2))
    seconds = time.time() - (tmp_path / "failed.txt").stat().st_mtime
    assert outcome.code == 1
    assert outcome.errors.count("Traceback (most recent call last)") == 1
    assert 'raise KeyError("no such thing")' in outcome.errors
    assert "at step 2, in fail, on rank 1" in outcome.errors
    assert "error rank 1 failed: KeyError" in outcome.errors
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [1]
    assert (tmp_path / "runs/tiny/report.html").exists(), "also of a run that failed"
    assert seconds < 2 * 15, "twice the limit, for other processes use the same cores"
