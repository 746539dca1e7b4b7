"""Loggers in their processes: one that fails, hangs or is slow costs a run nothing but a bounded time at its end."""

from __future__ import annotations

import json
import os
import signal
import time
from collections.abc import Callable
from pathlib import Path

import pytest
from tests.loggers import begin, notes, steps

from leaderless.config import Recipe, RecipeError
from leaderless.config.run import LoggerConfig
from leaderless.observability.loggers.process import LoggerProcess
from leaderless.observability.loggers.registry import check_loggers, find_logger, loggers_running, names_of

NOTES = "tests.loggers:Notes"


def config(path: Path, finish_s: float = 30.0, **options: float) -> LoggerConfig:
    return LoggerConfig(type=NOTES, options={"path": str(path), **options}, finish_s=finish_s)


def test_a_logger_in_its_process_gets_all_before_the_end(tmp_path: Path) -> None:
    directory, said = begin(tmp_path / "run"), list[str]()
    outs = [tmp_path / "first", tmp_path / "second"]
    with loggers_running([config(out) for out in outs], directory.path, said.append):
        steps(directory, {1: {"loss": 1.0}})
        (directory.path / "report.html").write_text("report")
    steps(directory, {2: {"loss": 2.0}})  # the run continues, with the same loggers
    with loggers_running([config(out) for out in outs], directory.path, said.append):
        pass
    for out in outs:
        assert [step for _, step, _ in notes(out, "write")] == [1, 2]
        opened = notes(out, "open")
        assert [line[:2] for line in opened] == [["trial", ""], ["trial", "first"]]
        assert len({line[2] for line in opened}) == 2, "each start has a process"
        assert [kind for kind, *_ in notes(out)][-2:] == ["file", "close"]
    assert said == []
    assert names_of([config(out) for out in outs]) == ["notes", "notes-2"]
    assert {path.name for path in directory.loggers.glob("*.jsonl")} == {"notes.jsonl", "notes-2.jsonl"}


def test_a_logger_that_hangs_is_ended(tmp_path: Path) -> None:
    directory, said = begin(tmp_path / "run"), list[str]()
    steps(directory, {1: {"loss": 1.0}})
    began = time.monotonic()
    with loggers_running([config(tmp_path / "out", finish_s=0.1, naps_s=3600)], directory.path, said.append):
        pass
    assert time.monotonic() - began < 60
    (line,) = said
    assert line.startswith("logger 'notes' did not finish in finish_s=0.1 s and was ended")
    assert f"`leaderless log {directory.path}` sends it" in line


def test_a_logger_that_is_killed_is_started_again_and_sends_the_rest(tmp_path: Path) -> None:
    directory, said, out = begin(tmp_path / "run"), list[str](), tmp_path / "out"

    def wait_until(condition: Callable[[], object]) -> None:
        end = time.monotonic() + 60
        while not condition():
            assert time.monotonic() < end
            time.sleep(0.05)

    def kill_after(step: int) -> None:
        """Kill the process that has sent a step."""
        wait_until(lambda: step in [number for _, number, _ in notes(out, "write")])
        number = len(said)
        os.kill(int(str(notes(out, "open")[-1][2])), signal.SIGKILL)
        wait_until(lambda: len(said) > number)

    with loggers_running([config(out)], directory.path, said.append):
        for step in (1, 2):
            steps(directory, {step: {"loss": 1.0}})
            kill_after(step)
        steps(directory, {3: {"loss": 3.0}})
    # What was sent just before the end may be sent again.
    assert {step for _, step, _ in notes(out, "write")} == {1, 2, 3}
    assert len(said) == 2
    assert said[0] == "logger 'notes' ended with exit code -9: it is started again, and nothing is lost"
    with loggers_running([config(out)], directory.path, said.append):
        for step in range(4, 8):
            steps(directory, {step: {"loss": 1.0}})
            kill_after(step)
    assert "as 3 times before: it is not started again, and training continues" in said[-2]
    assert f"what it has not sent is in {directory.path}: `leaderless log {directory.path}` sends it" in said[-1]


