"""The numbers of runs in memory are those of the report, however files grow."""

from __future__ import annotations

import json
import random
from pathlib import Path

from hypothesis import given
from hypothesis import strategies as st
from tests.unit.observability.report.runs import metrics_row

from leaderless.observability.report.curves import Series
from leaderless.observability.report.run_files import read_run
from leaderless.serving.live_page.metric_table import AllSeries, StepTable


def lines(path: Path, rows: list[dict[str, object]], mode: str = "a") -> None:
    with path.open(mode) as file:
        file.writelines(json.dumps(row) + "\n" for row in rows)


def check(table: StepTable, folder: Path) -> None:
    """Compare with the files read anew."""
    table.read()
    whole = read_run(folder, budgets=None)
    found = AllSeries(table)
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
    assert table.series("time/step") == Series((1, 2, 3), (1.0, 9.0, 9.0)), "those of the loop that trains count"


def test_a_step_that_comes_again_replaces_those_after_it(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    table = StepTable(tmp_path)
    lines(path, [{"step": step, "a": step, "b": step} for step in (1, 2, 3, 4)] + [{"step": 2, "a": 20}])
    table.read()
    assert table.series("a") == Series((1, 2), (1, 20))
    assert table.series("b") == Series((1,), (1,))
    lines(path, [{"step": 3, "a": None}, {"step": 2**70, "a": 1}])
    table.read()
    assert table.series("a") == Series((1, 2, 3), (1, 20, None))
    generation = table.generation
    lines(path, [{"step": 3, "a": 30}])
    table.read()
    assert (table.series("a"), table.generation) == (Series((1, 2, 3), (1, 20, 30)), generation + 1)


def test_a_log_that_was_cut_to_nothing_has_no_steps(tmp_path: Path) -> None:
    table = StepTable(tmp_path)
    lines(tmp_path / "metrics.jsonl", [{"step": 1, "a": 1.0}])
    check(table, tmp_path)
    lines(tmp_path / "new", [])
    (tmp_path / "new").rename(tmp_path / "metrics.jsonl")
    check(table, tmp_path)
    assert len(table) == 0


LOGS = ("metrics.jsonl", "metrics-evaluation.jsonl", "metrics-rollout.jsonl")
ROW = st.dictionaries(
    st.sampled_from(["time_s", "a", "b/c", "evaluation/d"]),
    st.one_of(st.none(), st.integers(-3, 3), st.floats(-9, 9), st.sampled_from([True, float("nan"), 1e308])),
)


@given(
    st.lists(
        st.tuples(
            st.sampled_from(["write", "half", "resume", "rewrite"]), st.sampled_from(LOGS), st.integers(1, 3), ROW
        ),
        max_size=10,
    )
)
def test_a_table_is_what_a_report_reads_however_logs_grow(tmp_path_factory, events) -> None:
    folder = tmp_path_factory.mktemp("run")
    written: dict[str, list[dict[str, object]]] = {log: [] for log in LOGS}
    table, half = StepTable(folder), dict.fromkeys(LOGS, "")
    for kind, log, count, row in events:
        last = max((int(str(one["step"])) for one in written[log]), default=-(log == LOGS[1]))
        if kind == "write":
            rows = [{"step": last + number, "text": "said"} | row for number in range(1, count + 1)]
            text = "".join(json.dumps(one) + "\n" for one in rows)
            with (folder / log).open("a") as file:
                file.write(text.removeprefix(half[log]) if text.startswith(half[log]) else "\n" + text)
            written[log] += rows
            half[log] = ""
        elif kind == "half" and not half[log]:
            half[log] = json.dumps({"step": last + 1} | row)[: 3 * count]
            with (folder / log).open("a") as file:
                file.write(half[log])
        elif kind == "resume":  # all loops continue after the same step
            for each in LOGS:
                written[each] = [one for one in written[each] if int(str(one["step"])) <= last - count]
                half[each] = ""
                if (folder / each).exists():
                    lines(folder / "new", written[each], "w")
                    (folder / "new").rename(folder / each)
        check(table, folder)


def test_numbers_that_come_late_are_noted_by_their_metric(tmp_path: Path) -> None:
    table = StepTable(tmp_path)
    lines(tmp_path / "metrics.jsonl", [{"step": step, "a": 1.0} for step in (1, 2, 3)])
    lines(tmp_path / "metrics-evaluation.jsonl", [{"step": 1, "d": 0.5}])
    table.read()
    before = dict(table.revisions)
    lines(tmp_path / "metrics.jsonl", [{"step": 4, "a": 1.0}])
    table.read()
    assert table.revisions == before
    lines(tmp_path / "metrics-evaluation.jsonl", [{"step": 3, "d": 0.75}])
    table.read()
    assert {name for name in table.revisions if table.revisions[name] != before.get(name)} == {"d"}
    assert table.generation == 0


def test_news_of_a_metric_are_its_points_from_a_row_on(tmp_path: Path) -> None:
    lines(
        tmp_path / "metrics.jsonl", [{"step": 1, "a": 1.0}, {"step": 2}, {"step": 3, "a": None}, {"step": 4, "b": 1.0}]
    )
    table = StepTable(tmp_path)
    table.read()
    assert table.since("a", 1) == ([3], [None])
    assert table.since("b", 0) == ([4], [1.0])
    assert table.since("nothing", 0) == ([], [])
