"""A collector of traces: takes OTLP over HTTP and keeps the spans."""

from __future__ import annotations

import threading
from dataclasses import dataclass
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest


@dataclass(frozen=True, slots=True)
class CollectedSpan:
    """One span: who made it, what it is called, and where it belongs."""

    service: str
    name: str
    trace_id: str
    span_id: str
    parent_id: str


class Collector:
    """Listens while it is open; use it as a context manager."""

    def __init__(self) -> None:
        self.spans: list[CollectedSpan] = []
        keep = self._keep

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                keep(self.rfile.read(int(self.headers["Content-Length"])))
                self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self._thread = threading.Thread(target=self._server.serve_forever)

    @property
    def url(self) -> str:
        """Where to send traces."""
        return f"http://127.0.0.1:{self._server.server_port}"

    def trace(self, trace_id: str) -> list[CollectedSpan]:
        """Return the spans of one trace that have come."""
        return [span for span in self.spans if span.trace_id == trace_id]

    def _keep(self, body: bytes) -> None:
        for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
            about = {
                item.key: item.value.string_value for item in resource_spans.resource.attributes
            }
            for scope_spans in resource_spans.scope_spans:
                for span in scope_spans.spans:
                    self.spans.append(
                        CollectedSpan(
                            about["service.instance.id"],
                            span.name,
                            span.trace_id.hex(),
                            span.span_id.hex(),
                            span.parent_span_id.hex(),
                        )
                    )

    def __enter__(self) -> Collector:
        self._thread.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()
