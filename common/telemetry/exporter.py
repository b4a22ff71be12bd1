"""The exporter: a small process that takes a service's spans from a pipe and passes them on.

`python -m common.telemetry.exporter TARGET` reads frames (see `common.telemetry.spans`) from
standard input until it ends, which it does with the service. TARGET is `console` or the URL of an
OTLP/HTTP collector. It may wait and retry as long as it likes: nobody waits for it.
"""

from __future__ import annotations

import signal
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Callable
from typing import BinaryIO
from urllib.parse import urlsplit, urlunsplit

TIMEOUT_S = 5.0
RETRY_AFTER_S = (0.5, 2.0)
COMPLAIN_EVERY_S = 60.0


def main() -> int:
    """Pass on every frame, then end."""
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signal.SIG_IGN)  # it ends when its input does
    target = sys.argv[1]
    passed_on = print_spans if target == "console" else Collector(target).post
    while (frame := read_frame(sys.stdin.buffer)) is not None:
        passed_on(frame)
    return 0


def read_frame(stream: BinaryIO) -> bytes | None:
    """Read one frame; None at the end of the input, also in the middle of a frame."""
    head = stream.read(4)
    if len(head) < 4:
        return None
    length = int.from_bytes(head, "big")
    data = stream.read(length)
    return data if len(data) == length else None


class Collector:
    """Posts frames to an OTLP/HTTP collector; what it refuses for good is said and dropped."""

    def __init__(self, url: str, sleep: Callable[[float], None] = time.sleep) -> None:
        parts = urlsplit(url)
        path = parts.path if parts.path.strip("/") else "/v1/traces"
        self.url = urlunsplit((parts.scheme, parts.netloc, path, parts.query, ""))
        self._sleep = sleep
        self._complained_s = -COMPLAIN_EVERY_S

    def post(self, frame: bytes) -> bool:
        """Send one frame, three times at most; returns whether it was taken."""
        why = ""
        for wait_s in (*RETRY_AFTER_S, 0.0):
            request = urllib.request.Request(
                self.url, data=frame, headers={"Content-Type": "application/x-protobuf"}
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
            self._sleep(wait_s)
        self._complain(why)
        return False

    def _complain(self, why: str) -> None:
        now_s = time.monotonic()
        if now_s - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = now_s
            sys.stderr.write(f"traces: {self.url} does not take spans: {why}\n")


def print_spans(frame: bytes) -> None:
    """Print the spans of one frame, a line each, to standard error."""
    sys.stderr.write("".join(line + "\n" for line in span_lines(frame)))
    sys.stderr.flush()


def span_lines(frame: bytes) -> list[str]:
    """Say in one line what each span of a frame was."""
    from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

    lines = []
    for resource_spans in ExportTraceServiceRequest.FromString(frame).resource_spans:
        about = {item.key: item.value.string_value for item in resource_spans.resource.attributes}
        for scope_spans in resource_spans.scope_spans:
            for span in scope_spans.spans:
                milliseconds = (span.end_time_unix_nano - span.start_time_unix_nano) / 1e6
                fields = " ".join(f"{item.key}={_value(item.value)}" for item in span.attributes)
                lines.append(
                    f"span {about.get('service.instance.id', '?')} {span.name} "
                    f"{milliseconds:.2f} ms trace_id={span.trace_id.hex()} "
                    f"span_id={span.span_id.hex()} {fields}".rstrip()
                )
    return lines


def _value(value: object) -> object:
    which = value.WhichOneof("value")  # type: ignore[attr-defined]
    if which == "array_value":
        return [_value(item) for item in value.array_value.values]  # type: ignore[attr-defined]
    return getattr(value, which) if which else None


if __name__ == "__main__":
    sys.exit(main())
