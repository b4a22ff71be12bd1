"""Logs are JSON in a pipe and readable on a terminal, and cannot break a service."""

from __future__ import annotations

import io
import json
import logging
from collections.abc import Iterator

import pytest
import structlog

from common.config import TelemetrySettings
from common.errors import ConfigError
from common.messages.address import AttemptId
from common.telemetry import log
from common.telemetry.log import Progress

TRACEPARENT = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
GIB = 1 << 30


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    root = logging.getLogger()
    handlers, level = root.handlers[:], root.level
    yield
    log.configure("", "", TelemetrySettings(log_format="json"), io.StringIO())
    structlog.reset_defaults()
    logging.captureWarnings(False)
    root.handlers[:], root.level = handlers, level


def lines_of(stream: io.StringIO) -> list[dict[str, object]]:
    return [json.loads(line) for line in stream.getvalue().splitlines()]


def configured(**settings: str) -> io.StringIO:
    stream = io.StringIO()
    log.configure("compute-0", "compute", TelemetrySettings(**settings), stream)
    return stream


def test_a_pipe_gets_json_that_names_the_process() -> None:
    stream = configured()
    log.describe_process(instance_id="ab12")
    structlog.get_logger().info("started", seconds=1.5)
    (line,) = lines_of(stream)
    assert line["event"] == "started"
    assert line["level"] == "info"
    assert list(line)[:3] == ["timestamp", "level", "event"]
    assert (line["service"], line["instance"]) == ("compute", "compute-0")
    assert line["instance_id"] == "ab12"
    assert str(line["timestamp"]).endswith("Z")


def test_a_requests_lines_carry_its_id_and_its_trace() -> None:
    stream = configured()
    log.for_request("req-1", TRACEPARENT).warning("slow")
    log.for_request("req-2").warning("slow")
    first, second = lines_of(stream)
    assert first["request_id"] == "req-1"
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert "trace_id" not in second


def test_lines_of_one_attempt_name_it_and_its_trace() -> None:
    stream = configured()
    log.for_attempts([AttemptId("0123456789abcdef", 7)], [TRACEPARENT]).error("not sent")
    log.for_attempts([AttemptId("r", 1)], [""]).error("not sent")
    first, second = lines_of(stream)
    assert first["attempt"] == "01234567:7"
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert second["attempt"] == "r:1"
    assert "trace_id" not in second


def test_lines_of_many_attempts_name_a_few_and_say_how_many_they_are() -> None:
    stream = configured()
    attempts = [AttemptId("r", counter) for counter in range(100)]
    log.for_attempts(attempts, [TRACEPARENT] * 100).error("step failed")
    log.for_attempts(()).error("step failed")
    first, second = lines_of(stream)
    assert first["attempts"] == [f"r:{counter}" for counter in range(log.MAX_NAMED)]
    assert first["num_attempts"] == 100
    assert first["trace_id"] == "4bf92f3577b34da6a3ce929d0e0e4736"
    assert not {"attempt", "attempts", "trace_id"} & second.keys()


def test_lines_below_the_level_are_not_written() -> None:
    stream = configured(log_level="warning")
    structlog.get_logger().info("quiet")
    structlog.get_logger().warning("loud")
    assert [line["event"] for line in lines_of(stream)] == ["loud"]


def test_the_console_form_is_for_reading() -> None:
    stream = configured(log_format="console")
    structlog.get_logger().info("registered", worker="compute-0", endpoint="ipc://r")
    structlog.get_logger().error("lost", endpoint="ipc://r")
    info, error = stream.getvalue().splitlines()
    assert info.partition(" ")[2] == "registered worker=compute-0"  # after the time
    assert error.partition(" ")[2] == "[error] lost endpoint=ipc://r"


def test_a_failure_is_logged_with_its_traceback() -> None:
    stream = configured()
    structlog.get_logger().error("broken", exc_info=ValueError("why"))
    (line,) = lines_of(stream)
    assert "ValueError: why" in str(line["exception"])


def test_what_libraries_log_comes_through() -> None:
    stream = configured()
    logging.getLogger("aiohttp.server").warning("odd %s", "request")
    logging.getLogger("aiohttp.server").info("chatter")
    (line,) = lines_of(stream)
    assert (line["event"], line["logger"]) == ("odd request", "aiohttp.server")


def test_a_reader_that_is_gone_is_no_reason_to_fail() -> None:
    stream = configured()
    stream.close()
    structlog.get_logger().info("nobody reads this")


@pytest.mark.parametrize("settings", [{"log_level": "loud"}, {"log_format": "xml"}])
def test_unknown_words_are_refused(settings: dict[str, str]) -> None:
    with pytest.raises(ConfigError, match="should be one of"):
        configured(**settings)


def load(log_format: str, step_s: float, count: int = 10) -> list[str]:
    """Count to the end with so much time between two tensors; returns what was written."""
    stream = io.StringIO()
    log.configure("compute-0", "compute", TelemetrySettings(log_format=log_format), stream)
    now = [0.0]
    progress = Progress("loading weights", count, count * GIB, lambda: now[0])
    for _ in range(count):
        now[0] += step_s
        progress.advance(GIB)
    return stream.getvalue().split("\n")[:-1]


def test_people_see_tensors_bytes_and_speed() -> None:
    lines = load("console", step_s=1.0)
    assert len(lines) == 10
    assert lines[3] == "\rloading weights: 4 of 10 tensors, 4.00 of 10.00 GiB, 1.00 GiB/s"


def test_machines_get_a_log_line_now_and_then() -> None:
    lines = load("json", step_s=4.0)
    assert len(lines) == 3
    assert '"tensors": 3, "of": 10, "gib": 3.0, "gib_per_s": 0.25' in lines[0]


@pytest.mark.parametrize(
    ("log_format", "line"),
    [("console", "\rmeasuring products: 1 of 3 kernels"), ("json", '"kernels": 1, "of": 3}')],
)
def test_items_without_bytes_are_counted(log_format: str, line: str) -> None:
    stream, now = configured(log_format=log_format), [0.0]
    progress = Progress("measuring products", 3, clock=lambda: now[0], items="kernels")
    now[0] += 20.0
    progress.advance()
    assert stream.getvalue().endswith(f"{line}\n")


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_nothing_is_said_of_what_is_over_at_once(log_format: str) -> None:
    assert load(log_format, step_s=0.001) == []
