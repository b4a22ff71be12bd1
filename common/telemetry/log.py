"""Structured logs on standard error: for people on a terminal, JSON in a pipe.

    log = structlog.get_logger()
    log.info("registered", router=endpoint)

A line below the level costs one attribute look-up. The router's lines about a request name it:
`for_request(request_id, traceparent).warning(...)`. The other services do not know its id and name
attempts: `for_attempts(attempts, traceparents).error(...)`.
"""

from __future__ import annotations

import contextlib
import logging
import sys
import time
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple, Protocol

import structlog
from structlog.typing import EventDict, FilteringBoundLogger, Processor

from common.config import RenamedSetting, TelemetrySettings
from common.errors import ConfigError
from common.messages.address import AttemptId

LEVELS = {"debug": 10, "info": 20, "warning": 30, "error": 40, "critical": 50}
FORMATS = ("auto", "console", "json")
MAX_NAMED = 16  # attempts or traces in one line
SHORT_ROUTER = 8  # of an instance id's 16 digits: enough to distinguish a deployment's routers

# Not shown to people: addresses inside of a run's folder, and hashes.
FOR_MACHINES = ("endpoint", "revision", "instance_id")
STATUS = "\r"  # begins a line that the next one replaces; in a pipe, the launcher shows it so
SHOWN_EVERY_S = 0.2
LOGGED_EVERY_S = 10.0
GIB = 1 << 30


class Stream(Protocol):
    """The part of a text stream that lines are written to."""

    def write(self, text: str, /) -> object: ...
    def flush(self) -> None: ...
    def isatty(self) -> bool: ...


_process: dict[str, str] = {}  # fields of every line of this process
_people: list[Stream] = []  # the stream, if a person reads it
_telemetry: list[TelemetrySettings] = []  # those in use


def configure(
    name: str, service: str, settings: TelemetrySettings, stream: Stream | None = None
) -> None:
    """Set up the logs of this process and its libraries; ConfigError for an unknown word."""
    for field, value, words in (
        ("log_level", settings.log_level.lower(), LEVELS),
        ("log_format", settings.log_format, FORMATS),
    ):
        if value not in words:
            raise ConfigError(
                f"[telemetry] {field}: should be one of {', '.join(words)} "
                f"(it is {getattr(settings, field)!r})"
            )
    level = LEVELS[settings.log_level.lower()]
    stream = stream or sys.stderr
    console = settings.log_format == "console" or (
        settings.log_format == "auto" and stream.isatty()
    )
    _people[:] = [stream] if console else []
    _telemetry[:] = [settings.model_copy(update={"log_format": "console" if console else "json"})]
    _process.clear()
    _process.update(instance=name, service=service)
    structlog.configure(
        processors=_console(stream) if console else _json(),
        wrapper_class=structlog.make_filtering_bound_logger(level),
        logger_factory=lambda *_: _Lines(stream),
        cache_logger_on_first_use=True,
    )
    logging.captureWarnings(True)
    logging.basicConfig(level=max(level, logging.WARNING), handlers=[_FromLibraries()], force=True)


def describe_process(**fields: str) -> None:
    """Add fields, such as the instance id, to every JSON line of this process from now on."""
    _process.update(fields)


class Identity(NamedTuple):
    """As whom and how a process logs, for a child that is to log in its name."""

    process: dict[str, str]
    telemetry: TelemetrySettings

    @staticmethod
    def of_this_process() -> Identity:
        telemetry = _telemetry[0] if _telemetry else TelemetrySettings.model_validate({})
        return Identity(dict(_process), telemetry)

    def take(self, stream: Stream, **fields: str) -> None:
        """Log as the parent does, with more fields."""
        process = self.process
        configure(process.get("instance", ""), process.get("service", ""), self.telemetry, stream)
        describe_process(**process, **fields)


def warn_of_dropped(num_lines: int) -> None:
    """Say that so many lines were not written: whoever reads them did not keep up."""
    structlog.get_logger().warning("log lines dropped", num_lines=num_lines)


def warn_of_renamed(settings: Iterable[RenamedSetting]) -> None:
    for setting in settings:
        structlog.get_logger().warning("deprecated setting; use its new name", **setting._asdict())


def for_request(request_id: str, traceparent: str = "") -> FilteringBoundLogger:
    """Return a logger whose lines name the request and its trace, if there is one."""
    logger: FilteringBoundLogger = structlog.get_logger()
    return logger.bind(request_id=request_id, **_named("trace_id", _trace_ids((traceparent,))))


def for_attempts(
    attempts: Iterable[AttemptId], traceparents: Iterable[str] = ()
) -> FilteringBoundLogger:
    """Return a logger whose lines name attempts, as ROUTER:COUNTER, and their traces.

    ROUTER is the beginning of the router's instance id. Of many attempts, the first few are named.
    Only for failures: it costs more than a step may.
    """
    logger: FilteringBoundLogger = structlog.get_logger()
    names = [f"{attempt.router[:SHORT_ROUTER]}:{attempt.counter}" for attempt in attempts]
    return logger.bind(**_named("attempt", names), **_named("trace_id", _trace_ids(traceparents)))


