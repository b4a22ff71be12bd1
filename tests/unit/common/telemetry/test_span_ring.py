"""The spans that a process keeps for timelines."""

from __future__ import annotations

from common.link.codec import pack, unpack
from common.messages.address import Address, AttemptId
from common.messages.queries import StagePart, Timeline, TimelineQuery
from common.telemetry.span_ring import SpanRing, timeline_part


def test_spans_come_back_oldest_first_with_their_numbers() -> None:
    spans = SpanRing("text", "detokenize", "rows", capacity=8)
    for number in range(5):
        spans.note(number, number + 0.5, 10 * number)
    track = spans.track(0.0)
    assert (track.lane, track.name) == ("text", "detokenize")
    assert track.began_s.tolist() == [0, 1, 2, 3, 4]
    assert track.ended_s.tolist() == [0.5, 1.5, 2.5, 3.5, 4.5]
    assert [(arg.name, arg.values.tolist()) for arg in track.args] == [
        ("rows", [0, 10, 20, 30, 40])
    ]


def test_only_the_last_are_kept() -> None:
    spans = SpanRing("text", "write", capacity=4)
    for number in range(11):
        spans.note(number, number)
    assert spans.track(0.0).began_s.tolist() == [7, 8, 9, 10]
    assert spans.track(8.5).began_s.tolist() == [9, 10]


def test_a_ring_without_spans_has_none() -> None:
    assert spans_of(SpanRing("a", "b", "c")) == []


def spans_of(spans: SpanRing) -> list[float]:
    return spans.track(0.0).began_s.tolist()


def test_a_part_says_how_its_clock_stands_to_unix_time() -> None:
    query = TimelineQuery(AttemptId("r", 1), Address("mem://router", "r"), 5.0)
    part = timeline_part(query, lambda: 0.0, ())
    assert part.query == query.query
    assert part.unix_s > 1e9


def test_a_timeline_survives_the_wire() -> None:
    spans = SpanRing("text", "write", "streams")
    spans.note(1.0, 2.0, 3)
    timeline = Timeline((StagePart("router", "router-0", 7.0, (spans.track(0.0),)),))
    assert unpack(Timeline, pack(timeline)) == timeline
