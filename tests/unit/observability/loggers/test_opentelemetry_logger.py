"""Spans and metrics for OpenTelemetry, as a collector decodes them."""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Iterator
from importlib.util import find_spec
from pathlib import Path

import pytest
import yaml
from tests.collector import Collector, Got, collector
from tests.loggers import begin, steps

from leaderless.config.run import LoggerConfig
from leaderless.observability.clock import Tracer
from leaderless.observability.loggers.follower import Follower, SentJournal
from leaderless.observability.loggers.protocol import LoggedRun
from leaderless.observability.loggers.registry import loggers_running
from leaderless.observability.run_directory import RunDirectory

pytestmark = pytest.mark.skipif(
    find_spec("opentelemetry") is None or find_spec("opentelemetry.exporter") is None,
    reason="opentelemetry-exporter-otlp-proto-http is not installed",
)
STEP = {"reward/mean": 0.25, "throughput/tokens_per_s": 100.0, "time/step": 2.0}


@pytest.fixture
def receiver(monkeypatch: pytest.MonkeyPatch) -> Iterator[Collector]:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    with collector() as found:
        yield found


def start(directory: RunDirectory, address: str | None, **options: object):
    """A logger that has begun, or continues, and what lets it take what is new."""
    from leaderless.observability.loggers.opentelemetry_logger import OpenTelemetryLogger

    logger = OpenTelemetryLogger(address, **options)  # type: ignore[arg-type]
    sent = SentJournal(directory.loggers / "opentelemetry.jsonl")
    run = LoggedRun("trial", directory.path, yaml.safe_load(directory.config.read_text()))
    sent.begin(logger.open(run, sent.identity))
    return logger, Follower(run, logger, sent, 0).follow


def trace_step(tracer: Tracer, step: int) -> None:
    """Trace a step as a rank does."""
    with tracer.span("rollout", step) as facts:
        time.sleep(0.002)
        facts.update({"rows": 8, "lengths": [1, 2]})
    with tracer.span("policy", step):
        pass
    tracer.take_seconds()


def named(spans: list[Got], name: str) -> list[Got]:
    return [span for span in spans if span.name == name]


def test_a_step_becomes_spans_with_the_times_of_the_trace(tmp_path: Path, receiver: Collector) -> None:
    directory = begin(tmp_path / "run")
    tracers = [Tracer(directory.traces / f"rank-{rank}.json", rank) for rank in (0, 1)]
    logger, follow = start(directory, receiver.address)
    for step in (1, 2, 3):
        for tracer in tracers:
            trace_step(tracer, step)
        steps(directory, {step: STEP})
        follow()
    assert {span.name for span in receiver.spans} == {"rollout", "policy", "step 1"}, "later steps are not over"
    logger.close()
    spans = receiver.spans
    assert len({span.message.span_id for span in spans}) == len(spans) == 2 * 3 * 3 + 1
    assert len({span.message.trace_id for span in spans}) == 1
    (run,) = named(spans, "run")
    assert not run.message.parent_span_id
    assert run.attributes["leaderless.tags"] == "b,second try"
    by_id = {span.message.span_id: span for span in spans}
    for rollout in named(spans, "rollout"):
        step = by_id[rollout.message.parent_span_id]
        assert step.name == f"step {rollout.attributes['leaderless.step']}"
        assert by_id[step.message.parent_span_id] is run
        assert step.resource["leaderless.rank"] == rollout.resource["leaderless.rank"]
        for outer, inner in ((step, rollout), (run, step)):
            assert outer.message.start_time_unix_nano <= inner.message.start_time_unix_nano
            assert inner.message.end_time_unix_nano <= outer.message.end_time_unix_nano
    # The times are those of the file.
    events = [json.loads(line.rstrip(",\n")) for line in (directory.traces / "rank-1.json").open() if '"X"' in line]
    traced = [
        (event["name"], round(event["ts"] * 1000), round((event["ts"] + event["dur"]) * 1000)) for event in events
    ]
    sent = [
        (span.name, span.message.start_time_unix_nano, span.message.end_time_unix_nano)
        for span in spans
        if span.resource.get("leaderless.rank") == 1 and not span.name.startswith("step")
    ]
    assert sent == traced
    rollout = named(spans, "rollout")[0]
    assert (rollout.attributes["leaderless.rows"], rollout.attributes["leaderless.lengths"]) == (8, "[1, 2]")
    known = {"service.name": "leaderless", "leaderless.run": "trial", "host.name": socket.gethostname()}
    assert known.items() <= rollout.resource.items()
    assert rollout.resource["service.instance.id"] == "trial/rank-0"


