"""OpenTelemetry: spans and metrics of a run, sent to a collector over OTLP by the exporters of OpenTelemetry's SDK."""

from __future__ import annotations

import json
import math
import os
import secrets
import socket
from collections.abc import Iterable, Sequence
from copy import deepcopy
from dataclasses import dataclass, field
from hashlib import sha256
from pathlib import Path

from opentelemetry.exporter.otlp.proto.http.metric_exporter import OTLPMetricExporter
from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter
from opentelemetry.sdk.metrics import export as sdk
from opentelemetry.sdk.resources import OTELResourceDetector, Resource
from opentelemetry.sdk.trace import ReadableSpan
from opentelemetry.sdk.trace.export import SpanExportResult
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, TraceFlags
from pydantic import TypeAdapter, ValidationError
from typing_extensions import override

from leaderless.base.versions import VERSION
from leaderless.observability.line_file import parse_line
from leaderless.observability.loggers.protocol import LoggedRun, Logger, Numbers
from leaderless.observability.loggers.running_values import RunningValue, RunningValues, run_labels, words_of
from leaderless.observability.loggers.trace_follower import TracedSpan, TraceFollower, TracePosition
from leaderless.observability.report.unchecked_values import as_mapping, as_number
from leaderless.observability.run_directory import RunDirectory, write_atomically

SIGNALS = ("metrics", "traces")
SPANS_PER_REQUEST = 512
STEPS_PER_REQUEST = 100
TAIL_BYTES = 1 << 20
"""Number of bytes at the end of a log in which its last line is looked for."""
SCOPE = InstrumentationScope("leaderless", VERSION)


@dataclass
class SentSpans:
    """The spans that a collector has, kept in the folder of the run.

    Attributes:
        starts: Number of starts of the run whose span was sent. Each start is a trace.
        begin_ns: Beginning of the first span of the start that follows; 0 if there is none.
        end_ns: End of its last one.
        ranks: Positions in the traces of ranks, by name of their file.
    """

    starts: int = 0
    begin_ns: int = 0
    end_ns: int = 0
    ranks: dict[str, TracePosition] = field(default_factory=dict)


_SENT = TypeAdapter(SentSpans)


