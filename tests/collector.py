"""A collector of OpenTelemetry on this machine: takes requests, and decodes them with OpenTelemetry's messages."""

from __future__ import annotations

import gzip
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any, NamedTuple


class Got(NamedTuple):
    """A span or a point: its resource, and itself."""

    resource: Mapping[str, object]
    name: str
    attributes: Mapping[str, object]
    message: Any


@dataclass
class Collector:
    """What has arrived, and how the collector answers; `status` is that of all answers."""

    address: str
    status: int = 200
    spans: list[Got] = field(default_factory=list)
    points: list[Got] = field(default_factory=list)
    kinds: dict[str, tuple[str, str]] = field(default_factory=dict)  # of metrics: gauge or sum, and the description
    headers: list[Mapping[str, str]] = field(default_factory=list)
    num_requests: int = 0

    def take(self, path: str, body: bytes) -> None:
        """Decode a request."""
        from opentelemetry.proto.collector.metrics.v1.metrics_service_pb2 import ExportMetricsServiceRequest
        from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

        if path == "/v1/traces":
            for one in ExportTraceServiceRequest.FromString(body).resource_spans:
                for scope in one.scope_spans:
                    for span in scope.spans:
                        resource = plain(one.resource.attributes)
                        self.spans.append(Got(resource, span.name, plain(span.attributes), span))
            return
        assert path == "/v1/metrics", path
        for one in ExportMetricsServiceRequest.FromString(body).resource_metrics:
            for scope in one.scope_metrics:
                for metric in scope.metrics:
                    kind = metric.WhichOneof("data")
                    self.kinds[metric.name] = kind, metric.description
                    resource = plain(one.resource.attributes)
                    for point in getattr(metric, kind).data_points:
                        self.points.append(Got(resource, metric.name, plain(point.attributes), point))


def plain(attributes: Any) -> dict[str, object]:
    """Attributes by name."""
    return {one.key: getattr(one.value, one.value.WhichOneof("value")) for one in attributes}


@contextmanager
def collector() -> Iterator[Collector]:
    """A collector that listens while the context lasts."""

    class Handler(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            body = gzip.decompress(body) if self.headers.get("Content-Encoding") == "gzip" else body
            found.num_requests += 1
            found.headers.append(dict(self.headers))
            if found.status == 200:
                found.take(self.path, body)
            # A server that refuses may repeat what it was sent.
            self.send_response(found.status, None if found.status == 200 else self.headers.get("authorization"))
            self.end_headers()

        def log_message(self, *_: object) -> None:
            """Say nothing."""

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    found = Collector(f"http://127.0.0.1:{server.server_port}")
    thread = threading.Thread(target=server.serve_forever)
    thread.start()
    try:
        yield found
    finally:
        server.shutdown()
        server.server_close()
        thread.join()
