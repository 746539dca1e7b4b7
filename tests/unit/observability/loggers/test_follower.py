"""A logger gets what a run writes: in order, once, and again where it was done again."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from tests.loggers import SAMPLE, Notes, begin, notes, steps

from leaderless.observability.loggers.follower import BATCH_STEPS, MAX_ROWS, Follower, SentJournal, tables_of
from leaderless.observability.loggers.protocol import LoggedRun, Logger
from leaderless.observability.run_directory import RunDirectory


def follower(directory: RunDirectory, logger: Logger, every: int = 1) -> Follower:
    sent = SentJournal(directory.loggers / "notes.jsonl")
    run = LoggedRun("trial", directory.path, {})
    sent.begin(logger.open(run, sent.identity))
    return Follower(run, logger, sent, every)


def test_each_step_is_sent_once_and_in_order(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    following = follower(directory, Notes(str(out)))
    following.follow()  # nothing is there yet
    steps(directory, {1: {"loss": 0.5}, 2: {"loss": math.nan}})
    following.follow()
    with directory.metrics.open("a") as file:
        file.write('{"step": 3, "loss"')  # a run may be read in the middle of a line
    following.follow()
    with directory.metrics.open("a") as file:
        file.write(': 0.25, "is_good": true}\nno json\n[1]\n')
    following.follow()
    following.follow()
    written = notes(out, "write")
    assert [line[:2] for line in written] == [["", 1], ["", 2], ["", 3]]
    assert math.isnan(written[1][2]["loss"]), "a value that is not finite is NaN"
    assert written[2][2] == {"loss": 0.25, "is_good": 1.0}


def test_many_steps_come_in_batches_and_logs_by_name(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    number = 2 * BATCH_STEPS + 3
    directory.metrics.write_text("".join(json.dumps({"step": step, "a": 1.0}) + "\n" for step in range(number)))
    steps(directory, {7: {"evaluation/mean@1": 0.5}}, "evaluation")
    follower(directory, Notes(str(out))).follow()
    written = [tuple(line[:2]) for line in notes(out, "write")]
    assert sorted(written) == sorted([("evaluation", 7), *(("", step) for step in range(number))])


@pytest.mark.parametrize("can_rewind", [True, False])
@pytest.mark.parametrize("is_new", [True, False])
def test_a_run_that_continues_sends_no_step_twice(tmp_path: Path, can_rewind: bool, is_new: bool) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    first = follower(directory, Notes(str(out), can_rewind=can_rewind))
    steps(directory, {step: {"loss": float(step)} for step in (1, 2, 3, 4)})
    first.follow()
    # The checkpoint was that of step 2, and step 3 has other numbers now: of seconds, or after a roll-back.
    steps(directory, {step: {"loss": step / 2} for step in (3, 4, 5)})
    (follower(directory, Notes(str(out), can_rewind=can_rewind)) if is_new else first).follow()
    written = [(step, values["loss"]) for _, step, values in notes(out, "write")]
    before = [(1, 1.0), (2, 2.0), (3, 3.0), (4, 4.0)]
    assert written == before + ([(3, 1.5), (4, 2.0), (5, 2.5)] if can_rewind else [(5, 2.5)])
    assert ["", 3] in notes(out, "rewind")
    if is_new:
        assert [line[1] for line in notes(out, "open")] == ["", "first"], "the identity is kept"


def test_what_fails_is_sent_later_and_once(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    following = follower(directory, Notes(str(out), fails=2))
    steps(directory, {1: {"loss": 1.0}, 2: {"loss": 2.0}})
    for _ in range(2):
        with pytest.raises(ConnectionError):
            following.follow()
    steps(directory, {3: {"loss": 3.0}})
    following.follow()
    assert [step for _, step, _ in notes(out, "write")] == [1, 2, 3]


def test_tables_are_sent_when_all_ranks_have_written_them(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    following = follower(directory, Notes(str(out)), every=2)
    failed = SAMPLE | {"reward": None, "is_valid": False, "details": {"own": {"error": "x"}}}
    for step in (1, 2, 3):
        directory.write_samples(step, 0, [SAMPLE])
        directory.write_samples(step, 1, [failed])
        steps(directory, {step: {"loss": 1.0}})
        following.follow()
        assert [table[1] for table in notes(out, "table")] == {1: [], 2: [1], 3: [1, 2]}[step], "every second one"
    directory.write_samples(4, 0, [SAMPLE], kind="evaluation")
    steps(directory, {4: {"evaluation/mean@1": 1.0}})
    following.follow(is_over=True)
    follower(directory, Notes(str(out)), every=2).follow(is_over=True)
    tables = notes(out, "table")
    assert [(name, step) for name, step, _, _ in tables] == [("samples", 1), ("samples", 2), ("evaluation/samples", 4)]
    _, _, columns, rows = tables[0]
    shown = [dict(zip(columns, row, strict=True)) for row in rows]
    assert shown[0]["response"] == "2 <b>é</b>"
    assert shown[0]["reward/exact_match"] == 1.0
    assert shown[1]["reward"] is None
    assert shown[1]["is_valid"] is False


def test_no_tables_where_none_are_wanted(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    directory.write_samples(1, 0, [SAMPLE])
    steps(directory, {1: {"evaluation/mean@1": 1.0}})
    follower(directory, Notes(str(out)), every=0).follow(is_over=True)
    assert notes(out, "table") == []


def test_the_report_is_sent_if_there_is_one(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    following = follower(directory, Notes(str(out)))
    following.finish(directory.path / "report.html")
    assert notes(out, "file") == []
    (directory.path / "report.html").write_text("report")
    following.finish(directory.path / "report.html")
    assert notes(out, "file") == [["report.html"]]


def test_a_journal_that_a_crash_has_cut_off_loses_that_entry_alone(tmp_path: Path) -> None:
    path = tmp_path / "notes.jsonl"
    path.write_text('["identity", "first"]\n["numbers", ""]\n["numbers", "", 1, 11]\n["numbers", "", 2, 2')
    cut = SentJournal(path)
    assert (cut.identity, cut.last("")) == ("first", 1)
    cut.add_numbers("", [(2, b"two")])
    cut.add_table("samples", 2)
    again = SentJournal(path)
    assert (again.identity, again.last(""), again.has("", 2, b"two")) == ("first", 2, True)
    assert again.tables == {("samples", 2)}


def test_a_loop_that_runs_ahead_sends_no_table_of_one_that_is_behind(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    following = follower(directory, Notes(str(out)))
    steps(directory, {step: {"loss": 1.0} for step in (1, 2, 3)}, "rollout")
    following.follow()
    directory.write_samples(1, 0, [SAMPLE])
    steps(directory, {1: {"loss": 1.0}})
    following.follow()
    assert notes(out, "table") == [], "the other rank has not written its samples yet"
    directory.write_samples(1, 1, [SAMPLE])
    steps(directory, {2: {"loss": 1.0}})
    following.follow()
    ((name, step, _, rows),) = notes(out, "table")
    assert (name, step, len(rows)) == ("samples", 1, 2)


def test_an_evaluation_sends_its_own_table_alone(tmp_path: Path) -> None:
    directory, out = begin(tmp_path / "run"), tmp_path / "notes"
    directory.write_samples(3, 0, [SAMPLE])
    directory.write_samples(3, 0, [SAMPLE], kind="evaluation")
    steps(directory, {2: {"loss": 1.0}})
    steps(directory, {3: {"evaluation/mean@1": 1.0}}, "evaluation")
    follower(directory, Notes(str(out)), every=3).follow(is_over=True)
    assert [(name, step) for name, step, _, _ in notes(out, "table")] == [("evaluation/samples", 3)]


def test_a_table_has_a_bounded_number_of_rows(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    directory.write_samples(1, 0, [SAMPLE] * (MAX_ROWS - 1))
    directory.write_samples(1, 1, [SAMPLE] * 3)
    (table,) = tables_of(directory.path, "step", 1)
    assert len(table.rows) == MAX_ROWS