class OpenTelemetryLogger(Logger):
    """Sends spans and metrics to a collector, over HTTP.

    Headers, such as those with a token, come from the environment alone, so the folder of the run never has them.

    Args:
        endpoint: Address of the collector, such as `http://collector:4318`; by default OTEL_EXPORTER_OTLP_ENDPOINT, or
            what the other variables of OpenTelemetry name.
        signals: Signals that the collector takes: `metrics` and `traces`, or one of them.
    """

    def __init__(self, endpoint: str | None = None, signals: Sequence[str] = SIGNALS) -> None:
        if not signals or not {*signals} <= {*SIGNALS}:
            raise ValueError(f"option signals={list(signals)} of the logger opentelemetry must be some of {SIGNALS}")
        base = endpoint.rstrip("/") if endpoint else None
        self._metrics = OTLPMetricExporter(base and f"{base}/v1/metrics") if "metrics" in signals else None
        self._spans = OTLPSpanExporter(base and f"{base}/v1/traces") if "traces" in signals else None
        self._run = LoggedRun("", Path(), {})
        self._identity = ""
        self._values, self._since_ns = RunningValues(), 0
        self._written: Sequence[Numbers] = ()
        self._sent = SentSpans()
        self._resources: dict[tuple[int | None, str], Resource] = {}

    @override
    def open(self, run: LoggedRun, identity: str) -> str:
        """Continue behind the spans that were sent."""
        self._run, self._identity = run, identity or secrets.token_hex(8)
        if self._file.exists():
            try:
                self._sent = _SENT.validate_json(self._file.read_bytes())
            except ValidationError as error:
                raise ValueError(f"{self._file} is damaged: remove it, and all spans are sent again") from error
        return self._identity

    @override
    def rewind(self, log: str, step: int) -> bool:
        """Send the numbers of repeated steps, too: their points have times, and those of the earlier ones stay."""
        return True

    @override
    def write(self, numbers: Sequence[Numbers]) -> None:
        """Send the numbers, and the spans that ranks have written up to now."""
        if self._metrics is not None and numbers != self._written:
            self._send_metrics(self._metrics, numbers)
        self._written = numbers  # if spans fail, the same numbers come again
        self._send_new_spans()

    @override
    def close(self) -> None:
        """Send the rest, and at last the span of the whole start."""
        self._send_new_spans()
        for name in list(self._sent.ranks):
            path = RunDirectory(self._run.directory).traces / name
            follower = self._follower(path)
            if spans := follower.close():
                self._send_spans(path, spans, follower.position)
        if self._sent.begin_ns:
            self._export([self._span_of_start()])
            self._sent = SentSpans(self._sent.starts + 1, ranks=self._sent.ranks)
            self._keep()

    # Metrics.

    def _send_metrics(self, exporter: OTLPMetricExporter, numbers: Sequence[Numbers]) -> None:
        """Send points, with the times at which their steps were logged."""
        values, times = self._values.copy(), self._times_of(numbers)
        since_ns = self._since_ns or min(times)
        for first in range(0, len(numbers), STEPS_PER_REQUEST):
            families: dict[tuple[str, bool], list[tuple[RunningValue, int]]] = {}
            some = slice(first, first + STEPS_PER_REQUEST)
            for one, at_ns in zip(numbers[some], times[some], strict=True):
                for value in values.add(one):
                    name = ".".join(["leaderless", *words_of(value.name)])
                    families.setdefault((name, value.is_total), []).append((value, at_ns))
            metrics = [_metric(name, members, since_ns) for (name, _), members in families.items()]
            scope = sdk.ScopeMetrics(SCOPE, metrics, "")
            data = sdk.MetricsData([sdk.ResourceMetrics(self._resource(None, socket.gethostname()), [scope], "")])
            if exporter.export(data) is not sdk.MetricExportResult.SUCCESS:
                raise ConnectionError("the collector does not take metrics")
        self._values, self._since_ns = values, since_ns

    def _times_of(self, numbers: Sequence[Numbers]) -> list[int]:
        """Times in nanoseconds since 1970: lines of a log have seconds of the run, and the file has the last one's."""
        ends: dict[str, tuple[int, float]] = {}
        times = []
        for log, _, values in numbers:
            if log not in ends:
                ends[log] = _end_of(RunDirectory(self._run.directory).metrics_of(log))
            at_ns, seconds = ends[log]
            before_s = seconds - values.get("time_s", seconds)
            times.append(at_ns - round(max(0.0, before_s) * 1e9))
        return times

    # Spans.

    def _send_new_spans(self) -> None:
        if self._spans is None:
            return
        for path in sorted(RunDirectory(self._run.directory).traces.glob("rank-*.json")):
            follower = self._follower(path)
            while spans := follower.new_spans(SPANS_PER_REQUEST):
                self._send_spans(path, spans, follower.position)

    def _follower(self, path: Path) -> TraceFollower:
        """Reads on behind what was sent; its position only counts when its spans were sent as well."""
        return TraceFollower(path, deepcopy(self._sent.ranks.get(path.name, TracePosition())))

    def _send_spans(self, path: Path, spans: Sequence[TracedSpan], position: TracePosition) -> None:
        self._export(map(self._span, spans))
        begin_ns = min(span.begin_ns for span in spans)
        self._sent.begin_ns = min(self._sent.begin_ns or begin_ns, begin_ns)
        self._sent.end_ns = max(self._sent.end_ns, *(span.end_ns for span in spans))
        self._sent.ranks[path.name] = deepcopy(position)
        self._keep()

    def _export(self, spans: Iterable[ReadableSpan]) -> None:
        assert self._spans is not None
        if self._spans.export(list(spans)) is not SpanExportResult.SUCCESS:
            raise ConnectionError("the collector does not take spans")

    def _span(self, span: TracedSpan) -> ReadableSpan:
        own = span.key or f"{span.rank}/{span.name}/{span.begin_ns}/{span.facts.get('lane', 0)}"
        return ReadableSpan(
            span.name,
            context=self._context(own),
            parent=self._context(span.step_key or "run"),
            resource=self._resource(span.rank, span.host),
            attributes={"leaderless.step": span.step} | {f"leaderless.{k}": _plain(v) for k, v in span.facts.items()},
            start_time=span.begin_ns,
            end_time=span.end_ns,
            instrumentation_scope=SCOPE,
        )

    def _span_of_start(self) -> ReadableSpan:
        starts = self._sent.starts
        facts = {**run_labels(self._run.recipe, self._run.tags), "start": starts + 1}
        return ReadableSpan(
            "run",
            context=self._context("run"),
            resource=self._resource(None, socket.gethostname()),
            attributes={f"leaderless.{name}": value for name, value in facts.items()},
            links=[Link(self._context("run", starts - 1))] if starts else [],
            start_time=self._sent.begin_ns,
            end_time=self._sent.end_ns,
            instrumentation_scope=SCOPE,
        )

    def _context(self, key: str, start: int | None = None) -> SpanContext:
        """The identity of a span: the same if it has to be sent again."""
        trace = f"{self._identity}/{self._sent.starts if start is None else start}"
        return SpanContext(_number(trace, 16), _number(f"{trace}/{key}", 8), is_remote=False, trace_flags=_SAMPLED)

    def _resource(self, rank: int | None, host: str) -> Resource:
        """What is the same for all data of a rank, or of the run; the variables of OpenTelemetry come first."""
        if (rank, host) not in self._resources:
            name = self._run.name
            own: dict[str, str | int] = {"service.name": "leaderless", "service.version": VERSION}
            own |= {"service.instance.id": name if rank is None else f"{name}/rank-{rank}", "leaderless.run": name}
            if rank is not None:
                own["leaderless.rank"] = rank
            if host:
                own["host.name"] = host
            self._resources[rank, host] = Resource.create({**own, **OTELResourceDetector().detect().attributes})
        return self._resources[rank, host]

    @property
    def _file(self) -> Path:
        return RunDirectory(self._run.directory).loggers / f"opentelemetry-{self._identity}.json"

    def _keep(self) -> None:
        write_atomically(self._file, _SENT.dump_json(self._sent))


