"""What a run shows and writes while it is running: the terminal, the trace, the run directory."""

from __future__ import annotations

import io
import json
import math
import os
import re
import socket
import time
from datetime import timedelta
from pathlib import Path

import pytest
from rich.console import Console

from leaderless.observability import console as observability_console
from leaderless.observability.clock import Tracer
from leaderless.observability.console import Display
from leaderless.observability.line_file import StepLog
from leaderless.observability.report.run_files import read_run
from leaderless.observability.run_directory import (
    MANIFEST,
    RunDirectory,
    list_checkpoints,
    read_lines,
    write_atomically,
)
from leaderless.worker.rank_info import RankInfo

NUMBERS = {"reward/mean": 0.5, "policy/loss": 1.25, "evaluation/mean@4": 0.75, "time/step": 3.0}


def display(*, is_terminal: bool = False, is_shown: bool = True) -> tuple[Display, io.StringIO]:
    text = io.StringIO()
    console = Console(file=text, width=200, force_terminal=is_terminal, legacy_windows=False)
    return Display(console, is_shown=is_shown), text


# The terminal.


def test_lines_are_rare_without_a_terminal_and_the_last_step_is_always_said(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, text = display()
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    shown.start(50, 0)
    for step in range(1, 51):
        clock += 1.0
        shown.step(step, 50, NUMBERS | {"reward/mean": step / 100})
    shown.stop()
    lines = text.getvalue().splitlines()
    assert [line.split("  ")[0] for line in lines] == [f"step {n}/50" for n in (1, 12, 23, 34, 45, 50)]
    assert "accuracy 0.750 (step 50)  reward 0.500  loss 1.2500" in lines[-1]
    assert "left" not in lines[0]
    assert "  0:00:12 left 0:00:38  " in lines[1]
    assert "  0:00:50 left 0:00:00  " in lines[-1]
    assert "time" not in lines[-1]


def test_the_time_left_counts_steps_and_evaluations_apart_and_no_warm_up(monkeypatch: pytest.MonkeyPatch) -> None:
    shown, text = display()
    clock = 100.0
    monkeypatch.setattr(time, "monotonic", lambda: clock)
    shown.start(9, 0, evaluate_every=4)
    seconds = {0: 0.0, 1: 600.0, 2: 20.0, 3: 20.0, 4: 20.0, 5: 20.0}
    for step, step_s in seconds.items():
        evaluated = {"evaluation/mean@1": step / 10, "time/evaluate": 500.0} if step % 4 == 0 else {}
        clock += step_s + evaluated.get("time/evaluate", 0.0)
        shown.step(step, 9, {"policy/loss": -1e-6} | evaluated)
    lines = text.getvalue().splitlines()
    # Of steps 6 to 9, with evaluations after steps 8 and 9.
    assert [line.partition(" left ")[2].partition("  ")[0] for line in lines] == [
        "",
        "",
        str(timedelta(seconds=7 * 20 + 3 * 500)),
        str(timedelta(seconds=6 * 20 + 3 * 500)),
        str(timedelta(seconds=5 * 20 + 2 * 500)),
        str(timedelta(seconds=4 * 20 + 2 * 500)),
    ]
    assert "accuracy 0.000 (step 0)  loss 0.0000" in lines[3]
    assert "accuracy 0.400 (step 4)  loss 0.0000" in lines[5]


def test_what_takes_long_is_said_unless_a_live_line_shows_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(observability_console, "STATUS_EVERY_S", 0.0)
    quiet, nothing = display(is_shown=False)
    shown, text = display()
    shown.status = lambda: "step 1: generating [3]/64"
    live, line = display(is_terminal=True)
    live.status = lambda: "not [said] twice"
    live.start(3, 0)
    with quiet, shown, live:
        deadline = time.monotonic() + 20
        while text.getvalue().count("\n") < 2:
            assert time.monotonic() < deadline
            time.sleep(0.01)
    live.stop()
    assert re.fullmatch(r"(step 1: generating \[3\]/64  0:00:0\d\n){2,3}", text.getvalue())
    assert "step 1" not in line.getvalue()
    assert "not [said] twice" in line.getvalue()
    assert line.getvalue().count("\n") == 1
    assert nothing.getvalue() == ""


def test_a_line_tells_of_episodes_where_there_are_any() -> None:
    shown, text = display()
    shown.start(1, 0)
    shown.step(1, 1, {"reward/mean": 0.5, "episode/turns": 2.25, "tool/calls": 1.5, "tool/calls/add": 1.0})
    shown.stop()
    assert "reward 0.500  turns 2.2  calls 1.5" in text.getvalue()


def test_a_terminal_shows_step_numbers_and_what_is_being_done() -> None:
    shown, text = display(is_terminal=True)
    shown.start(5, 2)
    shown.step(3, 5, NUMBERS)
    shown.status = lambda: "reading [/old]/rows.jsonl 25%"
    shown.stop()
    assert "3/5" in text.getvalue()
    assert "reward 0.500" in text.getvalue()
    assert "reading [/old]/rows.jsonl 25%" in text.getvalue()
    shown.stop()


def test_the_summary_compares_the_first_with_the_last_value() -> None:
    shown, text = display()
    shown.summary("nothing yet")
    assert text.getvalue() == ""
    shown.step(1, 3, {"reward/mean": 0.125})
    shown.step(2, 3, {"reward/mean": 0.25, "policy/kl": 0.5})
    shown.step(3, 3, {"reward/mean": 0.875})
    shown.summary("changes")
    row = next(line for line in text.getvalue().splitlines() if "(reward/mean)" in line)
    assert [cell.strip() for cell in row.strip("│").split("│")] == ["reward (reward/mean)", "0.125", "0.875"]
    assert "kl (policy/kl)" in text.getvalue()


@pytest.mark.parametrize("is_terminal", [False, True])
def test_failed_rewards_are_on_the_progress_line_with_their_first_error(is_terminal: bool) -> None:
    shown, text = display(is_terminal=is_terminal)
    shown.start(2, 0)
    shown.step(1, 2, NUMBERS | {"reward/failed_share": 0.0}, "")
    assert "failed" not in text.getvalue()
    shown.step(2, 2, NUMBERS | {"reward/failed_share": 0.25}, "math: KeyError: ':warning:' [/red] " + "x" * 1000)
    shown.stop()
    plain = " ".join(re.sub(r"\x1b\[[^a-zA-Z]*[a-zA-Z]", "", text.getvalue()).split())
    assert "rewards failed 25%," in plain
    assert "KeyError: ':warning:' [/red]" in plain
    assert plain.count("x") < 200


def test_the_first_error_of_a_reward_is_kept(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path)
    assert directory.first_reward_error() == ""
    directory.append_event("restart", {"rank": 0})
    directory.note_reward_error(1, 0, "math", "KeyError: 'a'")
    directory.note_reward_error(2, 1, "format", "another")
    assert RunDirectory(tmp_path).first_reward_error() == "math: KeyError: 'a'"
    assert len(directory.events.read_text().splitlines()) == 2


def test_other_ranks_show_nothing() -> None:
    shown, text = display(is_terminal=True, is_shown=False)
    shown.say("hello")
    shown.start(3, 0)
    shown.step(3, 3, NUMBERS)
    shown.summary("x")
    shown.stop()
    assert text.getvalue() == ""


# The trace.


def spans(path: Path) -> list[dict[str, object]]:
    return [event for event in json.loads(path.read_text()) if event["ph"] == "X"]


def test_a_trace_is_valid_and_spans_last_as_long_as_what_they_time(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "trace/rank-3.json", 3)
    begin = time.time_ns() / 1000
    with tracer.span("outer", 1), tracer.span("inner", 1):
        time.sleep(0.02)
    with pytest.raises(ValueError, match="x"), tracer.span("fails", 2):
        raise ValueError("x")
    seconds = tracer.take_seconds()
    tracer.close()
    events = {str(event["name"]): event for event in spans(tmp_path / "trace/rank-3.json")}
    inner, outer = events["inner"], events["outer"]
    assert begin <= outer["ts"] <= inner["ts"] <= time.time_ns() / 1000  # type: ignore[operator]
    assert 20_000 <= inner["dur"] <= outer["dur"] < 1e6  # type: ignore[operator]
    assert inner["dur"] == pytest.approx(seconds["inner"] * 1e6)
    assert events["fails"]["args"] == {"step": 2}
    names = [event for event in json.loads((tmp_path / "trace/rank-3.json").read_text()) if event["ph"] == "M"]
    host, name = (event["args"] for event in names if event["pid"] == 3)
    assert (host, name) == ({"labels": socket.gethostname()}, {"name": "rank 3"})


def test_a_trace_of_a_killed_rank_has_all_steps_but_the_last(tmp_path: Path) -> None:
    tracer = Tracer(tmp_path / "rank-0.json", 0)
    with tracer.span("rollout", 1):
        pass
    tracer.take_seconds()
    assert '"rollout"' in (tmp_path / "rank-0.json").read_text(), "nobody closes the file of a process that is killed"
    tracer.close()


def test_a_trace_goes_on_where_an_earlier_start_ended_even_in_the_middle_of_a_line(tmp_path: Path) -> None:
    path = tmp_path / "rank-0.json"
    for name, torn in (("first", ""), ("second", '{"name": "thi'), ("third", "")):
        tracer = Tracer(path, 0)
        with tracer.span(name, 1):
            pass
        tracer.close()
        with path.open("a") as file:
            file.write(torn)
    assert [event["name"] for event in spans(path)] == ["first", "second", "third"]


def test_times_are_taken_without_a_file_and_only_once(tmp_path: Path) -> None:
    for tracer in (Tracer(None, 0), Tracer(tmp_path / "rank-0.json", 0)):
        tracer.close()
        for _ in range(2):
            with tracer.span("load", 1):
                pass
        assert tracer.take_seconds()["load"] > 0
        assert tracer.take_seconds() == {}
        tracer.close()


# The run directory.


def test_lines_of_lost_steps_are_forgotten_with_their_samples(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    run.path.mkdir()
    assert list(run.read_metrics()) == []
    log = StepLog(run)
    for step in range(6):
        log.write(step, {"loss": step / 2})
        run.write_samples(step, 0, [{"step": step, "text": "naïve\n"}])
        run.write_samples(step, 12, [{"step": step}])
    with run.metrics.open("a") as file:
        file.write('[6]\n6\nnull\n{"loss": 1}\n{"step": "6"}\n{"step": 6, "los')
    log.open(4)
    run.forget_samples(3, 3)
    assert [record["step"] for record in run.read_metrics()] == [0, 1, 2, 3]
    assert len(run.metrics.read_text().splitlines()) == 4
    names = sorted(path.name for path in run.samples.iterdir())
    assert names == sorted(f"step-{step:06d}.rank-{rank}.jsonl" for step in range(4) for rank in (0, 12))
    assert json.loads((run.samples / "step-000003.rank-0.jsonl").read_text())["text"] == "naïve\n"


def test_each_loop_forgets_what_its_own_ranks_do_again(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for step in range(1, 6):
        for rank in (0, 1):
            run.write_samples(step, rank, [])
        run.write_samples(step, 0, [], "evaluation")
    run.forget_samples(4, 2, lambda rank: rank == 0)  # two iterations ahead of training
    run.forget_samples(2, 2, lambda rank: rank == 1)
    assert sorted(path.name for path in run.samples.iterdir()) == [
        *(f"evaluation-00000{step}.rank-0.jsonl" for step in (1, 2)),
        *sorted(
            f"step-00000{step}.rank-{rank}.jsonl" for rank, last in ((0, 4), (1, 2)) for step in range(1, last + 1)
        ),
    ]


def test_the_logs_of_loops_are_read_as_one(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    logs = {name: StepLog(run, name) for name in ("", "rollout", "evaluation")}
    for step in range(1, 5):
        logs["rollout"].write(step, {"rollout/truncated": step / 8, "time/step": 1.0})
    for step in (0, 2):
        logs["evaluation"].write(step, {"evaluation/mean@1": step / 4})
    for step in (1, 2):
        logs[""].write(step, {"policy/loss": -step, "time/step": 2.0})
    assert list(run.read_metrics()) == [
        {"step": 0, "evaluation/mean@1": 0.0},
        {"step": 1, "rollout/truncated": 0.125, "time/step": 2.0, "policy/loss": -1},
        {"step": 2, "evaluation/mean@1": 0.5, "rollout/truncated": 0.25, "time/step": 2.0, "policy/loss": -2},
    ]
    assert read_run(tmp_path).steps == (0, 1, 2)
    assert set(read_run(tmp_path).series) == {"evaluation/mean@1", "rollout/truncated", "time/step", "policy/loss"}
    assert read_run(tmp_path).series["time/step"].values == (2.0, 2.0)
    logs["rollout"].open(3)
    assert [record["step"] for record in read_lines(run.metrics_of("rollout"), "step")] == [1, 2]


def test_metrics_are_json_whatever_their_values(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    log = StepLog(run)
    log.write(1, {"loss": math.nan, "norm": math.inf, "reward": 0.5})
    for _ in range(2):
        line = json.loads(run.metrics.read_text(), parse_constant=pytest.fail)
        assert line == {"step": 1, "loss": None, "norm": None, "reward": 0.5}
        (record,) = run.read_metrics()
        assert math.isnan(record["loss"])
        log.open(2)


def test_the_newest_checkpoint_is_that_of_most_steps(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    for name in ("step-1000000", "step-999999", "step-000002.copy", "step-000003"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / MANIFEST).touch()
    (run.checkpoints / "step-2000000").mkdir()  # is not complete
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000003", "step-999999", "step-1000000"]
    assert run.last_step() == 1_000_000


def test_only_complete_checkpoints_count(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    assert run.last_step() == 0
    for name in ("step-000009", "step-000100", ".step-000200.partial", "other"):
        (run.checkpoints / name).mkdir(parents=True)
        (run.checkpoints / name / MANIFEST).touch()
    (run.checkpoints / "step-000300").write_text("no folder")
    assert [path.name for path in list_checkpoints(run.checkpoints)] == ["step-000009", "step-000100"]
    assert run.last_step() == 100


def test_a_run_that_is_set_aside_keeps_all_and_leaves_its_recipe(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path / "run")
    for number in (1, 2):
        run.path.mkdir(exist_ok=True)
        run.config.write_text(f"name: {number}")
        StepLog(run).write(number, {})
        assert run.set_aside() == tmp_path / f"run.{number}"
        assert [path.name for path in run.path.iterdir()] == ["config.yaml"]
    assert (tmp_path / "run.1/config.yaml").read_text() == "name: 1"
    assert (tmp_path / "run.2/metrics.jsonl").read_text() == '{"step": 2}\n'


def test_a_file_is_replaced_whole_or_stays_as_it_was(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "new/folder/file.txt"
    write_atomically(path, "first")

    def fail(self: Path, target: Path) -> None:
        raise OSError("no space left on device")

    monkeypatch.setattr(Path, "replace", fail)
    with pytest.raises(OSError, match="no space left"):
        write_atomically(path, "second")
    assert path.read_text() == "first"


# Places.


def test_a_place_is_what_torch_elastic_says(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)
    assert not RankInfo.is_given()
    assert RankInfo.from_environment() == RankInfo(0, 1, 0, 1)
    for name, value in {"RANK": "5", "WORLD_SIZE": "8", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "4"}.items():
        monkeypatch.setenv(name, value)
    assert RankInfo.is_given()
    assert RankInfo.from_environment() == RankInfo(5, 8, 1, 4)


def test_two_processes_never_write_into_one_run(tmp_path: Path) -> None:
    directory = RunDirectory(tmp_path / "runs" / "a")
    with directory.held():
        with pytest.raises(BlockingIOError, match=rf"process {os.getpid()} on "), directory.held():
            pass
        with RunDirectory(tmp_path / "runs" / "b").held():
            pass
        directory.path.mkdir()
        directory.set_aside()
        with pytest.raises(BlockingIOError), directory.held():
            pass
    with directory.held():
        pass
