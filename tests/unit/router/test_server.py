"""StalledConnections are cut where nothing moves, and nowhere else."""

from __future__ import annotations

import logging
import sys

import pytest
from aiohttp.http_exceptions import BadHttpMessage

from services.router.server import OwnFaults, StalledConnections

HEAD_S, SEND_S = 5.0, 20.0


class Wire:
    """A connection, and the transport that it has until it is closed."""

    def __init__(self) -> None:
        self.num_unsent = 0
        self.transport: Wire | None = self

    def get_write_buffer_size(self) -> int:
        return self.num_unsent


@pytest.fixture
def connections() -> StalledConnections[Wire]:
    return StalledConnections(HEAD_S, SEND_S)


def test_who_sends_no_whole_head_in_time_is_cut(connections: StalledConnections[Wire]) -> None:
    early, late = Wire(), Wire()
    assert connections.stalled([early], 0.0) == []
    assert connections.stalled([early, late], 3.0) == []
    assert connections.stalled([early, late], 5.0) == [early]
    assert connections.stalled([late], 8.0) == [late]


def test_who_has_sent_one_may_wait_for_its_answer(connections: StalledConnections[Wire]) -> None:
    wire = Wire()
    connections.stalled([wire], 0.0)
    connections.note_request(wire)
    assert not any(connections.stalled([wire], now_s) for now_s in range(1, 1000))


def test_who_reads_nothing_of_its_answer_is_cut(connections: StalledConnections[Wire]) -> None:
    wire = Wire()
    connections.note_request(wire)
    connections.stalled([wire], 0.0)
    wire.num_unsent = 1000
    assert connections.stalled([wire], 1.0) == []
    wire.num_unsent = 2000  # more to read is no progress
    assert connections.stalled([wire], 19.0) == []
    assert connections.stalled([wire], 20.0) == [wire]


def test_who_reads_slowly_stays(connections: StalledConnections[Wire]) -> None:
    wire = Wire()
    connections.note_request(wire)
    for now_s in range(200):
        wire.num_unsent = 10_000 + (1 if now_s % 15 else 0)
        assert connections.stalled([wire], float(now_s)) == []


def test_what_is_closed_is_forgotten(connections: StalledConnections[Wire]) -> None:
    wire = Wire()
    connections.note_request(wire)
    connections.stalled([wire], 0.0)
    connections.stalled([], 1.0)
    assert connections.stalled([wire], 2.0) == []
    assert connections.stalled([wire], 7.0) == [wire]  # it counts as a new one
    wire.transport = None
    assert connections.stalled([wire], 8.0) == []


@pytest.mark.parametrize(("error", "passes"), [(BadHttpMessage("x"), False), (ValueError(), True)])
def test_clients_that_speak_no_http_are_not_logged(error: Exception, passes: bool) -> None:
    try:
        raise error
    except Exception:
        record = logging.LogRecord("x", 40, "", 0, "x", (), sys.exc_info())
    assert OwnFaults().filter(record) is passes
    assert OwnFaults().filter(logging.LogRecord("x", 40, "", 0, "x", (), None))