_SAMPLED = TraceFlags(TraceFlags.SAMPLED)


def _number(text: str, num_bytes: int) -> int:
    return int.from_bytes(sha256(text.encode()).digest()[:num_bytes], "big")


def _plain(value: object) -> str | bool | int | float:
    """A value that an attribute can have."""
    return value if isinstance(value, str | bool | int | float) else json.dumps(value)


def _metric(name: str, members: Sequence[tuple[RunningValue, int]], since_ns: int) -> sdk.Metric:
    points = [
        sdk.NumberDataPoint({"metric": one.name, **dict(one.labels)}, since_ns if one.is_total else 0, at_ns, one.value)
        for one, at_ns in members
    ]
    first = members[0][0]
    if not first.is_total:
        return sdk.Metric(name, first.meaning, "", sdk.Gauge(points))
    total = sdk.Sum(points, sdk.AggregationTemporality.CUMULATIVE, is_monotonic=True)
    return sdk.Metric(name, first.meaning, "", total)


def _end_of(path: Path) -> tuple[int, float]:
    """When a log was last written, in nanoseconds since 1970, and seconds of the run in its last line."""
    with path.open("rb") as file:
        size = -1
        while (state := os.fstat(file.fileno())).st_size != size:  # else it has grown in the meantime
            size = state.st_size
            file.seek(max(0, size - TAIL_BYTES))
            tail = file.read()
    lines = tail.rstrip(b"\n").rsplit(b"\n", 1)
    return state.st_mtime_ns, as_number(as_mapping(parse_line(lines[-1])).get("time_s")) or math.nan
