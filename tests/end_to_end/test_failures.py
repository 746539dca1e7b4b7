"""Runs that are stopped, killed, out of disk space or failed by a user's code end in time, and say why."""

from __future__ import annotations

import resource
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, suppress
from pathlib import Path

import psutil
import pytest
from tests.end_to_end.alone import run_alone
from tests.end_to_end.cli import Outcome, finish, metrics, start
from tests.end_to_end.failing import WORKFLOW
from tests.tiny import tiny_model, write_recipe

from leaderless.worker.supervision import stop

END_S = 90.0
"""Longest time for a run to end: many times what it needs, because other processes may use the same cores."""
START_S = 300.0
SAVED_AT_ONCE = ("checkpoint.every_steps=1", "checkpoint.asynchronous=false")
"""Settings with which no checkpoint is still being written when a worker is killed."""
SETTINGS = {"workflow": "failing.yaml", "steps": 100_000, "run.trace_steps": 2, "run.max_restarts": 0}


@pytest.fixture
def recipe(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FAIL", "")
    (tmp_path / "failing.yaml").write_text(WORKFLOW)
    return write_recipe(tmp_path, tiny_model(), SETTINGS)


def train(folder: Path, recipe: Path, *arguments: object, is_forked: bool = True) -> subprocess.Popen[str]:
    """Start two workers."""
    return start(folder, "leaderless", "train", recipe, "--workers", 2, *arguments, is_forked=is_forked)


def wait_until(condition: Callable[[], object], process: subprocess.Popen[str]) -> None:
    end = time.monotonic() + START_S
    while not condition():
        assert process.poll() is None, process.communicate()
        assert time.monotonic() < end
        time.sleep(0.02)


def num_steps(folder: Path) -> int:
    log = folder / "runs/tiny/metrics.jsonl"
    return log.read_text().count("\n") if log.exists() else 0


def checkpoints(folder: Path) -> list[str]:
    return sorted(path.name for path in (folder / "runs/tiny/checkpoints").glob("*"))


def descendants(process: subprocess.Popen[str]) -> list[psutil.Process]:
    return psutil.Process(process.pid).children(recursive=True)


def none_is_left(processes: Sequence[psutil.Process]) -> bool:
    """Whether all have ended within a short time; those that have not are killed."""
    _, alive = psutil.wait_procs(processes, timeout=END_S)
    for process in alive:
        process.kill()
    return not alive


def test_a_run_is_stopped_goes_on_is_terminated_and_outlives_no_launcher(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "temporary").mkdir()
    monkeypatch.setenv("TMPDIR", str(tmp_path / "temporary"))
    process = train(tmp_path, recipe)
    wait_until(lambda: num_steps(tmp_path) >= 2, process)
    started = descendants(process)
    assert sum("tests.forking" in child.cmdline() for child in started) == 2 + 1, "workers are forked, and the nursery"
    process.send_signal(signal.SIGINT)
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)  # as tools do that signal the process and its group
    asked = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - asked < END_S
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert outcome.errors == ""
    assert "press Ctrl-C again to stop at once" in outcome.output
    assert none_is_left(started)
    (first,) = checkpoints(tmp_path)
    assert first == f"step-{num_steps(tmp_path):06d}"
    assert f"the same command continues from runs/tiny/checkpoints/{first}" in outcome.output.replace(
        f"{tmp_path}/", ""
    )
    assert (tmp_path / "runs/tiny/report.html").exists()

    process = train(tmp_path, recipe)
    before = num_steps(tmp_path)
    wait_until(lambda: num_steps(tmp_path) >= before + 2, process)
    process.send_signal(signal.SIGTERM)
    outcome = finish(process)
    assert outcome.code == 128 + signal.SIGTERM, outcome
    assert f"continuing from step {before}" in outcome.output
    assert outcome.errors == ""
    assert len(checkpoints(tmp_path)) == 2

    process = train(tmp_path, recipe)
    before = num_steps(tmp_path)
    wait_until(lambda: num_steps(tmp_path) >= before + 2, process)
    started = descendants(process)
    process.kill()
    assert none_is_left(started), "workers end when their launcher is killed"
    finish(process)
    assert list((tmp_path / "temporary").iterdir()) == [], "nor does the folder in which workers meet"
    assert checkpoints(tmp_path)[-1] == f"step-{num_steps(tmp_path):06d}", "and save what they have"

    before = num_steps(tmp_path)
    outcome = run_alone(tmp_path, "train", recipe, f"steps={before + 1}")
    assert f"continuing from step {before}" in outcome.output, "on another number of workers"
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == list(range(1, before + 2))


def test_ctrl_c_while_workers_start_ends_them_without_a_word_too_many(tmp_path: Path, recipe: Path) -> None:
    process = train(tmp_path, recipe, is_forked=False)
    wait_until(lambda: len(psutil.Process(process.pid).children()) == 2, process)
    started = descendants(process)
    process.send_signal(signal.SIGINT)
    outcome = finish(process)
    assert outcome.code == 128 + signal.SIGINT, outcome
    assert outcome.errors == ""
    assert "stopped before another checkpoint was written" in outcome.output
    assert none_is_left(started)


