"""Features with real models: memory that agrees with the plan, and prompts that are as long as it assumes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace
from typing import cast

import pytest
from benchmarks.real_models import Trial, Watch, keep_one_length

from leaderless.cli.quickstart_project.data import write_rows
from leaderless.models.loading.tiny import write_tiny_model

MIB = 1 << 20
PLAN = {"cpu": {"peak": 200 * MIB}, "peaks": [{"ranks": "0", "cpu": 100 * MIB}, {"ranks": "1-2", "cpu": 200 * MIB}]}


@dataclass
class Played(Trial):
    """A trial whose workers have needed some memory."""

    peaks: Sequence[int] = ()

    def command(self, *arguments: str, code: int = 0) -> str:
        assert (arguments[0], code) == ("plan", 0)
        return json.dumps({"memory_bytes": PLAN})

    def start(self, *arguments: str) -> Watch:
        assert arguments[0] == "train"
        write_rows(self.folder / "runs/real/metrics.jsonl", [{"step": 0}, {"step": 1, "policy/loss": 0.5}])
        return cast("Watch", SimpleNamespace(wait=lambda: None, peak=lambda rank: self.peaks[rank] * MIB))


def trained(folder: Path, *peaks: int) -> Trial:
    trial = Played(folder / "model", folder, peaks=peaks)
    steps = trial.train(workers=3)
    assert [step["policy/loss"] for step in steps] == [0.5]
    return trial


def test_memory_may_differ_from_the_plan_by_15_percent_on_each_rank(tmp_path: Path) -> None:
    found = trained(tmp_path, 90, 172, 228).found
    assert (found["peak_bytes"], found["planned_bytes"]) == (228 * MIB, 200 * MIB)
    assert found["of_plan_by_rank"] == [0.9, 0.86, 1.14]
    assert trained(tmp_path, 80, 200, 200).found["of_plan_by_rank"][0] == 0.8, "there is room on other ranks"


@pytest.mark.parametrize(
    ("peaks", "said"),
    [
        ((116, 200, 200), "rank 0 used 0.11 GiB, 0.10 GiB were planned"),
        ((100, 168, 200), "rank 1 used"),
        ((100, 200, 232), "rank 2 used"),
    ],
)
def test_a_rank_whose_memory_is_not_as_planned_is_named(tmp_path: Path, peaks: Sequence[int], said: str) -> None:
    with pytest.raises(AssertionError, match=said):
        trained(tmp_path, *peaks)


def test_kept_are_prompts_of_the_most_frequent_length(tmp_path: Path) -> None:
    template = "{% for message in messages %}{{ message.content }}{% endfor %}b"
    write_tiny_model(tmp_path / "model", "abcdefgh", hidden_size=32, chat_template=template)
    rows = [{"question": "a" * size, "answer": str(size)} for size in (3, 5, 3, 4, 8, 3)]
    write_rows(tmp_path / "train.jsonl", rows)
    write_rows(tmp_path / "test.jsonl", rows[1:4])
    length = keep_one_length(tmp_path, tmp_path / "model")
    kept = [
        [json.loads(line)["answer"] for line in (tmp_path / name).read_text(encoding="utf-8").splitlines()]
        for name in ("train.jsonl", "test.jsonl")
    ]
    assert kept == [["3", "3", "3"], ["3"]]
    assert length == 3 + 1
