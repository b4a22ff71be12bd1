"""Spans leave the process without a thread in it, reach a collector and decode there."""

from __future__ import annotations

import sys
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import TracerProvider

from common.config import TelemetrySettings
from common.telemetry import trace
from common.telemetry.spans import MAX_WAITING, SpanQueue
from tests.patience import PATIENCE_S

CALLER = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


class CollectorStub:
    """A real HTTP server that keeps what is posted to it, and can refuse the first few."""

    def __init__(self) -> None:
        stub = self
        self.bodies: list[bytes] = []
        self.refusals = 0

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["Content-Length"]))
                if stub.refusals:
                    stub.refusals -= 1
                    self.send_response(503)
                else:
                    assert self.path == "/v1/traces"
                    assert self.headers["Content-Type"] == "application/x-protobuf"
                    stub.bodies.append(body)
                    self.send_response(200)
                self.end_headers()

            def log_message(self, format: str, *args: object) -> None: ...

        self.server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.thread = threading.Thread(target=self.server.serve_forever)
        self.thread.start()

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.server.server_port}"

    def spans(self) -> dict[str, tuple[str, str, str]]:
        """(service, trace id, parent id) by the name of the span."""
        found = {}
        for body in self.bodies:
            for resource_spans in ExportTraceServiceRequest.FromString(body).resource_spans:
                about = {
                    item.key: item.value.string_value for item in resource_spans.resource.attributes
                }
                for scope_spans in resource_spans.scope_spans:
                    for span in scope_spans.spans:
                        found[span.name] = (
                            about["service.instance.id"],
                            span.trace_id.hex(),
                            span.parent_span_id.hex(),
                        )
        return found

    def close(self) -> None:
        self.server.shutdown()
        self.thread.join()
        self.server.server_close()


@pytest.fixture
def collector(monkeypatch: pytest.MonkeyPatch) -> Iterator[CollectorStub]:
    monkeypatch.setenv("no_proxy", "*")
    stub = CollectorStub()
    yield stub
    trace.shutdown()
    stub.close()


def test_the_spans_of_a_request_reach_the_collector_as_one_trace(collector: CollectorStub) -> None:
    settings = TelemetrySettings(traces=collector.url)
    traceparent, parents = CALLER, {}
    for stage in ("router", "tokenizer", "compute"):
        trace.configure(f"{stage}-0", stage, settings)
        num_threads = threading.active_count()
        with trace.tracer().start_as_current_span(
            stage, context=trace.context_from(traceparent), attributes={trace.REQUEST_ID: "r"}
        ) as span:
            parents[stage] = traceparent[36:52]
            traceparent = trace.traceparent_of(span)
        trace.flush()
        assert threading.active_count() == num_threads
        trace.shutdown(timeout_s=PATIENCE_S)
    assert collector.spans() == {
        stage: (f"{stage}-0", CALLER[3:35], parents[stage]) for stage in parents
    }


def test_a_collector_that_is_busy_is_asked_again(collector: CollectorStub) -> None:
    collector.refusals = 1
    trace.configure("x", "compute", TelemetrySettings(traces=collector.url))
    trace.tracer().start_span("kept").end()
    trace.shutdown(timeout_s=PATIENCE_S)
    assert list(collector.spans()) == ["kept"]


def test_a_caller_that_is_not_sampled_costs_no_span(collector: CollectorStub) -> None:
    trace.configure("x", "compute", TelemetrySettings(traces=collector.url))
    context = trace.context_from(CALLER[:-2] + "00")
    trace.tracer().start_span("dropped", context=context).end()
    trace.shutdown(timeout_s=PATIENCE_S)
    assert collector.bodies == []


def test_the_console_gets_a_line_a_span(capfd: pytest.CaptureFixture[str]) -> None:
    trace.configure("compute-0", "compute", TelemetrySettings(traces="console"))
    trace.tracer().start_span("generate", attributes={trace.USAGE_OUTPUT_TOKENS: 7}).end()
    trace.shutdown(timeout_s=PATIENCE_S)
    line = capfd.readouterr().err
    assert line.startswith("span compute-0 generate ")
    assert "gen_ai.usage.output_tokens=7" in line


def spans_into(queue: SpanQueue, number: int) -> None:
    """End this many spans of half a kilobyte, flushing as a service's tick would."""
    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(queue)
    tracer = provider.get_tracer("test")
    for index in range(number):
        tracer.start_span(f"span {index}", attributes={"padding": "x" * 500}).end()
        if index % 64 == 0:
            queue.flush()


def test_a_reader_that_stands_still_blocks_nothing_and_the_rest_is_counted() -> None:
    queue = SpanQueue("", {}, (sys.executable, "-c", "import time; time.sleep(60)"))
    spans_into(queue, 3 * MAX_WAITING)
    assert queue.num_dropped > 0
    queue.close(timeout_s=0.2)
    assert queue.num_dropped > MAX_WAITING


def test_an_exporter_that_is_gone_blocks_nothing_and_the_rest_is_counted() -> None:
    queue = SpanQueue("", {}, (sys.executable, "-c", "print('ended')"))
    for _ in range(1000):  # until it has started and ended
        spans_into(queue, 65)
        if queue.num_dropped:
            break
    queue.close(timeout_s=5)
    assert queue.num_dropped > 0
