"""The trace context goes through every stage, whether spans are recorded or not."""

from __future__ import annotations

import msgpack
import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest
from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor, TracerProvider
from opentelemetry.trace import Link, StatusCode, get_current_span

from common.config import TelemetrySettings
from common.errors import ConfigError
from common.telemetry import trace
from common.telemetry.exporter import Collector, otlp_of
from common.telemetry.spans import SpanRow, row_of

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


def test_with_traces_off_the_callers_context_goes_through_unchanged() -> None:
    with trace.tracer().start_as_current_span(
        "stage", context=trace.context_from(TRACEPARENT)
    ) as span:
        assert trace.traceparent_of(span) == TRACEPARENT
        assert not span.is_recording()


def test_without_a_context_there_is_none_to_pass_on() -> None:
    span = trace.tracer().start_span("stage", context=trace.context_from(""))
    assert trace.traceparent_of(span) == ""


@pytest.mark.parametrize(
    "text",
    [
        "nonsense",
        "00-00000000000000000000000000000000-00f067aa0ba902b7-01",
        "00-4bf92f3577b34da6a3ce929d0e0e4736-0000000000000000-01",
        "00-4bf92f3577b34da6a3ce929d0e0e473g-00f067aa0ba902b7-01",
        "01-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01",
        TRACEPARENT + "-extra",
        TRACEPARENT.replace("-", "_"),
    ],
)
def test_what_is_no_traceparent_begins_no_trace(text: str) -> None:
    span = trace.tracer().start_span("stage", context=trace.context_from(text))
    assert trace.traceparent_of(span) == ""


def test_an_unsampled_context_stays_unsampled() -> None:
    unsampled = TRACEPARENT[:-2] + "00"
    span = trace.tracer().start_span("stage", context=trace.context_from(unsampled))
    assert trace.traceparent_of(span) == unsampled


def test_a_target_that_is_no_url_is_refused() -> None:
    with pytest.raises(ConfigError, match="OTLP/HTTP collector"):
        trace.configure("x", "compute", TelemetrySettings(traces="jaeger"))


@pytest.mark.parametrize(
    ("url", "posted_to"),
    [
        ("http://localhost:4318", "http://localhost:4318/v1/traces"),
        ("http://localhost:4318/", "http://localhost:4318/v1/traces"),
        ("https://host/otlp/v1/traces?key=1", "https://host/otlp/v1/traces?key=1"),
    ],
)
def test_a_collectors_base_url_gets_the_standard_path(url: str, posted_to: str) -> None:
    assert Collector(url).url == posted_to


def test_a_span_arrives_whole_with_its_parent_status_events_and_links() -> None:
    ended: list[ReadableSpan] = []

    class Kept(SpanProcessor):
        def on_end(self, span: ReadableSpan) -> None:
            ended.append(span)

    provider = TracerProvider(shutdown_on_exit=False)
    provider.add_span_processor(Kept())
    context = trace.context_from(TRACEPARENT)
    link = Link(get_current_span(context).get_span_context(), {"row": 1})
    span = provider.get_tracer("x").start_span("generate", context, links=[link])
    span.set_attributes({"a": "text", "b": 7, "c": 0.5, "d": True, "e": ["stop", "length"]})
    span.add_event("first token", {"at": 1})
    span.set_status(StatusCode.ERROR, "no pages")
    span.end()

    packed = msgpack.unpackb(msgpack.packb([row_of(span) for span in ended]))
    request = ExportTraceServiceRequest.FromString(
        otlp_of([SpanRow(*row) for row in packed], {"service.name": "slipstream-compute"})
    )
    (arrived,) = request.resource_spans[0].scope_spans[0].spans
    assert (arrived.name, arrived.trace_id.hex()) == ("generate", TRACEPARENT[3:35])
    assert arrived.parent_span_id.hex() == TRACEPARENT[36:52]
    assert (arrived.status.code, arrived.status.message) == (2, "no pages")
    assert [item.key for item in arrived.attributes] == ["a", "b", "c", "d", "e"]
    assert arrived.events[0].name == "first token"
    assert arrived.links[0].span_id.hex() == TRACEPARENT[36:52]