def test_metrics_have_kinds_meanings_and_the_times_of_their_steps(tmp_path: Path, receiver: Collector) -> None:
    directory = begin(tmp_path / "run")
    logger, follow = start(directory, receiver.address)
    began = time.time_ns()
    steps(directory, {step: STEP | {"reward/mean": step / 4, "time_s": 100.0 * step} for step in (1, 2, 3)})
    follow()
    means = [point for point in receiver.points if point.name == "leaderless.reward.mean"]
    assert [point.message.as_double for point in means] == [0.25, 0.5, 0.75]
    times = [point.message.time_unix_nano for point in means]
    assert [round((time - times[2]) / 1e9) for time in times] == [-200, -100, 0]
    assert abs(times[2] - began) < 60e9
    assert means[0].attributes == {"metric": "reward/mean"}
    assert receiver.kinds["leaderless.reward.mean"] == ("gauge", "Mean reward of a response.")
    assert receiver.kinds["leaderless.tokens"][0] == "sum"
    tokens = [point.message for point in receiver.points if point.name == "leaderless.tokens"]
    assert [point.as_int for point in tokens] == [200, 400, 600]
    assert {point.start_time_unix_nano for point in tokens} == {times[0]}
    logger.close()


def test_what_a_collector_refused_comes_later_and_once(tmp_path: Path, receiver: Collector) -> None:
    directory = begin(tmp_path / "run")
    tracer = Tracer(directory.traces / "rank-0.json", 0)
    logger, follow = start(directory, receiver.address)
    receiver.status = 400
    trace_step(tracer, 1)
    steps(directory, {1: STEP})
    for _ in range(2):
        with pytest.raises(ConnectionError, match="does not take metrics"):
            follow()
    receiver.status = 200
    follow()
    assert [span.name for span in receiver.spans] == ["rollout", "policy"]
    receiver.status = 400
    with pytest.raises(ConnectionError, match="does not take spans"):
        logger.close()
    receiver.status = 200
    logger.close()
    assert sorted(span.name for span in receiver.spans) == ["policy", "rollout", "run", "step 1"]
    (steps_done,) = [point.message.as_int for point in receiver.points if point.name == "leaderless.steps"]
    assert steps_done == 1, "a step that failed to be sent is not counted twice"


def test_metrics_are_not_sent_again_because_spans_fail(tmp_path: Path, receiver: Collector, monkeypatch) -> None:
    directory = begin(tmp_path / "run")
    trace_step(Tracer(directory.traces / "rank-0.json", 0), 1)
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TRACES_ENDPOINT", "http://127.0.0.1:9/v1/traces")
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_ENDPOINT", receiver.address)
    _, follow = start(directory, None)
    steps(directory, {1: STEP})
    for _ in range(2):
        with pytest.raises(ConnectionError, match="does not take spans"):
            follow()
    assert len([point for point in receiver.points if point.name == "leaderless.reward.mean"]) == 1


