"""The report is written whatever the run directory contains, and says what is missing."""

from __future__ import annotations

import json
import random
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from tests.unit.observability.report.runs import Page, sample_rows, write_lines

from leaderless.config import load_recipe
from leaderless.observability.report.curves import Series
from leaderless.observability.report.page import render_report, write_report
from leaderless.observability.report.run_files import flatten_recipe, read_run
from leaderless.observability.report.samples import JudgeView, read_samples


@pytest.mark.parametrize("name", ["config.yaml", "plan.json", "plan.svg", "metrics.jsonl", "samples"])
@pytest.mark.parametrize("how", ["missing", "empty", "broken"])
def test_page_comes_out_and_says_what_is_missing(run, name, how):
    path = run / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink()
    if how != "missing" and name != "samples":
        path.write_text("" if how == "empty" else '[{"unclosed": <svg')
    page = Page(render_report(run))
    is_still_a_recipe = name == "config.yaml" and how == "broken"
    assert ("What is missing" in page.text) != is_still_a_recipe
    assert is_still_a_recipe or name in page.text
    assert page.count("h2") >= 6


def test_page_of_an_empty_directory_comes_out(tmp_path):
    page = Page(render_report(tmp_path))
    assert tmp_path.name in page.text
    for name in ("config.yaml", "plan.json", "plan.svg", "metrics.jsonl", "samples/"):
        assert name in page.text
    assert "Nothing could be checked yet" in page.text


@pytest.mark.parametrize("plan", ["[1]", "null", '{"nodes": 3, "edges": {"a": 1}, "batch": [], "memory_bytes": "x"}'])
def test_a_plan_of_another_shape_does_not_break_the_page(run, plan):
    (run / "plan.json").write_text(plan)
    assert Page(render_report(run)).count("h1") == 1


def test_samples_are_not_missed_where_no_node_records_them(run):
    plan = json.loads((run / "plan.json").read_text())
    plan["nodes"] = [node for node in plan["nodes"] if node["run"] != "record"]
    (run / "plan.json").write_text(json.dumps(plan))
    shutil.rmtree(run / "samples")
    assert read_run(run).notes == ()
    assert "No sample was recorded." in Page(render_report(run)).text


def test_missing_directory_is_named(tmp_path):
    with pytest.raises(ValueError, match="no-such-run"):
        write_report(tmp_path / "no-such-run")


def test_unfinished_last_line_is_skipped_and_a_broken_one_before_is_said(run):
    whole = read_run(run)
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"step": 41, "reward/me')
    assert (read_run(run).steps, read_run(run).notes) == (whole.steps, ())
    with (run / "metrics.jsonl").open("a") as file:
        file.write('\n{"step": 42, "reward/mean": 1}\n')
    assert read_run(run).steps == (*whole.steps, 42)
    assert read_run(run).notes == ("metrics.jsonl: skipped lines that are not JSON objects: 1.",)


def test_last_row_of_a_repeated_step_wins(run):
    rows = [{"step": step, "time_s": 10.0 * step, "reward/mean": float(step)} for step in (1, 2, 3)]
    write_lines(run / "metrics.jsonl", [*rows, {"step": 2, "time_s": 4.0, "reward/mean": 7.0}])
    files = read_run(run)
    assert files.series["reward/mean"] == Series((1, 2, 3), (1.0, 7.0, 3.0))
    assert files.duration_s == 10 + 4 + 26


def test_last_recording_of_a_sample_wins(run):
    rows = sample_rows(40, 1.0, random.Random(0))
    write_lines(run / "samples/step-000040.jsonl", [*rows, rows[0] | {"response": "again"}])
    step = read_samples(run / "samples", JudgeView()).steps[-1]
    assert [sum(one.count for one in group.samples) for group in step.groups] == [8, 8, 8, 8]
    assert step.groups[0].samples[0].response == "again"


def test_samples_of_all_ranks_of_a_step_are_shown_together(run):
    rows = [row | {"sample_id": f"r{row['sample_id']}", "group_id": 7} for row in sample_rows(40, 1, random.Random(1))]
    write_lines(run / "samples/step-000040.rank-3.jsonl", rows[:8])
    step = read_samples(run / "samples", JudgeView()).steps[-1]
    assert step.num_recorded == 40
    assert [group.group_id for group in step.groups] == ["40000", "40001", "40002", "40003", "7"]


def test_chat_messages_read_as_text(run):
    messages = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "1+1?"}]
    row = sample_rows(40, 1.0, random.Random(0))[0] | {"prompt": messages}
    write_lines(run / "samples/step-000040.jsonl", [row])
    assert read_run(run).samples.steps[-1].groups[0].prompt == "[system]\nBe brief.\n\n[user]\n1+1?"


@pytest.mark.parametrize(
    ("row", "state"),
    [
        ({"reward": 1.2, "details": {"math": {"value": 1.0}}}, "correct"),
        ({"reward": 0.2, "details": {"math": {"value": 0.0}, "format": {"value": 1.0}}}, "wrong"),
        ({"reward": 0.2, "details": {"format": {"value": 1.0}}}, "correct"),
        ({"reward": 0.0}, "wrong"),
        ({"reward": 1.0, "is_valid": False}, "failed"),
        ({"reward": None}, "failed"),
        ({"reward": float("nan")}, "failed"),
    ],
)
def test_correct_is_what_evaluation_calls_correct(row, state):
    assert JudgeView("math", 1.0).state(row) == state


def test_recipe_decides_what_correct_means(run):
    assert str(read_run(run).judge) == "math at least 1"
    text = (run / "config.yaml").read_text().replace("correct_at: 1.0", "correct_at: 0.5")
    text = text.replace("metric: null", "metric: my.rewards:style")
    (run / "config.yaml").write_text(text)
    assert read_run(run).judge == JudgeView("my.rewards:style", 0.5)


def test_settings_are_those_of_the_resolved_recipe(template):
    settings = flatten_recipe((template / "config.yaml").read_text())
    recipe = load_recipe(template / "config.yaml").recipe
    assert settings["name",] == recipe.name
    assert settings["batch", "responses_per_prompt"] == str(recipe.batch.responses_per_prompt)
    assert settings["reward", "format", "pattern"] == ".*<answer>.*"
    assert float(settings["algorithm", "kl", "coefficient"]) == recipe.algorithm.kl.coefficient
    assert flatten_recipe("a:\n  b: 'it''s: 1'\n  m:f:\n    c: 2\nd: \"x\\ty\"\ne: null") == {
        ("a", "b"): "it's: 1", ("a", "m:f", "c"): "2", ("d",): "x\ty",
    }  # fmt: skip


def test_report_is_replaced_whole_or_not_at_all(run, monkeypatch):
    path = write_report(run)
    assert path == run / "report.html"
    (run / "report.html").write_text("old")

    def fail(self, target):
        raise OSError("disk is full")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="disk is full"):
        write_report(run)
    assert path.read_text() == "old"
    monkeypatch.undo()
    write_report(run)
    assert path.read_text(encoding="utf-8") == render_report(run)
    assert not [file.name for file in run.iterdir() if file.name.startswith(".")]


def test_report_imports_small_libraries_only():
    code = "import leaderless.observability.report.page, sys; print(*{name.partition('.')[0] for name in sys.modules})"
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout.split()
    assert "plotly" in loaded
    assert not {"torch", "pyarrow", "pydantic", "transformers"} & set(loaded)
