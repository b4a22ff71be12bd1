"""Ended spans on their way to the exporter process: a bounded queue and a pipe that never blocks.

A frame in the pipe (`common.child_main`) is a list of spans, each a list of the fields of
`SpanRow`. The exporter encodes them as OTLP: protobuf takes 45 us a span, packing a row 6, and the
engine's loop would wait for it.
"""

from __future__ import annotations

import contextlib
import fcntl
import json
import select
import subprocess
import sys
import time
from collections import deque
from collections.abc import Mapping
from typing import Any, NamedTuple

from opentelemetry.sdk.trace import ReadableSpan, SpanProcessor
from opentelemetry.trace import SpanContext

from common.child_main import PipeWriter, pack_frame

MAX_WAITING = 4096  # some 4 MB
MAX_BATCH = 64
PIPE_BYTES = 1 << 20


class SpanRow(NamedTuple):
    """One span as plain values; a context is the bytes of its trace id and span id."""

    name: str
    context: bytes
    parent: bytes  # empty for a root
    parent_is_remote: bool
    flags: int
    kind: int
    start_ns: int
    end_ns: int
    status: int
    description: str
    attributes: dict[str, Any]
    events: list[tuple[str, int, dict[str, Any]]]
    links: list[tuple[bytes, dict[str, Any]]]


def row_of(span: ReadableSpan) -> SpanRow:
    """Return what is exported of an ended span."""
    assert span.context is not None
    return SpanRow(
        span.name,
        _ids(span.context),
        b"" if span.parent is None else _ids(span.parent),
        span.parent is not None and span.parent.is_remote,
        int(span.context.trace_flags),
        span.kind.value,
        span.start_time or 0,
        span.end_time or 0,
        span.status.status_code.value,
        span.status.description or "",
        dict(span.attributes or {}),
        [(event.name, event.timestamp, dict(event.attributes or {})) for event in span.events],
        [(_ids(link.context), dict(link.attributes or {})) for link in span.links],
    )


def _ids(context: SpanContext) -> bytes:
    return context.trace_id.to_bytes(16, "big") + context.span_id.to_bytes(8, "big")


class SpanQueue(SpanProcessor):
    """Takes a process's ended spans and writes them, batch by batch, to its exporter's pipe.

    `num_dropped` counts spans lost because the queue was full or the exporter gone. Tests give the
    `command` of another reader.
    """

    def __init__(
        self, target: str, resource: Mapping[str, str], command: tuple[str, ...] = ()
    ) -> None:
        self.num_dropped = 0
        self._spans: deque[ReadableSpan] = deque()
        self._frame_spans = 0
        exporter = (sys.executable, "-m", "common.telemetry.exporter", target)
        command = command or (*exporter, json.dumps(dict(resource)))
        # A session of its own: Ctrl-C in a terminal must not end it before the last spans.
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._child.stdin is not None
        self._fd = self._child.stdin.fileno()
        self._pipe = PipeWriter(self._fd)
        # Not Linux, or over the user's limit: the default of 64 KiB will do.
        with contextlib.suppress(AttributeError, OSError):
            fcntl.fcntl(self._fd, fcntl.F_SETPIPE_SZ, PIPE_BYTES)

    def on_end(self, span: ReadableSpan) -> None:
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._spans) >= MAX_WAITING:
            self.num_dropped += 1
        else:
            self._spans.append(span)

    def flush(self) -> bool:
        """Write at most one batch; returns whether nothing is waiting any more."""
        if not self._pipe.unsent and self._spans:
            self._frame_spans = min(MAX_BATCH, len(self._spans))
            rows = [row_of(self._spans.popleft()) for _ in range(self._frame_spans)]
            self._pipe.unsent += pack_frame(rows)
        try:
            return self._pipe.flush() and not self._spans
        except OSError:  # the exporter is gone
            self._drop_all()
            return True

    def close(self, timeout_s: float) -> None:
        """Write what waits and let the exporter finish, both within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.flush():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self._drop_all()
                break
            select.select([], [self._fd], [], left_s)
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def _drop_all(self) -> None:
        self.num_dropped += len(self._spans) + (self._frame_spans if self._pipe.unsent else 0)
        self._spans.clear()
        self._pipe.unsent.clear()
