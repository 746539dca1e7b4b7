"""The numbers of runs in memory are those of the report, however files grow."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.report.runs import metrics_row

from leaderless.observability.report.curves import Series, thin
from leaderless.observability.report.run_files import read_run
from leaderless.ui.table import FullSeries, StepTable


def lines(path: Path, rows: list[dict[str, object]], mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def check(table: StepTable, folder: Path) -> None:
    """Compare with the files read anew."""
    table.read()
    whole = read_run(folder, budgets=None)
    found = FullSeries(table)
    assert {name: found[name] for name in found} == dict(whole.series)
    assert tuple(table.steps) == tuple(whole.steps)


def test_a_table_follows_a_run_that_grows_and_continues(tmp_path: Path) -> None:
    rng, path = random.Random(0), tmp_path / "metrics.jsonl"
    table = StepTable(tmp_path)
    table.read()
    assert len(table) == 0
    lines(path, [metrics_row(step, 20, rng) for step in range(3)])
    check(table, tmp_path)
    lines(path, [{"step": 3, "reward/mean": None, "text": "a", "own": True}, {"step": 4, "own": 1e400}])
    check(table, tmp_path)
    with path.open("a") as file:
        file.write('{"step": 5, "own"')
    check(table, tmp_path)
    with path.open("a") as file:
        file.write(': 2.0}\nno json\n"text"\n{"step": "x"}\n')
    check(table, tmp_path)
    assert table.generation == 0
    # The run continues from step 2: the file is replaced, and then it grows.
    replacement = tmp_path / "new"
    lines(replacement, [metrics_row(step, 20, rng) for step in (0, 1, 2, 3)])
    replacement.rename(path)
    check(table, tmp_path)
    assert table.generation == 1
    lines(path, [{"step": 4, "later": 1.0}])
    check(table, tmp_path)


def test_a_run_that_does_its_only_step_again_has_it_once(tmp_path: Path) -> None:
    path, replacement = tmp_path / "metrics.jsonl", tmp_path / "new"
    table = StepTable(tmp_path)
    lines(path, [{"step": 1, "own": 1.0}])
    check(table, tmp_path)
    lines(replacement, [{"step": 1, "own": 2.0}])
    replacement.rename(path)
    check(table, tmp_path)
    assert (list(table.steps), table.generation) == ([1], 1)


def test_numbers_of_other_loops_belong_to_their_steps(tmp_path: Path) -> None:
    table = StepTable(tmp_path)
    lines(tmp_path / "metrics-evaluation.jsonl", [{"step": 0, "evaluation/mean@1": 0.25}])
    lines(
        tmp_path / "metrics-rollout.jsonl",
        [{"step": step, "reward/mean": step / 4, "time/step": 9.0} for step in (1, 2, 3)],
    )
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "policy/loss": 0.5, "time/step": 1.0}])
    check(table, tmp_path)
    lines(tmp_path / "metrics.jsonl", [{"step": 2, "policy/loss": 0.25}, {"step": 3, "policy/loss": 0.125}])
    check(table, tmp_path)
    lines(tmp_path / "metrics-evaluation.jsonl", [{"step": 2, "evaluation/mean@1": 0.5}])
    check(table, tmp_path)
    assert table.full("time/step") == Series((1, 2, 3), (1.0, 9.0, 9.0)), "those of the loop that trains count"


@given(
    values=st.lists(st.one_of(st.none(), st.floats(-10, 10)), min_size=1, max_size=60), max_points=st.integers(4, 20)
)
def test_thinned_curves_are_those_of_the_report(tmp_path_factory, values, max_points) -> None:
    folder = tmp_path_factory.mktemp("run")
    lines(folder / "metrics.jsonl", [{"step": step, "a": value} for step, value in enumerate(values)])
    table = StepTable(folder)
    table.read()
    assert table.thinned("a", max_points) == thin(table.full("a"), max_points)


def test_news_of_a_metric_are_its_points_from_a_row_on(tmp_path: Path) -> None:
    lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "b": 1.0}]
    )
    table = StepTable(tmp_path)
    table.read()
    assert table.since("a", 1) == ([3], [None])
    assert table.since("b", 0) == ([4], [1.0])
    assert table.since("nothing", 0) == ([], [])
