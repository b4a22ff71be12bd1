"""Text to a file without waiting for it: what the file cannot keep up with is lost.

Whoever reads a log may stop: a pager, Ctrl-S, a log driver, a stopped launcher. The process that
writes it must not.
"""

from __future__ import annotations

import contextlib
import os
import select
import stat
import threading
from collections import deque
from collections.abc import Callable

STDOUT, STDERR = 1, 2
MAX_WAITING_BYTES = 1 << 20  # thousands of lines, and beyond them nobody has been reading for long


class LineWriter:
    """Writes texts to a descriptor, each whole or not at all, at once if that is sure not to block.

    Else a thread writes them. The descriptor itself stays blocking: it may be shared with a shell
    or another process. What exceeds `MAX_WAITING_BYTES` is dropped, and what the file does not
    take, as on a full disk. Once there is room again, `on_dropped` is called in the thread with the
    number of texts.
    """

    def __init__(self, fd: int, on_dropped: Callable[[int], None] = lambda num: None) -> None:
        self._fd = fd
        self._on_dropped = on_dropped
        self._waiting: deque[bytes] = deque()
        self._num_waiting_bytes = 0  # with the text that is being written
        self._num_dropped = 0
        self._changed = threading.Condition()
        self._thread: threading.Thread | None = None
        self._pipe_fd = _opened_again(fd)

    def isatty(self) -> bool:
        return os.isatty(self._fd)

    def fileno(self) -> int:
        return self._fd

    def write(self, text: str) -> int:
        """Have a text written soon, or drop it; returns its length, as files do."""
        data = text.encode("utf-8", "backslashreplace")
        with self._changed:
            if not self._num_waiting_bytes and self._put_at_once(data):
                return len(text)
            if self._num_waiting_bytes + len(data) > MAX_WAITING_BYTES:
                self._num_dropped += 1
                return len(text)
            self._waiting.append(data)
            self._num_waiting_bytes += len(data)
            if self._thread is None:
                self._thread = threading.Thread(target=self._run, name="log", daemon=True)
                self._thread.start()
            self._changed.notify_all()
        return len(text)

    def flush(self) -> None:
        """Do nothing: every text is written as soon as possible."""

    def close(self, within_s: float) -> None:
        """Wait until all is written, but no longer than this."""
        with self._changed:
            self._changed.wait_for(lambda: not self._num_waiting_bytes, within_s)

    def _run(self) -> None:
        while True:
            with self._changed:
                self._changed.wait_for(lambda: self._waiting)
                data = self._waiting.popleft()
            is_written = self._put(data)
            num_dropped = 0
            with self._changed:
                self._num_waiting_bytes -= len(data)
                self._num_dropped += not is_written
                if is_written and 2 * self._num_waiting_bytes <= MAX_WAITING_BYTES:
                    num_dropped, self._num_dropped = self._num_dropped, 0
                self._changed.notify_all()
            if num_dropped:
                self._on_dropped(num_dropped)

    def _put_at_once(self, data: bytes) -> bool:
        if self._pipe_fd is None or len(data) > select.PIPE_BUF:
            return False
        try:
            return os.write(self._pipe_fd, data) > 0  # whole: so short a text is not cut
        except OSError:
            return False

    def _put(self, data: bytes) -> bool:
        with contextlib.suppress(OSError):
            while data:
                try:
                    data = data[os.write(self._fd, data) :]
                except BlockingIOError:  # who shares the descriptor has made it so
                    select.select((), (self._fd,), ())
        return not data


def _opened_again(fd: int) -> int | None:
    """Open a pipe once more and non-blocking, for this process alone; None for other files.

    Most logs are pipes, and a thread that has to wake for each line would hold up compute's loop.
    """
    try:
        if stat.S_ISFIFO(os.fstat(fd).st_mode):
            return os.open(f"/proc/self/fd/{fd}", os.O_WRONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError:  # no such system, or the pipe of another user
        pass
    return None