def test_a_run_that_continues_is_a_further_trace_linked_to_the_first(tmp_path: Path, receiver: Collector) -> None:
    directory = begin(tmp_path / "run")
    for first in (1, 3):
        tracer = Tracer(directory.traces / "rank-0.json", 0)
        logger, follow = start(directory, receiver.address)
        for step in (first, first + 1):
            trace_step(tracer, step)
            steps(directory, {step: STEP})
            follow()
        tracer.close()
        logger.close()
    assert [span.attributes["leaderless.step"] for span in named(receiver.spans, "rollout")] == [1, 2, 3, 4]
    assert sorted(span.name for span in receiver.spans if span.name.startswith("step")) == [
        f"step {step}" for step in (1, 2, 3, 4)
    ]
    before, after = named(receiver.spans, "run")
    assert before.message.trace_id != after.message.trace_id
    (link,) = after.message.links
    assert (link.trace_id, link.span_id) == (before.message.trace_id, before.message.span_id)
    assert before.message.end_time_unix_nano <= after.message.start_time_unix_nano


def test_a_logger_that_is_killed_sends_no_span_twice(tmp_path: Path, receiver: Collector) -> None:
    directory = begin(tmp_path / "run")
    tracer = Tracer(directory.traces / "rank-0.json", 0)
    for step in (1, 2, 3, 4):
        logger, follow = start(directory, receiver.address)  # the one before has not been closed
        trace_step(tracer, step)
        steps(directory, {step: STEP})
        follow()
    logger.close()
    assert len(receiver.spans) == 3 * 4 + 1
    assert len({span.message.span_id for span in receiver.spans}) == 3 * 4 + 1
    assert len({span.message.trace_id for span in receiver.spans}) == 1


def test_a_collector_may_take_one_signal(tmp_path: Path, receiver: Collector) -> None:
    directory = begin(tmp_path / "run")
    trace_step(Tracer(directory.traces / "rank-0.json", 0), 1)
    steps(directory, {1: STEP})
    for signal in ("traces", "metrics"):
        logger, follow = start(directory, receiver.address, signals=[signal])
        follow()
        logger.close()
        assert bool(receiver.spans) == (signal == "traces")
        assert bool(receiver.points) == (signal == "metrics")
        receiver.spans.clear()
        (directory.loggers / "opentelemetry.jsonl").unlink()
    with pytest.raises(ValueError, match=r"option signals=\['logs'\] of the logger opentelemetry must be some of"):
        start(directory, None, signals=["logs"])


def test_secret_headers_are_sent_and_never_written(
    tmp_path: Path, receiver: Collector, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    secret = "s3cr3t+value/of-a-token"
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_HEADERS", "authorization=Bearer%20s3cr3t%2Bvalue%2Fof-a-token,tenant=a")
    directory, said = begin(tmp_path / "run"), list[str]()
    receiver.status = 401  # with the headers in the answer
    trace_step(Tracer(directory.traces / "rank-0.json", 0), 1)
    steps(directory, {1: STEP})
    config = LoggerConfig(type="opentelemetry", options={"endpoint": receiver.address})
    with loggers_running([config], directory.path, said.append):
        pass
    sent = {name.lower(): value for name, value in receiver.headers[0].items()}
    assert sent["authorization"] == f"Bearer {secret}"
    texts = {path: path.read_text(errors="replace") for path in directory.path.rglob("*") if path.is_file()}
    log = texts[directory.logs / "logger-opentelemetry.txt"]
    assert "<OTEL_EXPORTER_OTLP_HEADERS>" in log, "what the library has logged about the answer"
    shown = capfd.readouterr().err
    for text in (*texts.values(), shown, *said):
        assert secret not in text
        assert "s3cr3t%2Bvalue" not in text
    assert shown.count("fails: ConnectionError") == 1
    assert "see that the collector runs" in shown


def test_a_dead_collector_costs_a_bounded_time_at_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OTEL_EXPORTER_OTLP_TIMEOUT", "1")
    directory, said = begin(tmp_path / "run"), list[str]()
    steps(directory, dict.fromkeys(range(1, 2000), STEP))
    config = LoggerConfig(type="opentelemetry", options={"endpoint": "http://127.0.0.1:9"}, finish_s=2.0)
    began = time.monotonic()
    with loggers_running([config], directory.path, said.append):
        assert time.monotonic() - began < 10, "a run does not wait for it"
    assert time.monotonic() - began < 60
    (line,) = said
    assert line.startswith("logger 'opentelemetry' did not finish in finish_s=2 s and was ended")
