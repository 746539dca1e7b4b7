"""What holds for each logger, read back from its tracker. Trackers that are not installed are left out.

`make test-loggers` runs this file with all of them: TensorBoard's files, Weights & Biases offline, an MLflow server on
a database of its own, and Trackio's store.
"""

from __future__ import annotations

import importlib
import json
import math
import socket
import struct
import subprocess
import sys
import time
from abc import ABC, abstractmethod
from collections.abc import Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from urllib.request import urlopen

import pytest
import yaml
from tests.loggers import SAMPLE, Notes, begin, notes, steps

from leaderless.base.values import Json
from leaderless.config.run import LoggerConfig
from leaderless.observability.loggers.follower import Follower, SentJournal
from leaderless.observability.loggers.protocol import LoggedRun
from leaderless.observability.loggers.registry import find_logger
from leaderless.observability.run_directory import RunDirectory

Points = Sequence[tuple[int, float]]


class Tracker(ABC):
    """A tracker to log to, and how what was logged is read back."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder

    @abstractmethod
    def config(self) -> LoggerConfig:
        """An entry of a recipe."""

    @abstractmethod
    def points(self, name: str) -> Points:
        """Steps and values of a metric, of the one run that there is."""

    @abstractmethod
    def recipe(self) -> str:
        """The recipe, in any form."""

    @abstractmethod
    def table(self) -> str:
        """The table `samples`, in any form."""

    @abstractmethod
    def report(self) -> str:
        """The report, or where it is."""

    def close(self) -> None:  # noqa: B027 - most have nothing to end
        """End what was started."""


class TensorBoard(Tracker):
    def config(self) -> LoggerConfig:
        return LoggerConfig(type="tensorboard")

    def _events(self, log: str = ""):
        from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

        return EventAccumulator(str(self.folder / "run/tensorboard" / log)).Reload()

    def points(self, name: str) -> Points:
        events = self._events("evaluation" if name.startswith("evaluation") else "")
        return [(event.step, event.value) for event in events.Scalars(name)]

    def _text(self, name: str) -> str:
        events = self._events()
        assert events.SummaryMetadata(name).plugin_data.plugin_name == "text"
        return "\n".join(text.decode() for event in events.Tensors(name) for text in event.tensor_proto.string_val)

    def recipe(self) -> str:
        return self._text("recipe")

    def table(self) -> str:
        return self._text("samples")

    def report(self) -> str:
        return Path(self._text("report.html").strip("`")).read_text()


class Wandb(Tracker):
    def config(self) -> LoggerConfig:
        options: dict[str, Json] = {"mode": "offline", "project": "trials", "tags": ["a", "b"], "group": "b"}
        return LoggerConfig(type="wandb", options=options)

    def _records(self) -> Iterator[object]:
        """The records of all starts, which `wandb sync` sends to one run."""
        wandb_internal_pb2 = importlib.import_module("wandb.proto.wandb_internal_pb2")
        files = sorted((self.folder / "run/loggers/wandb").glob("offline-run-*/run-*.wandb"))
        assert len({file.name for file in files}) == 1, "one run"
        for file in files:
            for data in _logged(file.read_bytes()):
                record = wandb_internal_pb2.Record()
                record.ParseFromString(data)
                yield record

    def _history(self) -> Iterator[Mapping[str, Json]]:
        for record in self._records():
            if record.WhichOneof("record_type") == "history":
                yield {
                    item.key or "/".join(item.nested_key): json.loads(item.value_json) for item in record.history.item
                }

    def points(self, name: str) -> Points:
        return [(row["step"], row[name]) for row in self._history() if name in row]

    def recipe(self) -> str:
        runs = [record.run for record in self._records() if record.WhichOneof("record_type") == "run"]
        assert {(run.project, run.run_group, frozenset(run.tags)) for run in runs} == {
            ("trials", "b", frozenset({"a", "b", "second try"}))
        }
        return str(runs[0].config)

    def table(self) -> str:
        (file,) = (self.folder / "run/loggers/wandb").glob("*/files/media/table/samples_*.json")
        return str(json.loads(file.read_text()))

    def report(self) -> str:
        paths = [
            entry.local_path
            for record in self._records()
            if record.WhichOneof("record_type") == "artifact"
            for entry in record.artifact.manifest.contents
            if record.artifact.type == "report"
        ]
        return Path(paths[0]).read_text()


def _logged(data: bytes) -> Iterator[bytes]:
    """The records of a file in the format of LevelDB's log, after a header of seven bytes."""
    place, record, block = 7, b"", 32768
    while place + 7 <= len(data):
        if block - place % block < 7:
            place += block - place % block
            continue
        _, length, kind = struct.unpack_from("<IHB", data, place)
        record += data[place + 7 : place + 7 + length]
        place += 7 + length
        if kind in {1, 4}:  # a whole record, or the last part of one
            yield record
            record = b""