def _trace_ids(traceparents: Iterable[str]) -> list[str]:
    return [text[3:35] for text in traceparents if len(text) >= 35]


def _named(field: str, values: Iterable[str]) -> dict[str, Any]:
    """Return a field with its one value, or for several a plural field and their number."""
    distinct = list(dict.fromkeys(values))
    if len(distinct) <= 1:
        return {field: distinct[0]} if distinct else {}
    return {f"{field}s": distinct[:MAX_NAMED], f"num_{field}s": len(distinct)}


def _json() -> list[Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="iso", utc=True),
        structlog.processors.format_exc_info,
        _with_process,
        structlog.processors.JSONRenderer(default=str),
    ]


def _console(stream: Stream) -> list[Processor]:
    return [
        structlog.processors.add_log_level,
        structlog.processors.TimeStamper(fmt="%H:%M:%S", utc=False),
        _for_people,
        structlog.dev.ConsoleRenderer(
            colors=stream.isatty(),
            pad_event_to=0,
            pad_level=False,
            exception_formatter=structlog.dev.plain_traceback,
        ),
    ]


def _for_people(_logger: Any, method: str, event: EventDict) -> EventDict:
    """Leave out the fields for machines, and the level `info`."""
    if method == "info":
        for field in ("level", *FOR_MACHINES):
            event.pop(field, None)
    return {**event, "rank": _process["rank"]} if "rank" in _process else event


def _with_process(_logger: Any, _method: str, event: EventDict) -> EventDict:
    """Put the time, level and event first; the event's fields override those of the process."""
    first = {field: event.pop(field) for field in ("timestamp", "level", "event")}
    return {**first, **_process, **event}


class _Lines:
    """Writes lines; a service does not fail if their reader is gone."""

    def __init__(self, stream: Stream) -> None:
        self._stream = stream

    def msg(self, line: str) -> None:
        with contextlib.suppress(OSError, ValueError):
            self._stream.write(line + "\n")
            self._stream.flush()

    debug = info = warning = warn = error = exception = critical = fatal = log = msg


class _FromLibraries(logging.Handler):
    """Passes on what libraries log with the standard module."""

    def emit(self, record: logging.LogRecord) -> None:
        try:
            structlog.get_logger().log(
                min(50, max(10, record.levelno // 10 * 10)),
                record.getMessage(),
                logger=record.name,
                exc_info=record.exc_info or None,
            )
        except Exception:
            self.handleError(record)


class Progress:
    """The progress of a long task: a line that changes for people, log lines for machines."""

    def __init__(
        self,
        task: str,
        num_items: int,
        num_bytes: int = 0,
        clock: Callable[[], float] = time.monotonic,
        items: str = "tensors",
    ) -> None:
        """Without `num_bytes` only items are counted."""
        self._task = task
        self._name = items
        self._num_items = num_items
        self._num_bytes = num_bytes
        self._clock = clock
        self._items = self._bytes = 0
        self._began_s = clock()
        self._said_s = self._began_s

    def advance(self, num_bytes: int = 0) -> None:
        """Count one more item, and show the progress if it is time to."""
        self._items += 1
        self._bytes += num_bytes
        now_s = self._clock()
        every_s = SHOWN_EVERY_S if _people else LOGGED_EVERY_S
        if now_s - self._said_s < every_s and self._items < self._num_items:
            return
        is_quick = self._said_s == self._began_s and now_s - self._began_s < every_s
        self._said_s = now_s
        if is_quick:
            return
        gib_per_s = self._bytes / max(now_s - self._began_s, 1e-3) / GIB
        for stream in _people:
            self._show(stream, gib_per_s)
        if not _people and self._items < self._num_items:
            fields: dict[str, float] = {self._name: self._items, "of": self._num_items}
            if self._num_bytes:
                fields |= {"gib": round(self._bytes / GIB, 2), "gib_per_s": round(gib_per_s, 2)}
            structlog.get_logger().info(self._task, **fields)

    def _show(self, stream: Stream, gib_per_s: float) -> None:
        text = f"{self._task}: {self._items} of {self._num_items} {self._name}"
        if self._num_bytes:
            gib, of_gib = self._bytes / GIB, self._num_bytes / GIB
            text = f"{text}, {gib:.2f} of {of_gib:.2f} GiB, {gib_per_s:.2f} GiB/s"
        with contextlib.suppress(OSError, ValueError):
            stream.write(f"{STATUS}\x1b[K{text}" if stream.isatty() else f"{STATUS}{text}\n")
            stream.flush()
