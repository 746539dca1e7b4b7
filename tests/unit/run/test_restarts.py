"""When failed workers are started again, and which messages are printed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path

import pytest

from leaderless.config import RecipeError
from leaderless.observability.line_file import StepLog
from leaderless.observability.run_directory import MANIFEST, RunDirectory
from leaderless.run.launch.rendezvous import Nodes
from leaderless.run.launch.restarts import SAME_ERRORS, SAME_FAILURES, Restarts
from leaderless.worker.supervision.failure import FOLDER_VARIABLE, STEPS_BEGUN, note_place, reported_failures

KILLED = {1: -9}


def write_checkpoint(directory: RunDirectory, step: int) -> None:
    """Make something that counts as a checkpoint: a folder with a manifest."""
    folder = directory.checkpoints / f"step-{step:06d}"
    folder.mkdir(parents=True, exist_ok=True)
    (folder / MANIFEST).touch()


class Run:
    """A run whose workers fail, without processes."""

    def __init__(self, folder: Path, monkeypatch: pytest.MonkeyPatch, max_restarts: int) -> None:
        self.directory, self._folder, self._monkeypatch = RunDirectory(folder / "run"), folder, monkeypatch
        self.directory.path.mkdir()
        self.said: list[str] = []
        self._starts = 0
        self.restarts = Restarts(self.directory, max_restarts, self.said.append)

    def come_to(self, step: int, *, saved: int) -> None:
        for number in range(1, step + 1):
            StepLog(self.directory).write(number, {})
        write_checkpoint(self.directory, saved)

    def fail(
        self,
        codes: Mapping[int, int],
        error: Exception | None = None,
        *,
        has_begun: bool = True,
        is_stopping: bool = False,
    ) -> bool:
        """Whether there is another start."""
        self._starts += 1
        round_folder = self._folder / str(self._starts)
        round_folder.mkdir()
        if has_begun:
            (round_folder / STEPS_BEGUN).touch()
        self._monkeypatch.setenv(FOLDER_VARIABLE, str(round_folder))
        if error is not None:
            with pytest.raises(SystemExit), reported_failures(min(codes)):
                raise error
        return self.restarts.failed(codes, round_folder, is_stopping=is_stopping)

    def why_it_ended(self) -> str:
        assert self.restarts.failure is not None
        return self.restarts.failure.message

    def events(self) -> list[dict[str, object]]:
        return [json.loads(line) for line in self.directory.events.read_text().splitlines()]


@pytest.fixture
def run(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Run:
    return Run(tmp_path, monkeypatch, max_restarts=2)


def test_what_died_and_what_is_lost_is_said_and_written_down(run: Run) -> None:
    run.come_to(7, saved=4)
    assert run.fail(KILLED)
    run.restarts.begun()
    lost, resumed = run.events()
    assert lost["event"] == "restart"
    assert (lost["rank"], lost["from_step"], lost["lost_steps"]) == (1, 4, 3)
    assert str(lost["cause"]).startswith("rank 1 was ended by SIGKILL")
    assert (resumed["event"], resumed["from_step"]) == ("resumed", 4)
    assert "starting again from the checkpoint of step 4; 3 steps will be done again (restart 1 of 2)" in run.said[0]
    assert "back at work" in run.said[1]
    run.restarts.begun()
    assert len(run.events()) == 2, "another start that no failure caused is none that had to be waited for"


def test_restarts_without_progress_are_counted_and_a_checkpoint_gives_them_back(run: Run) -> None:
    run.come_to(1, saved=1)
    assert run.fail({0: -9})
    assert run.fail({1: -9})
    run.come_to(2, saved=2)
    assert run.fail({2: -9})
    assert run.fail({3: -9})
    assert not run.fail({4: -9})
    assert "run.max_restarts=2 restarts have led to no new checkpoint" in run.why_it_ended()


@pytest.mark.parametrize(
    ("error", "times"), [(ConnectionError("always"), SAME_FAILURES), (ValueError("always"), SAME_ERRORS)]
)
def test_the_same_failure_at_the_same_step_is_not_repeated_for_ever(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception, times: int
) -> None:
    run = Run(tmp_path, monkeypatch, max_restarts=100)
    run.come_to(3, saved=2)
    outcomes = [run.fail({1: 1}, error) for _ in range(times)]
    assert outcomes == [True] * (times - 1) + [False]
    expected = f"rank 1 failed: {type(error).__name__}: always; it has come up {times} times after step 3"
    assert expected in run.why_it_ended()


def test_an_error_at_the_same_line_is_the_same_whatever_it_says(run: Run) -> None:
    run.come_to(3, saved=2)
    assert run.fail({1: 1}, ValueError("object at 0x1"))
    assert not run.fail({0: 1}, ValueError("object at 0x2"))


def test_an_error_in_the_first_step_ends_the_run_unless_it_may_pass(run: Run) -> None:
    assert run.fail({0: 1}, ConnectionError("no route to host"))
    run.restarts = Restarts(run.directory, 2, print)
    assert not run.fail({0: 1}, KeyError("typing mistake"))
    assert "it came up in the first step" in run.why_it_ended()
    assert run.restarts.failure is not None
    assert "typing mistake" in run.restarts.failure.trace


def test_a_run_that_continues_takes_its_next_step_as_the_first(run: Run) -> None:
    run.come_to(3, saved=3)
    run.restarts = Restarts(run.directory, 2, print)
    assert not run.fail({0: 1}, KeyError("typing mistake"))


@pytest.mark.parametrize(
    ("place", "words"),
    [
        (None, "rank 1 was ended by SIGKILL before the first step, as the system does when memory runs out: lower"),
        ((7, "policy"), "by SIGKILL at step 7, in policy, as the system does when memory runs out: lower batch.micro"),
        ((7, "checkpoint"), "at step 7, in checkpoint, as the system does when memory runs out: set checkpoint.async"),
    ],
)
def test_where_a_worker_was_killed_and_what_to_do_is_said(
    run: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, place: tuple[int, str] | None, words: str
) -> None:
    folder = tmp_path / "1"
    monkeypatch.setenv(FOLDER_VARIABLE, str(folder))
    if place is not None:
        folder.mkdir()
        note_place(1, 6, "an entry with a longer name")
        note_place(1, *place)
        folder.rename(tmp_path / "kept")
    restarts = Restarts(run.directory, 0, print)
    assert not restarts.failed(KILLED, tmp_path / "kept", is_stopping=False)
    assert restarts.failure is not None
    assert words in restarts.failure.message


def test_errors_elsewhere_are_not_the_same(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, max_restarts=100)
    for step in (1, 2, 3, 4):
        run.come_to(step, saved=0)
        assert run.fail({1: 1}, ValueError("always"))


def test_what_the_user_has_to_correct_ends_the_run(run: Run) -> None:
    assert not run.fail({0: 2}, RecipeError.at("data", "all rows are overlong"))
    assert run.why_it_ended() == "data: all rows are overlong"


def test_an_error_before_the_first_step_ends_the_run_but_not_after_a_restart(run: Run) -> None:
    run.come_to(1, saved=1)
    assert run.fail(KILLED)
    assert run.fail({0: 1}, OSError("the machine has not come to itself yet"), has_begun=False)
    again = Restarts(run.directory, 2, print)
    run.restarts = again
    assert not run.fail({0: 1}, KeyError("typing mistake"), has_begun=False)
    assert "before the first step" in run.why_it_ended()


def test_none_are_started_again_where_none_are_allowed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    run = Run(tmp_path, monkeypatch, max_restarts=0)
    assert not run.fail(KILLED)
    assert run.why_it_ended().startswith("rank 1 was ended by SIGKILL")
    assert not run.directory.events.exists()


def test_workers_that_were_asked_to_stop_are_not_started_again(run: Run) -> None:
    assert not run.fail(KILLED, is_stopping=True)
    assert run.restarts.failure is None, "it is as it should be"
    assert not run.fail({0: 1}, ValueError("while stopping"), is_stopping=True)
    assert "ValueError: while stopping" in run.why_it_ended()


def test_machines_are_read_from_the_command_line() -> None:
    assert Nodes.parse("2:4", "node0:29500") == Nodes(2, 4, "node0:29500")
    assert Nodes.parse("3", "127.0.0.1:1") == Nodes(3, 3, "127.0.0.1:1")
    assert Nodes.parse("3", "127.0.0.1:1").is_loopback


@pytest.mark.parametrize("text", ["4:2", "0:1", "a:b", "2:", ":2", "1:2:3", ""])
def test_a_wrong_number_of_machines_is_refused(text: str) -> None:
    with pytest.raises(ValueError, match="MIN:MAX"):
        Nodes.parse(text, "node0:29500")


@pytest.mark.parametrize("meeting", ["", "node0", "node0:", ":29500", "node0:port"])
def test_a_wrong_meeting_place_is_refused(meeting: str) -> None:
    with pytest.raises(ValueError, match="HOST:PORT"):
        Nodes.parse("2", meeting)
