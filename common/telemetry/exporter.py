"""The exporter: a small process that takes a service's spans from a pipe and passes them on.

`python -m common.telemetry.exporter TARGET RESOURCE` reads frames (see `common.telemetry.spans`)
from standard input, which ends with the service. TARGET is `console` or the URL of an OTLP/HTTP
collector, RESOURCE the service's attributes as JSON. It may wait and retry: nothing waits for it.
"""

from __future__ import annotations

import json
import os
import signal
import sys
import time
import urllib.error
import urllib.request
from functools import partial
from urllib.parse import urlsplit, urlunsplit

import msgpack
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.resources import Resource
from opentelemetry.sdk.trace import Event, ReadableSpan
from opentelemetry.sdk.util.instrumentation import InstrumentationScope
from opentelemetry.trace import Link, SpanContext, SpanKind, Status, StatusCode, TraceFlags

from common.child_main import read_frames
from common.telemetry.spans import SpanRow

TIMEOUT_S = 5.0
RETRY_AFTER_S = (0.5, 2.0)
COMPLAIN_EVERY_S = 60.0
SCOPE = InstrumentationScope("slipstream")


def main() -> int:
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when its input does
    target, resource = sys.argv[1], json.loads(sys.argv[2])
    collector = None if target == "console" else Collector(target)
    for frame in read_frames(partial(os.read, 0)):
        rows = [SpanRow(*row) for row in msgpack.unpackb(frame)]
        if collector is None:
            name = resource.get("service.instance.id", "?")
            sys.stderr.write("".join(f"{line_of(row, name)}\n" for row in rows))
            sys.stderr.flush()
        else:
            collector.post(otlp_of(rows, resource))
    return 0


def otlp_of(rows: list[SpanRow], resource: dict[str, str]) -> bytes:
    attributes = Resource(resource)
    data: bytes = encode_spans([_span(row, attributes) for row in rows]).SerializeToString()
    return data


def line_of(row: SpanRow, name: str) -> str:
    fields = " ".join(f"{key}={value}" for key, value in row.attributes.items())
    return (
        f"span {name} {row.name} {(row.end_ns - row.start_ns) / 1e6:.2f} ms "
        f"trace_id={row.context[:16].hex()} span_id={row.context[16:].hex()} {fields}"
    ).rstrip()


class Collector:
    """Posts requests to an OTLP/HTTP collector; logs and drops what the collector refuses."""

    def __init__(self, url: str) -> None:
        parts = urlsplit(url)
        path = parts.path if parts.path.strip("/") else "/v1/traces"
        self.url = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
        self._complained_s = -COMPLAIN_EVERY_S

    def post(self, body: bytes) -> bool:
        """Send one request, at most three times; return whether the collector accepted it."""
        why = ""
        for wait_s in (*RETRY_AFTER_S, 0.0):
            request = urllib.request.Request(
                self.url, data=body, headers={"Content-Type": "application/x-protobuf"}
            )
            try:
                with urllib.request.urlopen(request, timeout=TIMEOUT_S) as response:
                    response.read()
                return True
            except urllib.error.HTTPError as error:
                why = f"status {error.code}"
                error.close()
                if error.code not in (429, 502, 503, 504):
                    break
            except (OSError, ValueError) as error:
                why = str(error)
            time.sleep(wait_s)
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            sys.stderr.write(f"traces: {self.url} does not take spans: {why}\n")
        return False


def _span(row: SpanRow, resource: Resource) -> ReadableSpan:
    parent = _context(row.parent, row.flags, row.parent_is_remote) if row.parent else None
    return ReadableSpan(
        name=row.name,
        context=_context(row.context, row.flags),
        parent=parent,
        resource=resource,
        attributes=row.attributes,
        events=[Event(name, fields, at_ns) for name, at_ns, fields in row.events],
        links=[Link(_context(ids), fields) for ids, fields in row.links],
        kind=SpanKind(row.kind),
        status=Status(StatusCode(row.status), row.description or None),
        start_time=row.start_ns,
        end_time=row.end_ns,
        instrumentation_scope=SCOPE,
    )


def _context(ids: bytes, flags: int = 1, is_remote: bool = True) -> SpanContext:
    trace_id, span_id = int.from_bytes(ids[:16], "big"), int.from_bytes(ids[16:], "big")
    return SpanContext(trace_id, span_id, is_remote, TraceFlags(flags))


if __name__ == "__main__":
    sys.exit(main())
