"""`leaderless train`: what a run leaves behind, and how it continues."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from safetensors.torch import load_file
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, run, succeed
from tests.tiny import tiny_model, write_additions, write_recipe

SIGNAL = {"reward": {"format": {"pattern": r".*\d.*"}}, "optimizer.learning_rate": 3e-3, "batch.prompts_per_step": 5}
"""An untrained model writes a digit now and then."""


def held_out(folder: Path) -> dict[str, object]:
    path = write_additions(folder / "test.jsonl", 12)
    return {
        "data.evaluation": {"path": str(path), "prompt": "question", "answer": "answer", "template": "plain"},
        "evaluation": {"every_steps": 2},
    }


def weights(run_folder: Path, step: int) -> dict[str, torch.Tensor]:
    """The weights of a checkpoint that one rank wrote, by name."""
    (file,) = (run_folder / f"checkpoints/step-{step:06d}/policy").glob("*.safetensors")
    return load_file(file)


def trace_of(path: Path) -> list[dict[str, Any]]:
    """Operations of a device in a step."""
    return [event for event in json.loads(path.read_text())["traceEvents"] if event.get("cat") == "cpu_op"]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_run_leaves_all_that_it_promises(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    changes = SIGNAL | held_out(tmp_path) | {"loggers": ["tensorboard"], "steps": 3, "run.trace_steps": 2}
    changes |= {"run.profiled_step": 3}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), changes | {"checkpoint": {"every_steps": 1, "keep": 2}})
    succeed(ranks, tmp_path, "train", recipe, num_ranks=num_ranks)
    folder = tmp_path / "runs/tiny"
    names = {path.name for path in folder.iterdir()}
    wanted = {"config.yaml", "plan.json", "plan.svg", "metrics.jsonl", "proof.jsonl", "samples", "trace", "checkpoints"}
    assert names == wanted | {"tensorboard", "loggers", "logs", "report.html"}
    assert yaml.safe_load((folder / "config.yaml").read_text())["batch"]["updates_per_step"] == 1, "resolved"
    assert json.loads((folder / "plan.json").read_text())["world_size"] == num_ranks
    lines = metrics(folder, with_times=True)
    assert [line["step"] for line in lines] == [0, 1, 2, 3]
    assert all("reward/mean" in line for line in lines[1:])
    assert ["evaluation/mean@1" in line for line in lines] == [True, False, True, True]
    assert [path.name for path in sorted((folder / "checkpoints").iterdir())] == ["step-000002", "step-000003"]
    assert any(path.stat().st_size > 100 for path in (folder / "tensorboard").glob("events.*"))
    samples = [json.loads(line) for line in (folder / "samples/step-000003.rank-0.jsonl").read_text().splitlines()]
    assert {"prompt", "response", "answer", "reward", "advantage", "is_valid"} <= set(samples[0])
    assert len({sample["group_id"] for sample in samples}) == {1: 4, 2: 2}[num_ranks]
    for rank in range(num_ranks):
        events = json.loads((folder / f"trace/rank-{rank}.json").read_text())
        spans = [event for event in events if event["ph"] == "X"]
        assert {span["args"]["step"] for span in spans} == {0, 1, 2}
        assert {"rollout", "reward", "policy", "evaluate"} <= {span["name"] for span in spans}
        assert all(span["dur"] >= 0 and span["pid"] == rank for span in spans)
        sizes = [span["args"] for span in spans if span["name"] in {"rollout", "policy"}]
        assert all(size["tokens"] >= size["longest"] > 0 and size["rows"] > 0 for size in sizes), "as profiles need"
        assert all(sum(size.get("lengths", [size["tokens"]])) == size["tokens"] for size in sizes)
        names = [event["name"] for event in trace_of(folder / f"trace/device-rank-{rank}.json")]
        assert names.count("aten::mm") > 10, "products of the profiled step"
    profiled = succeed(ranks, tmp_path, "profile", recipe, "--from", str(folder), "--output", "profile.json")
    assert "rollout:" in profiled
    report = (folder / "report.html").read_text()
    assert "<html" in report
    assert "reward/mean" in report


@pytest.mark.parametrize("workflow", ["grpo", "sft"])
def test_a_run_that_was_stopped_goes_on_to_the_very_same_curve(ranks: RankPool, tmp_path: Path, workflow: str) -> None:
    changes: dict[str, object] = {"batch.updates_per_step": 2, "algorithm.kl.coefficient": 0.1}
    if workflow == "sft":
        changes = {"workflow": "sft", "data.train.response": "answer", "data.max_response_tokens": 8}
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | held_out(tmp_path) | changes)
    moved = {1: 3, 2: 2, 4: 1} if workflow == "grpo" else {2: 2, 4: 1}
    moves = {"whole": {4: 1}, "parts": {2: 1, 4: 1}, "moved": moved}
    for name, stops in moves.items():
        for steps, num_ranks in stops.items():
            succeed(ranks, tmp_path, "train", recipe, f"name={name}", f"steps={steps}", num_ranks=num_ranks)
    whole, parts, elsewhere = (metrics(tmp_path / "runs" / name) for name in moves)
    assert [line["step"] for line in whole] == [0, 1, 2, 3, 4]
    assert parts == whole, "bit for bit"
    assert torch.stack([torch.tensor(line["policy/grad_norm"]) for line in whole[1:]]).min() > 0.01
    for line, expected in zip(elsewhere, whole, strict=True):  # the last step of each start was also evaluated
        assert {name: line[name] for name in expected} == pytest.approx(expected, rel=1e-3, abs=1e-4)
    expected_weights = weights(tmp_path / "runs/whole", 4)
    for name, value in weights(tmp_path / "runs/parts", 4).items():
        assert torch.equal(value, expected_weights[name]), name
    times = [line["time_s"] for line in metrics(tmp_path / "runs/parts", with_times=True)]
    assert times == sorted(times), "the clock goes on as well"
    events = json.loads((tmp_path / "runs/parts/trace/rank-0.json").read_text())
    traced = {event["args"]["step"] for event in events if event["ph"] == "X"}
    assert traced == {0, 1, 2, 3, 4}, "the trace of what was done before is kept"


def test_a_step_that_was_lost_is_logged_once(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | {"steps": 2})
    succeed(ranks, tmp_path, "train", recipe)
    folder = tmp_path / "runs/tiny"
    (folder / "checkpoints/step-000002").rename(folder / "checkpoints/.step-000002.partial")
    succeed(ranks, tmp_path, "train", recipe, "name=other", "steps=1")
    (tmp_path / "runs/other/checkpoints/step-000001").rename(folder / "checkpoints/step-000001")
    with (folder / "metrics.jsonl").open("a") as file:
        file.write('{"step": 3, "reward/me')
    output = succeed(ranks, tmp_path, "train", recipe, "steps=3")
    assert "continuing from step 1" in output
    assert [line["step"] for line in metrics(folder)] == [1, 2, 3]
    assert [path.name for path in sorted((folder / "samples").iterdir())] == [
        f"step-00000{step}.rank-0.jsonl" for step in (1, 2, 3)
    ]


@pytest.mark.parametrize("num_ranks", [pytest.param(1, marks=pytest.mark.thorough), 2])
def test_a_finished_run_says_so_and_changes_nothing(ranks: RankPool, tmp_path: Path, num_ranks: int) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | {"steps": 1})
    succeed(ranks, tmp_path, "train", recipe, num_ranks=num_ranks)
    before = {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "runs").rglob("*"))}
    output = succeed(ranks, tmp_path, "train", recipe, num_ranks=num_ranks)
    assert "nothing to do" in output
    assert "Raise `steps` to continue, or pass --fresh" in " ".join(output.split())
    assert {path: path.stat().st_mtime_ns for path in sorted((tmp_path / "runs").rglob("*"))} == before


def test_a_run_refuses_other_settings_than_it_was_begun_with(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | {"steps": 1})
    succeed(ranks, tmp_path, "train", recipe)
    before = (tmp_path / "runs/tiny/metrics.jsonl").read_text()
    outcome = run(ranks, tmp_path, "train", recipe, "optimizer.learning_rate=0.5", "steps=2")
    assert outcome.code == 2
    message = " ".join(outcome.errors.split())
    assert "override optimizer.learning_rate=0.5" in message
    assert "was begun with 0.003" in message
    assert "give the new run another name, or pass --fresh" in message
    assert (tmp_path / "runs/tiny/metrics.jsonl").read_text() == before


def test_fresh_sets_the_earlier_run_aside(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | {"steps": 1})
    succeed(ranks, tmp_path, "train", recipe)
    for rate, num_ranks in ((0.5, 1), (0.25, 2)):
        arguments = ("train", tmp_path / "runs/tiny", f"optimizer.learning_rate={rate}", "--fresh")
        assert "the earlier run is now in" in succeed(ranks, tmp_path, *arguments, num_ranks=num_ranks)
    rates = {path.name: metrics(path)[0]["policy/learning_rate"] for path in (tmp_path / "runs").glob("tiny*")}
    assert rates == {"tiny.1": 0.003, "tiny.2": 0.5, "tiny": 0.25}


@pytest.mark.parametrize("arguments", [[], ["--fresh"]])
def test_a_run_without_a_step_is_not_kept(ranks: RankPool, tmp_path: Path, arguments: list[str]) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1), SIGNAL | held_out(tmp_path) | {"steps": 1})
    assert run(ranks, tmp_path, "train", recipe, "workflow=dapo", "reward.format.pattern=never").code == 1
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [0]
    (tmp_path / "runs/tiny/events.jsonl").write_text('{"event": "restart"}')
    assert "the earlier run" not in succeed(ranks, tmp_path, "train", recipe, *arguments)
    assert [path.name for path in (tmp_path / "runs").glob("tiny*")] == ["tiny"]
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [0, 1]
    assert not (tmp_path / "runs/tiny/events.jsonl").exists()


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ("name=':warning: [bold]'", "name=':warning: [bold]'"),
        ("batch.prompt_per_step=4", "unknown key (did you mean 'prompts_per_step'?)"),
        ("batch.responses_per_prompt=1", "must be at least 2"),
        ("rollout.top_p=1.5", "must be less than or equal to 1"),
        ("data.train.path=/no/such.jsonl", "file /no/such.jsonl does not exist"),
        ("models.policy.path=/no/such/model", "folder /no/such/model does not exist"),
        ("data.train.prompt=quest", "has no column 'quest' (did you mean 'question'?)"),
        ("data.max_prompt_tokens=1", "all 64 rows of"),
        ("batch.micro_batch_tokens=3", "but one sample may have 14 tokens"),
        ("reward={json:dumps: 1.0, 'nothing:here': 1.0}", "module 'nothing' cannot be imported"),
        ('data.train.template="[/INST]"', "'[/INST]'"),
    ],
)
def test_what_the_user_has_to_correct_is_said_and_nothing_is_written(
    ranks: RankPool, tmp_path: Path, change: str, words: str
) -> None:
    recipe = write_recipe(tmp_path, tiny_model(num_layers=1))
    outcome = run(ranks, tmp_path, "train", recipe, change)
    assert outcome.code == 2, outcome.errors
    assert words in " ".join(outcome.errors.split())
    assert "Traceback" not in outcome.errors
    assert not list((tmp_path / "runs").rglob("metrics.jsonl"))
