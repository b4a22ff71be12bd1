"""Ended spans on their way to the exporter process: a bounded queue and a pipe that never blocks.

A frame in the pipe is its length as four big-endian bytes and an OTLP ExportTraceServiceRequest.
"""

from __future__ import annotations

import fcntl
import os
import select
import subprocess
import sys
import time
from collections import deque

from opentelemetry.context import Context
from opentelemetry.exporter.otlp.proto.common.trace_encoder import encode_spans
from opentelemetry.sdk.trace import ReadableSpan, Span, SpanProcessor

MAX_WAITING = 4096  # some 4 MB
MAX_BATCH = 64  # encoding takes the loop's time
PIPE_BYTES = 1 << 20


class SpanQueue(SpanProcessor):
    """Takes a process's ended spans and writes them, batch by batch, to its exporter's pipe.

    `num_dropped` counts spans lost because the queue was full or the exporter gone.
    """

    def __init__(self, target: str, command: tuple[str, ...] = ()) -> None:
        self.num_dropped = 0
        self._spans: deque[ReadableSpan] = deque()
        self._frame = b""  # what the pipe did not take yet
        command = command or (sys.executable, "-m", "common.telemetry.exporter", target)
        # A session of its own: Ctrl-C in a terminal must not end it before the last spans.
        self._child = subprocess.Popen(command, stdin=subprocess.PIPE, start_new_session=True)
        assert self._child.stdin is not None
        self._pipe = self._child.stdin.fileno()
        os.set_blocking(self._pipe, False)
        try:
            fcntl.fcntl(self._pipe, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
        except (AttributeError, OSError):
            pass  # not Linux, or over the user's limit: the default of 64 KiB will do

    def on_start(self, span: Span, parent_context: Context | None = None) -> None:
        """Nothing is done at a span's start."""

    def on_end(self, span: ReadableSpan) -> None:
        """Queue an ended span, or count it as dropped."""
        if span.context is None or not span.context.trace_flags.sampled:
            return
        if len(self._spans) >= MAX_WAITING:
            self.num_dropped += 1
        else:
            self._spans.append(span)

    def flush(self) -> bool:
        """Write at most one batch; returns whether nothing is waiting any more."""
        if not self._frame and self._spans:
            batch = [self._spans.popleft() for _ in range(min(MAX_BATCH, len(self._spans)))]
            data = encode_spans(batch).SerializeToString()
            self._frame = len(data).to_bytes(4, "big") + data
        if self._frame:
            try:
                self._frame = self._frame[os.write(self._pipe, self._frame) :]
            except BlockingIOError:
                return False
            except OSError:  # the exporter is gone
                self._frame = b""
                self.num_dropped += len(self._spans)
                self._spans.clear()
        return not self._frame and not self._spans

    def close(self, timeout_s: float) -> None:
        """Write what waits and let the exporter finish, both within `timeout_s`."""
        deadline_s = time.monotonic() + timeout_s
        while not self.flush():
            left_s = deadline_s - time.monotonic()
            if left_s <= 0:
                self.num_dropped += len(self._spans)
                break
            select.select([], [self._pipe], [], left_s)
        assert self._child.stdin is not None
        self._child.stdin.close()
        try:
            self._child.wait(max(0.1, deadline_s - time.monotonic()))
        except subprocess.TimeoutExpired:
            self._child.kill()
            self._child.wait()

    def shutdown(self) -> None:
        """The SDK's word for the end; `close` has the timeout."""

    def force_flush(self, timeout_millis: int = 30000) -> bool:
        """Nothing can be forced without blocking; the tick flushes."""
        return not self._spans