class Mlflow(Tracker):
    def __init__(self, folder: Path) -> None:
        super().__init__(folder)
        with socket.create_server(("127.0.0.1", 0)) as free:
            port = free.getsockname()[1]
        self._uri = f"http://127.0.0.1:{port}"
        command = ["-m", "mlflow", "server", "--host", "127.0.0.1", "--port", str(port), "--workers", "1"]
        command += [
            "--backend-store-uri",
            f"sqlite:///{folder}/mlflow.db",
            "--artifacts-destination",
            str(folder / "files"),
        ]
        self._server = subprocess.Popen(
            [sys.executable, *command], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL, start_new_session=True
        )
        for _ in range(600):
            time.sleep(0.5)
            try:
                with urlopen(f"{self._uri}/health"):
                    return
            except OSError:
                assert self._server.poll() is None
        raise TimeoutError("the server does not answer")

    def config(self) -> LoggerConfig:
        return LoggerConfig(type="mlflow", options={"uri": self._uri, "experiment": "trials"})

    def _client(self):
        from mlflow import MlflowClient

        return MlflowClient(self._uri)

    def _run(self):
        client = self._client()
        (run,) = client.search_runs([client.get_experiment_by_name("trials").experiment_id])
        return run

    def points(self, name: str) -> Points:
        from leaderless.observability.loggers.mlflow_logger import key_of

        return [
            (one.step, one.value) for one in self._client().get_metric_history(self._run().info.run_id, key_of(name))
        ]

    def _file(self, path: str) -> str:
        return Path(self._client().download_artifacts(self._run().info.run_id, path)).read_text()

    def recipe(self) -> str:
        assert self._run().data.params["reward.own.module_grade.weight"] == "1.0"
        assert self._run().info.status == "FINISHED"
        assert {"b", "second try"} <= {tag for tag, value in self._run().data.tags.items() if value == "true"}
        return self._file("config.yaml")

    def table(self) -> str:
        return str(json.loads(self._file("samples/step-000001.json")))

    def report(self) -> str:
        return self._file("report.html")

    def close(self) -> None:
        self._server.terminate()
        self._server.wait()


class Trackio(Tracker):
    def config(self) -> LoggerConfig:
        return LoggerConfig(type="trackio", options={"project": "trials"})

    def _run(self) -> str:
        from trackio import SQLiteStorage

        (name,) = SQLiteStorage.get_runs("trials")
        return name if isinstance(name, str) else name["name"]

    def _logs(self):
        from trackio import SQLiteStorage

        return SQLiteStorage.get_logs("trials", self._run())

    def points(self, name: str) -> Points:
        return [(row["step"], row[name]) for row in self._logs() if name in row]

    def recipe(self) -> str:
        from trackio import SQLiteStorage

        return str(SQLiteStorage.get_run_config("trials", self._run()))

    def table(self) -> str:
        return str([row["samples"] for row in self._logs() if "samples" in row])

    def report(self) -> str:
        from trackio import SQLiteStorage

        (artifact,) = SQLiteStorage.list_artifacts("trials")
        assert artifact["type"] == "report"
        return next(
            path for path in (self.folder / "trackio").rglob("*") if path.is_file() and _holds(path)
        ).read_text()


