"""When benchmarks of how soon a target is reached end a run."""

from __future__ import annotations

from pathlib import Path

from benchmarks.until import has_reached, rows_of


def test_a_line_that_is_still_being_written_does_not_count(tmp_path: Path) -> None:
    assert rows_of(tmp_path) == []
    (tmp_path / "metrics.jsonl").write_text('{"step": 1.0}\n{"step": 2.0, "evalua', encoding="utf-8")
    assert rows_of(tmp_path) == [{"step": 1.0}]


def test_a_target_is_reached_by_an_evaluation() -> None:
    is_enough = has_reached(0.9)
    assert not is_enough([{"step": 1.0, "reward/mean": 1.0}, {"step": 2.0, "evaluation/mean@1": 0.89}])
    assert is_enough([{"step": 1.0, "evaluation/mean@1": 0.9}, {"step": 2.0, "evaluation/mean@1": 0.7}])
