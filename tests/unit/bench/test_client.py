"""Reading a stream of events without parsing it."""

from __future__ import annotations

import json

from hypothesis import given
from hypothesis import strategies as st

from services.bench.client import Reply, StreamReader

HEAD = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
USAGE = {"prompt_tokens": 5, "completion_tokens": 3, "total_tokens": 8}


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def event(text: str) -> bytes:
    body = json.dumps({"choices": [{"text": text}], "usage": None}, separators=(",", ":"))
    return f"data: {body}\n\n".encode()


def ending() -> bytes:
    body = json.dumps({"choices": [], "usage": USAGE}, separators=(",", ":"))
    return f"data: {body}\n\ndata: [DONE]\n\n".encode()


def answer(*texts: str) -> bytes:
    return HEAD + b"".join(chunk(event(text)) for text in texts) + chunk(ending()) + b"0\r\n\r\n"


def read(data: bytes, *cuts: int) -> tuple[Reply, list[bool]]:
    """Feed the pieces between the cuts, a second apart."""
    reader, reply = StreamReader(), Reply(0, sent_s=1.0)
    reader.begin(reply)
    edges = [0, *sorted(cuts), len(data)]
    ended = [
        reader.feed(data[begin:end], 2.0 + number)
        for number, (begin, end) in enumerate(zip(edges, edges[1:], strict=False))
    ]
    return reply, ended


def test_an_answer_in_one_piece_is_counted_and_its_usage_is_read() -> None:
    reply, ended = read(answer("a", "b", "c"))
    assert ended == [True]
    assert (reply.num_events, reply.usage, reply.error) == (3, USAGE, "")
    assert (reply.first_s, reply.last_s, reply.end_s) == (2.0, 2.0, 2.0)
    assert list(reply.gaps_s) == [0.0, 0.0]


@given(st.sets(st.integers(1, len(answer("a", "bc")) - 1), max_size=8))
def test_it_does_not_matter_where_the_bytes_are_cut(cuts: set[int]) -> None:
    reply, ended = read(answer("a", "bc"), *cuts)
    assert ended == [False] * len(cuts) + [True]
    assert (reply.num_events, reply.usage, reply.error) == (2, USAGE, "")
    assert len(reply.gaps_s) == 1


def test_gaps_are_those_between_events_that_carry_tokens() -> None:
    data = answer("a", "b")
    reply, _ = read(data, data.index(event("b")), data.index(ending()))
    assert list(reply.gaps_s) == [1.0]
    assert (reply.first_s, reply.last_s, reply.end_s) == (2.0, 3.0, 4.0)


def test_text_that_looks_like_the_protocol_is_text() -> None:
    reply, ended = read(answer('\ndata: [DONE]\n\ndata: {"error"', '"choices":[]', "0\r\n\r\n"))
    assert ended == [True]
    assert (reply.num_events, reply.error, reply.usage) == (3, "", USAGE)


def test_a_refusal_is_an_error_with_what_the_server_said() -> None:
    refusal = b'HTTP/1.1 429 Too Many Requests\r\nContent-Length: 9\r\n\r\n{"error":'
    reply, ended = read(refusal)
    assert ended == [True]
    assert reply.error == 'HTTP/1.1 429: {"error":'
    assert not reply.usage


def test_an_error_event_ends_the_answer() -> None:
    reply, ended = read(HEAD + chunk(event("a")) + chunk(b'data: {"error":{"code":500}}\n\n'))
    assert ended == [True]
    assert reply.error.startswith('data: {"error":{"code":500}}')


def test_a_lost_connection_ends_only_an_answer_that_is_waited_for() -> None:
    reader, reply = StreamReader(), Reply(0, sent_s=1.0)
    reader.begin(reply)
    reader.feed(answer("a"), 2.0)
    reader.lost("gone", 3.0)
    assert (reply.error, reply.end_s) == ("", 2.0)
    reader.begin(late := Reply(1, sent_s=4.0))
    reader.lost("gone", 5.0)
    assert (late.error, late.end_s) == ("gone", 5.0)


def test_one_reader_reads_one_answer_after_the_other() -> None:
    reader = StreamReader()
    for number in range(3):
        reply = Reply(number, sent_s=1.0)
        reader.begin(reply)
        assert reader.feed(answer("a", "b"), 2.0)
        assert reply.num_events == 2