def test_a_logger_that_always_fails_gives_up_and_says_why(
    tmp_path: Path, capfd: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOME_TOKEN", "no answer")  # its value is in the message
    directory, said = begin(tmp_path / "run"), list[str]()
    steps(directory, {1: {"loss": 1.0}})
    with loggers_running([config(tmp_path / "out", fails=100)], directory.path, said.append):
        pass
    shown = capfd.readouterr().err
    assert shown.count("logger 'notes' fails: ConnectionError: <SOME_TOKEN>. Training continues") == 1
    assert said == []
    (event,) = (json.loads(line) for line in directory.events.read_text().splitlines())
    assert (event["event"], event["logger"]) == ("logger", "notes")
    log = (directory.logs / "logger-notes.txt").read_text()
    assert "raise ConnectionError" in log
    assert log.splitlines()[-1] == "ConnectionError: <SOME_TOKEN>"


def test_a_run_that_never_began_is_not_logged(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "run").mkdir()
    with loggers_running([config(tmp_path / "out")], tmp_path / "run", lambda _: None):
        pass
    assert capfd.readouterr().err == ""
    assert not (tmp_path / "out").exists()


def test_loggers_that_cannot_be_made_are_refused_together() -> None:
    known = [
        LoggerConfig(type="wandbb"),
        LoggerConfig(type="tensorboard", options={"projekt": "a"}),
        LoggerConfig(type="tests.loggers:begin"),
        LoggerConfig(type="tests.loggers:Path"),
        LoggerConfig(type="tests.loggers:Nothing"),
        LoggerConfig(type="no.such:Logger"),
    ]
    with pytest.raises(RecipeError) as refused:
        check_loggers(known)
    lines = str(refused.value).splitlines()
    assert "loggers.0.type: unknown logger 'wandbb' (did you mean 'wandb'?); a custom one is" in lines[0]
    assert "loggers.1.options: TensorBoardLogger() does not take them" in lines[1]
    assert "'tests.loggers:begin' must be a class" in lines[2]
    assert "'tests.loggers:Path' must have the methods rewind, write, write_table, write_file, close" in lines[3]
    assert "loggers.4.type: module 'tests.loggers' has no class 'Nothing'" in lines[4]
    assert "loggers.5.type: module 'no.such' cannot be imported" in lines[5]


def test_a_missing_package_names_its_extra(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("leaderless.observability.loggers.registry.find_spec", lambda _: None)
    with pytest.raises(RecipeError, match=r"loggers\.0\.type: logger 'mlflow' needs its package: .*'\.\[mlflow\]'"):
        check_loggers([LoggerConfig(type="mlflow")])


def test_a_recipe_names_loggers_in_short_or_with_options() -> None:
    written = {"name": "a", "workflow": "w", "models": {}, "data": {"train": {"path": "x"}}, "steps": 1}
    assert [one.type for one in Recipe.model_validate(written).loggers] == ["tensorboard"]
    loggers = ["wandb", {"type": "mlflow", "options": {"uri": "http://host"}, "finish_s": 5}]
    found = Recipe.model_validate(written | {"loggers": loggers}).loggers
    assert found == (
        LoggerConfig(type="wandb"),
        LoggerConfig(type="mlflow", options={"uri": "http://host"}, finish_s=5.0),
    )
    assert find_logger(LoggerConfig(type="tensorboard"), "loggers.0").__name__ == "TensorBoardLogger"


@pytest.mark.parametrize(
    ("name", "remedy"), [("wandb", "run `wandb login`, set WANDB_API_KEY"), ("mlflow", "see that its server runs")]
)
def test_a_logger_without_login_or_server_says_what_to_do(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str, remedy: str
) -> None:
    class Refusing:
        def open(self, run: object, identity: str) -> str:  # noqa: ARG002
            raise PermissionError("no key is configured")

    monkeypatch.setattr("leaderless.observability.loggers.process.find_logger", lambda *_: Refusing)
    monkeypatch.setattr("leaderless.observability.loggers.process.POLL_S", 0.01)
    monkeypatch.setattr("leaderless.observability.loggers.process.RETRY_S", (0.01,))
    monkeypatch.setattr("leaderless.observability.loggers.process.LAST_PAUSE_S", 0.01)
    directory, said = begin(tmp_path / "run"), list[str]()
    process = LoggerProcess(name, LoggerConfig(type=name), directory, said.append)
    process.end()
    process.run()
    (line,) = said
    assert line.startswith(f"logger '{name}' fails: PermissionError: no key is configured. Training continues")
    assert remedy in line