def _holds(path: Path) -> bool:
    return path.stat().st_size < 1000 and path.read_bytes() == b"a report"


class Fake(Tracker):
    """A logger of a user, `module:Class`."""

    def config(self) -> LoggerConfig:
        return LoggerConfig(type="tests.loggers:Notes", options={"path": str(self.folder / "out"), "can_rewind": False})

    def _notes(self, kind: str) -> list[list[object]]:
        return notes(self.folder / "out", kind)

    def points(self, name: str) -> Points:
        return [(step, values[name]) for _, step, values in self._notes("write") if name in values]

    def recipe(self) -> str:
        return (self.folder / "run/config.yaml").read_text()

    def table(self) -> str:
        return str(self._notes("table"))

    def report(self) -> str:
        (path,) = self._notes("file")[0]
        return (self.folder / "run" / path).read_text()


TRACKERS = {"fake": Fake, "mlflow": Mlflow, "tensorboard": TensorBoard, "trackio": Trackio, "wandb": Wandb}


@pytest.fixture(params=TRACKERS)
def tracker(request: pytest.FixtureRequest, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Tracker]:
    if request.param != "fake" and find_spec(request.param) is None:
        pytest.skip(f"{request.param} is not installed: `make test-loggers` has all loggers")
    if request.param == "trackio" and "trackio" in sys.modules:
        pytest.skip("trackio has read TRACKIO_DIR already")
    monkeypatch.setenv("TRACKIO_DIR", str(tmp_path / "trackio"))
    found = TRACKERS[request.param](tmp_path)
    yield found
    found.close()


def log(directory: RunDirectory, tracker: Tracker) -> None:
    """Log what is new in the folder of a run, as one start does."""
    config, sent = tracker.config(), SentJournal(directory.loggers / "logger.jsonl")
    logger = find_logger(config, "loggers.0")(**config.options)
    run = LoggedRun("trial", directory.path, yaml.safe_load(directory.config.read_text()))
    sent.begin(logger.open(run, sent.identity))
    follower = Follower(run, logger, sent, tables_every_steps=1)
    follower.follow(is_over=True)
    follower.finish(directory.path / "report.html")
    logger.close()


def test_a_run_that_continues_is_one_run_of_its_tracker_without_doubled_steps(tracker: Tracker) -> None:
    directory = begin(tracker.folder / "run")
    failed = SAMPLE | {"reward": None, "is_valid": False, "details": {"own": {"error": "x"}}}
    directory.write_samples(1, 0, [SAMPLE, failed])
    steps(directory, {step: {"reward/mean": step / 4, "time/reshard(a->4-7)": 0.5} for step in (1, 2, 3)})
    steps(directory, {2: {"evaluation/mean@1": 0.25}}, "evaluation")
    log(directory, tracker)
    # It continues from step 2, takes one more than before, and ends with a report.
    steps(directory, {step: {"reward/mean": step / 4, "policy/loss": math.nan} for step in (3, 4)})
    (directory.path / "report.html").write_text("a report")
    log(directory, tracker)

    assert tracker.points("reward/mean") == [(step, step / 4) for step in (1, 2, 3, 4)]
    assert tracker.points("time/reshard(a->4-7)")[:2] == [(1, 0.5), (2, 0.5)]
    assert tracker.points("evaluation/mean@1") == [(2, 0.25)]
    assert "grade" in tracker.recipe()
    assert "2 <b>é</b>" in tracker.table()
    assert tracker.report() == "a report"


def test_the_fake_is_a_logger() -> None:
    assert find_logger(LoggerConfig(type="tests.loggers:Notes", options={"path": "x"}), "loggers.0") is Notes
