"""The page for Prometheus: the newest numbers of a run, under names and of kinds that Prometheus knows."""

from __future__ import annotations

import json
import math
import socket
import threading
import time
from collections.abc import Callable, Mapping
from importlib.util import find_spec
from pathlib import Path
from urllib.request import Request, urlopen

import pytest
import yaml
from tests.loggers import begin, steps

from leaderless.config.run import LoggerConfig
from leaderless.observability.loggers.follower import Follower, SentJournal
from leaderless.observability.loggers.process import LoggerProcess
from leaderless.observability.loggers.protocol import LoggedRun
from leaderless.observability.loggers.running_values import words_of
from leaderless.observability.run_directory import RunDirectory

pytestmark = pytest.mark.skipif(find_spec("prometheus_client") is None, reason="prometheus_client is not installed")

STEP = {
    "time_s": 4.0,
    "reward/mean": 0.25,
    "policy/loss": math.nan,
    "guard/roll_backs": 2.0,
    "seconds/0-3/generate": 1.5,
    "throughput/tokens_per_s": 100.0,
    "time/step": 2.0,
}


def start(directory: RunDirectory, **options: object) -> tuple[object, Callable[[], None]]:
    """A logger that has begun, or continues, and what lets it take what is new."""
    from leaderless.observability.loggers.prometheus_logger import PrometheusLogger

    logger = PrometheusLogger(**{"port": 0, **options})  # type: ignore[arg-type]
    sent = SentJournal(directory.loggers / "prometheus.jsonl")
    run = LoggedRun("trial", directory.path, yaml.safe_load(directory.config.read_text()))
    sent.begin(logger.open(run, sent.identity))
    return logger, Follower(run, logger, sent, 0).follow


def address(directory: RunDirectory) -> str:
    (entry,) = json.loads((directory.loggers / "prometheus.json").read_text())
    (target,) = entry["targets"]
    return f"http://{target}/metrics"


def page(directory: RunDirectory) -> tuple[dict[tuple[str, str], float], Mapping[str, object]]:
    """Values by name and log, and the families by name."""
    from prometheus_client.parser import text_string_to_metric_families

    with urlopen(address(directory)) as answer:
        families = {family.name: family for family in text_string_to_metric_families(answer.read().decode())}
    values = {
        (sample.name, sample.labels.get("log", "")): sample.value
        for family in families.values()
        for sample in family.samples
        if sample.name != "leaderless_run_info"
    }
    return values, families