def test_a_killed_rank_ends_all_and_is_named(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "killed@1")
    process = train(tmp_path, recipe, *SAVED_AT_ONCE)
    wait_until(lambda: num_steps(tmp_path) >= 1, process)
    begin = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - begin < END_S
    assert outcome.code == 1
    assert "error rank 1 was ended by SIGKILL" in outcome.errors
    assert "Traceback" not in outcome.errors
    assert "saved up to step 1: the same command continues from there" in outcome.output


def test_the_first_cause_is_shown_and_not_what_peers_see_of_it(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 1 waits in the databuffer for rows that rank 0 has failed to make."""
    monkeypatch.setenv("FAIL", "error@0")
    process = train(tmp_path, recipe, "layout={fail: {ranks: 0}, advantage: {ranks: 1}, policy: {ranks: 0-1}}")
    wait_until(lambda: num_steps(tmp_path) >= 1, process)
    begin = time.monotonic()
    outcome = finish(process)
    assert time.monotonic() - begin < END_S
    assert outcome.code == 1
    assert outcome.errors.count("Traceback") == 1
    assert 'error rank 0 failed: KeyError: "the user\'s own mistake" (at step 2, in fail, on rank 0)' in outcome.errors
    assert "gloo" not in outcome.errors


def alone(folder: Path, recipe: Path, *arguments: object) -> tuple[Outcome, list[psutil.Process]]:
    """Train with one worker, as a person does, and record what it starts."""
    process = start(folder, "leaderless", "train", recipe, "--workers", 1, *arguments)
    started: set[psutil.Process] = set()
    while process.poll() is None:
        with suppress(psutil.NoSuchProcess):
            started |= set(descendants(process))
        time.sleep(0.05)
    return finish(process), list(started)


@pytest.mark.parametrize("failure", [pytest.param("", marks=pytest.mark.thorough), "killed@0@2"])
def test_a_single_worker_that_is_killed_is_reported_and_nothing_is_left_of_any(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, failure: str
) -> None:
    monkeypatch.setenv("FAIL", failure)
    (tmp_path / "once").mkdir()
    monkeypatch.setenv("FAIL_ONCE", str(tmp_path / "once"))
    reward = "reward={'tests.end_to_end.failing:leave_behind': 1.0}"
    outcome, started = alone(tmp_path, recipe, reward, "steps=2", *SAVED_AT_ONCE)
    if failure:
        assert outcome.code == 1
        assert "error rank 0 was ended by SIGKILL at step 2, in fail, as the system does when memory" in outcome.errors
        assert "lower batch.micro_batch_tokens" in outcome.errors
        assert "Traceback" not in outcome.errors
        assert "saved up to step 1" in outcome.output
    else:
        assert (outcome.code, outcome.errors) == (0, "")
    assert len(started) > 2
    assert none_is_left(started), "what a reward has left behind is ended"


@pytest.mark.parametrize(("step", "restarts"), [(1, 0), (2, 1)])
def test_a_users_bug_ends_the_run_with_its_traceback_last(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, step: int, restarts: int
) -> None:
    monkeypatch.setenv("FAIL", "error")
    monkeypatch.setenv("FAIL_AT", str(step))
    outcome, _ = alone(tmp_path, recipe, "run.max_restarts=3", "checkpoint.every_steps=1")
    assert outcome.code == 1
    assert outcome.output.count("starting again") == restarts
    *trace, last = outcome.errors.splitlines()
    assert trace[0] == "Traceback (most recent call last):"
    assert any("in raise_error" in line for line in trace)
    assert last.startswith(f'error rank 0 failed: KeyError: "the user\'s own mistake" (at step {step}, in fail')


@pytest.mark.parametrize("how", ["interrupt", pytest.param("terminate", marks=pytest.mark.thorough)])
def test_a_single_worker_is_stopped_with_a_checkpoint_and_goes_on(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, how: str
) -> None:
    monkeypatch.setenv("FAIL", how)
    outcome = run_alone(tmp_path, "train", recipe)
    assert outcome.code == 128 + (signal.SIGINT if how == "interrupt" else signal.SIGTERM)
    assert outcome.errors == ""
    assert checkpoints(tmp_path) == ["step-000002"]
    monkeypatch.setenv("FAIL", "")
    outcome = run_alone(tmp_path, "train", recipe, "steps=3")
    assert outcome.code == 0, outcome
    assert "continuing from step 2" in outcome.output


def test_a_second_ctrl_c_ends_at_once(tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FAIL", "interrupt twice")
    monkeypatch.setattr(stop, "INTERRUPT_GRACE_S", 1e6)  # this process must not be ended
    before, begin = signal.getsignal(signal.SIGINT), time.monotonic()
    outcome = run_alone(tmp_path, "train", recipe)
    assert time.monotonic() - begin < 120, "the stage would sleep for longer"
    assert outcome.code == 128 + signal.SIGINT
    assert "stopped before another checkpoint was written" in outcome.output
    assert checkpoints(tmp_path) == []
    assert signal.getsignal(signal.SIGINT) is before, "signals are given back"


def test_an_error_of_a_users_stage_is_shown_from_where_the_command_begins(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "error")
    outcome = run_alone(tmp_path, "train", recipe, "checkpoint.every_steps=1")
    assert outcome.code == 1
    assert "typer" not in outcome.errors
    assert "in raise_error" in outcome.errors
    last = outcome.errors.splitlines()[-1]
    assert last == 'error KeyError: "the user\'s own mistake" (at step 2, in fail, on rank 0)'
    assert "saved up to step 1" in outcome.output


def test_rewards_that_hang_or_raise_are_counted_and_nothing_else(tmp_path: Path) -> None:
    reward = {"tests.end_to_end.failing:hang_sometimes": {"timeout_s": 0.3}}
    changes = {"reward": reward, "steps": 1, "batch.prompts_per_step": 2, "run.reward_processes": 2}
    changes |= {"guards.reward_failures_limit": None}
    before = set(psutil.Process().children())
    outcome = run_alone(tmp_path, "train", write_recipe(tmp_path, tiny_model(), changes))
    assert outcome.code == 0, outcome
    (line,) = metrics(tmp_path / "runs/tiny")
    assert 0 < line["reward/failed"] <= 8
    started = set(psutil.Process().children()) - before
    assert not [child for child in started if "spawn_main" in " ".join(child.cmdline())]


@contextmanager
def files_no_larger_than(size: int) -> Iterator[None]:
    """Every write beyond this fails, as on a full disk."""
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


@pytest.mark.parametrize(
    ("size", "what"),
    [(40_000, "while writing checkpoint"), pytest.param(2_000, "File too large", marks=pytest.mark.thorough)],
)
def test_a_disk_that_is_full_is_named_and_the_last_checkpoint_stays(
    tmp_path: Path, recipe: Path, size: int, what: str
) -> None:
    assert run_alone(tmp_path, "train", recipe, "steps=1").code == 0
    before = {path: path.read_bytes() for path in (tmp_path / "runs/tiny/checkpoints").rglob("*") if path.is_file()}
    with files_no_larger_than(size):
        outcome = run_alone(tmp_path, "train", recipe, "steps=2")
    assert outcome.code == 1, outcome
    assert what in outcome.errors
    assert "make room, or name another run.directory" in outcome.errors
    assert "Traceback" not in outcome.errors
    assert "saved up to step 1" in outcome.output
    assert checkpoints(tmp_path) == ["step-000001"], "nothing half-written is left"
    assert all(path.read_bytes() == content for path, content in before.items())
    outcome = run_alone(tmp_path, "train", recipe, "steps=2")
    assert (outcome.code, outcome.errors) == (0, "")
    assert [line["step"] for line in metrics(tmp_path / "runs/tiny")] == [1, 2]


@pytest.mark.parametrize(
    ("size", "settings", "what"),
    [
        (30_000, "checkpoint.asynchronous=true", "a checkpoint could not be written"),
        pytest.param(
            30_000, "checkpoint.asynchronous=false", "a checkpoint could not be written", marks=pytest.mark.thorough
        ),
        (1, "checkpoint.every_steps=0", "metrics.jsonl cannot be written: File too large; training continues"),
    ],
)
def test_training_goes_on_while_a_disk_is_full_and_says_so(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch, size: int, settings: str, what: str
) -> None:
    (tmp_path / "failing.yaml").write_text(WORKFLOW.replace("failing:fail", "disk_full:fail"))
    monkeypatch.setenv("FULL_AT", "1000000000")
    outcome = run_alone(tmp_path, "train", recipe, "name=undisturbed", "steps=4")
    assert outcome.code == 0, outcome
    monkeypatch.setenv("FULL_AT", str(size))
    arguments = ("checkpoint.every_steps=1", "run.trace_steps=4", settings)
    outcome = run_alone(tmp_path, "train", recipe, "steps=4", *arguments)
    assert outcome.code == 0, outcome
    assert what in outcome.output
    assert checkpoints(tmp_path)[-1] == "step-000004"
    assert metrics(tmp_path / "runs/tiny") == metrics(tmp_path / "runs/undisturbed"), "no line is lost"


def test_a_report_that_cannot_be_written_does_not_hide_why_a_run_failed(
    tmp_path: Path, recipe: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("FAIL", "error")
    (tmp_path / "runs/tiny/report.html/in the way").mkdir(parents=True)
    outcome = run_alone(tmp_path, "train", recipe)
    assert outcome.code == 1
    assert "the report could not be written" in outcome.output
    assert "the user's own mistake" in outcome.errors.splitlines()[-1]
