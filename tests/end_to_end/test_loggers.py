"""Runs with loggers: they get all steps, and training has the same numbers whatever they do."""

from __future__ import annotations

import csv
import json
from pathlib import Path

import pytest
from tests.end_to_end.alone import run_alone
from tests.end_to_end.cli import metrics
from tests.loggers import notes
from tests.tiny import tiny_model, write_recipe


def test_loggers_follow_a_run_that_continues_and_do_not_hurt_it(
    tmp_path: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    out, table = tmp_path / "notes", tmp_path / "numbers.csv"
    loggers = [
        {"type": "examples.own_logger.csv_logger:CsvLogger", "options": {"path": str(table)}},
        {"type": "tests.loggers:Notes", "options": {"path": str(out), "can_rewind": False}},
        {"type": "tests.loggers:Notes", "options": {"path": str(tmp_path / "broken"), "fails": 100}},
    ]
    recipe = write_recipe(tmp_path, tiny_model(), {"loggers": loggers, "steps": 1})
    for steps in (1, 2):
        outcome = run_alone(tmp_path, "train", recipe, f"steps={steps}")
        assert outcome.code == 0, outcome.errors
        assert "logger 'notes-2' fails: ConnectionError: no answer. Training continues" in capfd.readouterr().err
    plain = write_recipe(tmp_path, tiny_model(), {"name": "plain"})
    assert run_alone(tmp_path, "train", plain).code == 0
    assert metrics(tmp_path / "runs/tiny") == metrics(tmp_path / "runs/plain")

    lines = [json.loads(line) for line in (tmp_path / "runs/tiny/metrics.jsonl").read_text().splitlines()]
    assert [["", line.pop("step"), line] for line in lines] == notes(out, "write")
    assert {(name, step) for name, step, _, _ in notes(out, "table")} == {("samples", 1)}
    assert [line[1] for line in notes(out, "open")] == ["", "first"]
    assert notes(out, "file") == [["report.html"]] * 2
    with table.open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert [row["step"] for row in rows if row["name"] == "reward/mean"] == ["1", "2"]

    again = tmp_path / "again"
    text = json.dumps([{"type": "tests.loggers:Notes", "options": {"path": str(again)}}])
    config = tmp_path / "runs/plain/config.yaml"
    config.write_text(config.read_text().replace("loggers: []", f"loggers: {text}"))
    outcome = run_alone(tmp_path, "log", tmp_path / "runs/plain")
    assert outcome.code == 0, outcome.errors
    assert [step for _, step, _ in notes(again, "write")] == [1, 2]
    assert run_alone(tmp_path, "log", tmp_path).code == 2
