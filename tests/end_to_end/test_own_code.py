"""Custom rewards, stages and workflows; and what happens to a response whose reward fails."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from tests.distributed.ranks import RankPool
from tests.end_to_end.cli import metrics, run, succeed
from tests.end_to_end.own_code import OWN_WORKFLOW
from tests.tiny import tiny_model, write_recipe

OWN = "tests.end_to_end.own_code:"


def samples(run_folder: Path, step: int) -> list[dict[str, object]]:
    files = sorted((run_folder / "samples").glob(f"step-{step:06d}.*"))
    return [json.loads(line) for file in files for line in file.read_text().splitlines()]


def test_a_workflow_in_yaml_and_one_in_python_give_the_same_run_with_a_stage_of_ones_own(
    ranks: RankPool, tmp_path: Path
) -> None:
    (tmp_path / "own.yaml").write_text(OWN_WORKFLOW)
    changes = {"reward": {f"{OWN}share_of_digits": 1.0}, "run.recorded_prompts": 6, "workflow": "own.yaml"}
    recipe = write_recipe(tmp_path, tiny_model(), changes)
    succeed(ranks, tmp_path, "train", recipe)
    succeed(ranks, tmp_path, "train", recipe, "name=python", f"workflow={OWN}workflow")
    succeed(ranks, tmp_path, "train", recipe, "name=plain", "workflow=grpo")
    on_two_pools = "layout={rollout: {ranks: 0}, bonus: {ranks: 0-1}, advantage: {ranks: 1}, policy: {ranks: 0-1}}"
    succeed(ranks, tmp_path, "train", recipe, "name=several", on_two_pools, num_ranks=2)
    lines, python, plain, several = (
        metrics(tmp_path / "runs" / name) for name in ("tiny", "python", "plain", "several")
    )
    assert python == lines
    assert 0 < lines[0]["bonus"] < 1
    assert lines[0]["policy/grad_norm"] != pytest.approx(plain[0]["policy/grad_norm"]), "the bonus is trained on"
    for line, expected in zip(several, lines, strict=True):
        assert line == pytest.approx(expected, rel=1e-4, abs=1e-5)
    for sample in samples(tmp_path / "runs/tiny", 1):
        before = sum(c.isdigit() for c in sample["response"]) / max(1, len(sample["response"]))  # type: ignore[arg-type, attr-defined]
        is_even = int(str(sample["answer"])) % 2 == 0
        assert (sample["reward"] == pytest.approx(before)) != is_even


def test_several_sources_of_one_data_set_have_rewards_of_their_own(ranks: RankPool, tmp_path: Path) -> None:
    kinds = ("sums", "words", "both")
    rows = [{"question": f"{i}+1=", "answer": str(i + 1), "kind": kinds[i % 3]} for i in range(9)]
    recipe = write_recipe(
        tmp_path,
        tiny_model(),
        {
            "data.train.source": "kind",
            "reward": {
                f"{OWN}share_of_digits": {"sources": ["sums", "both"], "weight": 2.0},
                "format": {"pattern": r".*[a-z].*", "sources": ["words", "both"], "weight": 0.5},
            },
            "batch.prompts_per_step": 9,
            "run.recorded_prompts": 9,
            "steps": 1,
        },
    )
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    succeed(ranks, tmp_path, "train", recipe, num_ranks=2)
    wanted = {"sums": {f"{OWN}share_of_digits"}, "words": {"format"}, "both": {f"{OWN}share_of_digits", "format"}}
    seen = set()
    recorded = samples(tmp_path / "runs/tiny", 1)
    for sample in recorded:
        kind = kinds[(int(str(sample["answer"])) - 1) % 3]
        details = sample["details"]
        assert isinstance(details, dict)
        assert details.keys() == wanted[kind]
        weights = {"format": 0.5, f"{OWN}share_of_digits": 2.0}
        total = sum(weights[name] * detail["value"] for name, detail in details.items())
        assert sample["reward"] == pytest.approx(total)
        seen.add(kind)
    assert len(seen) == 3
    (line,) = metrics(tmp_path / "runs/tiny")
    assert line["reward/failed"] == 0
    assert {"reward/format", f"reward/{OWN}share_of_digits"} <= line.keys()
    outcome = run(ranks, tmp_path, "train", recipe, "data.train.source=kin", "name=other")
    assert outcome.code == 2
    assert "has no column 'kin' (did you mean 'kind'?)" in outcome.errors


def test_failed_rewards_are_counted_and_excluded_and_never_zero(ranks: RankPool, tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tiny_model(), {"run.recorded_prompts": 6, "steps": 1})
    for name in ("fail", "zero"):
        change = f"reward={{'{OWN}{name}_on_small_letters': 1.0}}"
        succeed(ranks, tmp_path, "train", recipe, f"name={name}", change)
    (fail,), (zero,) = (metrics(tmp_path / "runs" / name) for name in ("fail", "zero"))
    recorded = samples(tmp_path / "runs/fail", 1)
    failed = [sample for sample in recorded if not sample["is_valid"]]
    assert 0 < len(failed) < len(recorded) == 24
    assert fail["reward/failed"] == len(failed)
    assert zero["reward/failed"] == 0
    assert all(sample["advantage"] == 0 for sample in failed)
    assert all("LookupError: cannot grade" in str(sample["details"]) for sample in failed)
    valid = [float(str(sample["reward"])) for sample in recorded if sample["is_valid"]]
    assert fail["reward/mean"] == pytest.approx(sum(valid) / len(valid)), "a mean over those that could be graded"
    assert fail["reward/mean"] > zero["reward/mean"]
    assert fail["policy/grad_norm"] != pytest.approx(zero["policy/grad_norm"], rel=1e-3)
    by_group: dict[object, list[float]] = {}
    for sample in recorded:
        by_group.setdefault(sample["group_id"], []).append(float(str(sample["advantage"])))
    assert all(sum(values) == pytest.approx(0, abs=1e-5) for values in by_group.values())


def test_a_step_in_which_every_reward_fails_changes_no_weight(ranks: RankPool, tmp_path: Path) -> None:
    changes = {"reward": {f"{OWN}always_fail": 1.0}, "guards.reward_failures_limit": None, "steps": 2}
    recipe = write_recipe(tmp_path, tiny_model(), changes)
    succeed(ranks, tmp_path, "train", recipe, num_ranks=2)
    for line in metrics(tmp_path / "runs/tiny"):
        assert (line["reward/failed"], line["policy/grad_norm"], line["group/no_signal"]) == (24, 0, 1)
        assert "reward/mean" not in line
    assert "ConnectionError: the judge is asleep" in (tmp_path / "runs/tiny/report.html").read_text()
    succeed(ranks, tmp_path, "export", tmp_path / "runs/tiny", tmp_path / "out")
    after = load_file(tmp_path / "out/model.safetensors")
    for name, weight in load_file(f"{tiny_model()}/model.safetensors").items():
        assert torch.equal(after[name], weight), name
