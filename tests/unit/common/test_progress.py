"""Long tasks say how far they are: often to people, rarely to machines, quick ones not at all."""

from __future__ import annotations

import io
from collections.abc import Iterator

import pytest
import structlog

from common.config import TelemetrySettings
from common.telemetry import log
from common.telemetry.progress import Progress

GIB = 1 << 30


@pytest.fixture(autouse=True)
def restored() -> Iterator[None]:
    yield
    structlog.reset_defaults()
    log.configure("", "", TelemetrySettings(log_format="json"), io.StringIO())
    structlog.reset_defaults()


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


@pytest.mark.parametrize("log_format", ["console", "json"])
def test_nothing_is_said_of_what_is_over_at_once(log_format: str) -> None:
    assert load(log_format, step_s=0.001) == []