def test_the_page_has_the_newest_numbers_with_kinds_and_meanings(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    logger, follow = start(directory)
    steps(directory, {1: STEP, 2: STEP | {"reward/mean": 0.5, "evaluation/mean@1": 0.75}, 3: STEP})
    steps(directory, {7: {"reward/mean": 0.125}}, "rollout")
    follow()
    values, families = page(directory)
    assert values["leaderless_step", ""] == 3
    assert values["leaderless_step", "rollout"] == 7
    assert values["leaderless_reward_mean", ""] == 0.25
    assert values["leaderless_reward_mean", "rollout"] == 0.125
    assert values["leaderless_evaluation_mean_at_1", ""] == 0.75, "the newest value that there is"
    assert math.isnan(values["leaderless_policy_loss", ""])
    assert values["leaderless_steps_total", ""] == 3
    assert values["leaderless_tokens_total", ""] == 600
    assert values["leaderless_guard_roll_backs_total", ""] == 2, "counted by the run itself"
    assert abs(values["leaderless_last_step_timestamp_seconds", ""] - time.time()) < 60
    (seconds,) = families["leaderless_seconds"].samples
    assert (seconds.labels["ranks"], seconds.labels["state"], seconds.value) == ("0-3", "generate", 4.5)
    kinds = {name: family.type for name, family in families.items()}
    assert kinds["leaderless_reward_mean"] == kinds["leaderless_step"] == "gauge"
    assert kinds["leaderless_steps"] == kinds["leaderless_seconds"] == kinds["leaderless_guard_roll_backs"] == "counter"
    mean = families["leaderless_reward_mean"]
    assert mean.documentation == "Mean reward of a response."
    assert {"run": "trial", "metric": "reward/mean", "log": ""} in [sample.labels for sample in mean.samples]
    (facts,) = families["leaderless_run_info"].samples
    assert (facts.labels["run"], facts.labels["tags"]) == ("trial", "b,second try")
    logger.close()
    assert not (directory.loggers / "prometheus.json").exists(), "nobody is to look for it any more"


def test_names_become_those_of_prometheus() -> None:
    assert words_of("evaluation/mean@1") == ["evaluation", "mean_at_1"]
    assert words_of("time/reshard(a->4-7)") == ["time", "reshard_a_to_4_7"]
    assert words_of("reward/a.module:grade") == ["reward", "a_module_grade"]
    assert words_of("reward/数学") == ["reward"]


def test_names_that_become_the_same_stay_apart(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    logger, follow = start(directory)
    steps(directory, {1: {"reward/a.b": 1.0, "reward/a-b": 2.0, "steps": 9.0}})
    follow()
    _, families = page(directory)
    found = {sample.labels["metric"]: sample.value for sample in families["leaderless_reward_a_b"].samples}
    assert found == {"reward/a.b": 1.0, "reward/a-b": 2.0}
    with urlopen(address(directory)) as answer:
        lines = answer.read().decode().splitlines()
    assert any(line.startswith('leaderless_steps{metric="steps",run="trial"} 9') for line in lines)
    assert any(line.startswith('leaderless_steps_total{metric="steps",run="trial"} 1') for line in lines)
    logger.close()


def test_a_run_that_continues_has_its_numbers_at_once_and_counts_on(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    logger, follow = start(directory)
    steps(directory, {step: STEP | {"reward/mean": step / 8} for step in (1, 2, 3)})
    follow()
    logger.close()
    # It continues from step 2, and its first step has not ended yet.
    again, follow = start(directory)
    values, _ = page(directory)
    assert values["leaderless_step", ""] == 3
    assert values["leaderless_reward_mean", ""] == 0.375
    assert ("leaderless_steps_total", "") not in values, "a counter of a new process begins at 0"
    steps(directory, {3: STEP, 4: STEP | {"reward/mean": 1.0}})
    follow()
    values, _ = page(directory)
    assert values["leaderless_step", ""] == 4
    assert values["leaderless_reward_mean", ""] == 1.0
    assert values["leaderless_steps_total", ""] == 2
    again.close()


def test_a_taken_port_is_named_with_the_remedy(tmp_path: Path) -> None:
    said: list[str] = []
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        process = LoggerProcess(
            "prometheus", LoggerConfig(type="prometheus", options={"port": port}), begin(tmp_path / "run"), said.append
        )
        process._attempt(is_over=False)
    assert f"logger 'prometheus' fails: OSError: 127.0.0.1:{port} cannot be listened at (Address" in said[0]
    assert "set the option `port` to a free port, or to 0, which picks one" in said[0]
    process._attempt(is_over=False)
    assert said[1:] == [f"metrics for Prometheus are at http://127.0.0.1:{port}/metrics"], "the port is free again"
    process._attempt(is_over=True)


def test_a_port_that_cannot_be_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="option port=70000 of the logger prometheus must be from 0 to 65535"):
        start(begin(tmp_path / "run"), port=70000)


def test_only_this_machine_can_read_it_unless_the_recipe_says_so(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    logger, _ = start(directory)
    assert logger._server.server_address[0] == "127.0.0.1"
    logger.close()
    logger, _ = start(directory, host="0.0.0.0")
    assert logger._server.server_address[0] == "0.0.0.0"
    assert socket.gethostname() in address(directory)
    logger.close()


def test_the_end_waits_for_the_last_numbers_to_be_read_if_there_is_a_reader(tmp_path: Path) -> None:
    directory = begin(tmp_path / "run")
    logger, follow = start(directory, linger_s=60.0)
    steps(directory, {1: STEP})
    follow()
    page(directory)
    steps(directory, {2: STEP})
    follow()
    closing = threading.Thread(target=logger.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    values, _ = page(directory)
    assert values["leaderless_step", ""] == 2
    closing.join(30)
    assert not closing.is_alive()
    logger, _ = start(directory, linger_s=60.0)
    began = time.monotonic()
    logger.close()
    assert time.monotonic() - began < 30, "nobody has read it"


def test_what_was_not_sent_in_time_has_not_been_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from leaderless.observability.loggers import prometheus_logger

    directory = begin(tmp_path / "run")
    logger, follow = start(directory, linger_s=60.0)
    steps(directory, {1: STEP})
    follow()
    page(directory)
    steps(directory, {2: STEP})
    follow()
    # A reader who will have given up.
    with urlopen(Request(address(directory), headers={"X-Prometheus-Scrape-Timeout-Seconds": "1e-9"})) as answer:
        assert b'leaderless_step{metric="step",run="trial"} 2.0' in answer.read()
    closing = threading.Thread(target=logger.close)
    closing.start()
    closing.join(0.5)
    assert closing.is_alive()
    # An answer that is on its way.
    family, is_made, is_free = prometheus_logger._family, threading.Event(), threading.Event()

    def slow(*arguments: object) -> object:
        is_made.set()
        assert is_free.wait(30)
        return family(*arguments)

    monkeypatch.setattr(prometheus_logger, "_family", slow)
    found: list[dict[tuple[str, str], float]] = []
    reading = threading.Thread(target=lambda: found.append(page(directory)[0]))
    reading.start()
    assert is_made.wait(30)
    closing.join(0.5)
    assert closing.is_alive()
    is_free.set()
    reading.join(30)
    closing.join(30)
    assert found[0]["leaderless_step", ""] == 2
    assert not closing.is_alive()
