"""Orders and reports as frames."""

from __future__ import annotations

import numpy as np
import pytest

from common.messages.guidance import Guidance
from services.compute.grammar.frames import (
    HEADER,
    MAX_FRAME_BYTES,
    Advance,
    Broken,
    Failed,
    FrameReader,
    Made,
    Order,
    Place,
    Prepare,
    Prepared,
    Ready,
    Report,
    pack_order,
    pack_report,
    unpack_order,
    unpack_report,
)

GUIDANCE = Guidance("start: /a/", (1, 2), ((3,), (4, 5)))
ORDERS: list[Order] = [
    Prepare(7, "start: /ä/"),
    Place(3, 9, GUIDANCE, (2,), (5,), 0, True, 50, (7, 8, 9)),
]
REPORTS: list[Report] = [
    Ready(),
    Broken("no"),
    Prepared(1),
    Prepared(2, "bad"),
    Made(),
    Failed(1, 2, "x"),
]


@pytest.mark.parametrize("order", ORDERS)
def test_an_order_arrives_as_it_was_sent(order: Order) -> None:
    assert unpack_order(pack_order(order)[HEADER.size :]) == order


def test_tokens_arrive_in_their_columns() -> None:
    rows_R4 = np.arange(12, dtype=np.int32).reshape(3, 4)
    order = unpack_order(pack_order(Advance(rows_R4))[HEADER.size :])
    assert isinstance(order, Advance)
    assert order.rows_R4.tolist() == rows_R4.tolist()


@pytest.mark.parametrize("report", REPORTS)
def test_a_report_arrives_as_it_was_sent(report: Report) -> None:
    assert unpack_report(pack_report(report)[HEADER.size :]) == report


@pytest.mark.parametrize("size", [1, 3, 7, 1000])
def test_frames_are_found_however_the_stream_is_cut(size: int) -> None:
    stream = b"".join(map(pack_report, REPORTS))
    reader = FrameReader()
    found = [
        unpack_report(frame)
        for start in range(0, len(stream), size)
        for frame in reader.feed(stream[start : start + size])
    ]
    assert found == REPORTS


def test_a_frame_beyond_all_bounds_is_an_error() -> None:
    with pytest.raises(ValueError, match="bytes"):
        list(FrameReader().feed(HEADER.pack(MAX_FRAME_BYTES + 1)))
