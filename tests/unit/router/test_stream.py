"""One streamed response: merging, slow clients, the end."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.messages.failure import Ending, Failure, Usage
from common.messages.logprobs import Candidate, TokenLogprob
from common.messages.text import Part
from services.router.answer import ResponseHead
from services.router.openai.chat_format import ChatFormat
from services.router.openai.chunks import AnswerOptions
from services.router.stream import ResponseStream, SlowClientLimits, StreamFlusher
from tests.text_rows import columns

LIMITS = SlowClientLimits(buffer_bytes=1000, max_bytes=5000, timeout_s=10.0)
PARTS = [Part("content", "a"), Part("content", "b"), Part("content", ""), Part("reasoning", "c")]
STOPPED = Ending("stop", Usage(5, 0, 2))


class Wire:
    """A transport that keeps what is written; `unsent` is what the client did not take yet."""

    def __init__(self) -> None:
        self.writes: list[bytes] = []
        self.unsent = 0
        self.closing = False
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.writes.append(data)

    def get_write_buffer_size(self) -> int:
        return self.unsent

    def is_closing(self) -> bool:
        return self.closing

    def abort(self) -> None:
        self.aborted = True

    def deltas(self) -> list[dict[str, Any]]:
        """Return the delta of every event; all are of one choice that has not ended."""
        events = b"".join(self.writes).split(b"\n\n")[:-1]
        return [json.loads(event[6:])["choices"][0]["delta"] for event in events]

    def contents(self) -> list[str]:
        """Return the content of each event that has one, or what else it is."""
        found: list[str] = []
        for event in b"".join(self.writes).split(b"\n\n")[:-1]:
            if event == b"data: [DONE]":
                found.append("DONE")
                continue
            chunk: dict[str, Any] = json.loads(event[6:])
            if "error" in chunk:
                found.append(f"error {chunk['error']['code']}")
            elif not chunk["choices"]:
                found.append(f"usage {chunk['usage']['total_tokens']}")
            else:
                (choice,) = chunk["choices"]
                delta = choice["delta"]
                kind = delta.get("role") or delta.get("content") or choice["finish_reason"]
                found.append(f"{choice['index']} {kind}")
        return found


def _stream(
    num_choices: int = 1, include_usage: bool = False
) -> tuple[ResponseStream, StreamFlusher]:
    flushes = StreamFlusher(asyncio.get_running_loop(), LIMITS)
    head = ResponseHead("id-1", 1, "demo", "fp")
    layout = ChatFormat(head, num_choices, AnswerOptions(include_usage=include_usage))
    return ResponseStream(layout, num_choices, num_choices, flushes), flushes


async def _turn() -> None:
    await asyncio.sleep(0)
    await asyncio.sleep(0)


async def test_a_batch_of_mail_is_one_write_per_stream() -> None:
    stream, _ = _stream(2)
    wire = Wire()
    stream.attach(wire, chunked=False)
    stream.delta(0, "a")
    stream.delta(1, "x")
    stream.delta(0, "b")
    await _turn()
    assert len(wire.writes) == 1
    assert wire.contents() == ["0 assistant", "0 ab", "1 assistant", "1 x"]


async def test_the_first_text_follows_the_header_in_the_same_turn() -> None:
    stream, _ = _stream()
    wire = Wire()

    def begin() -> None:
        wire.write(b"data: [DONE]\n\n")  # in a header's place
        stream.attach(wire, chunked=False)

    stream.begin = begin
    stream.delta(0, "a")
    assert wire.writes == []
    await asyncio.sleep(0)
    assert wire.contents() == ["DONE", "0 assistant", "0 a"]


async def test_a_header_that_cannot_be_sent_is_the_handlers_to_answer() -> None:
    stream, _ = _stream()

    def begin() -> None:
        raise ValueError("a bad header")

    stream.begin = begin
    stream.delta(0, "a")
    with pytest.raises(ValueError, match="a bad header"):
        await stream.done


async def test_writes_are_framed_as_http_chunks() -> None:
    stream, _ = _stream()
    wire = Wire()
    stream.attach(wire, chunked=True)
    stream.delta(0, "a")
    await _turn()
    size, _, rest = wire.writes[0].partition(b"\r\n")
    assert rest[int(size, 16) :] == b"\r\n"
    assert rest.startswith(b"data: ")


async def test_held_back_text_opens_the_stream_and_writes_nothing_more() -> None:
    stream, _ = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    stream.delta(0, "")
    await _turn()
    stream.delta(0, "")
    await _turn()
    assert wire.contents() == ["0 assistant"]


async def test_the_end_is_finish_usage_done() -> None:
    stream, _ = _stream(include_usage=True)
    wire = Wire()
    stream.attach(wire, chunked=False)
    stream.delta(0, "a")
    stream.finished(0, STOPPED)
    await _turn()
    assert wire.contents() == ["0 assistant", "0 a", "0 stop", "usage 7", "DONE"]
    assert stream.done.result() is None
    assert (stream.usage.completion_tokens, stream.reasons) == (2, ["stop"])


async def test_done_comes_after_an_error_event_and_once() -> None:
    stream, flushes = _stream(2)
    wire = Wire()
    stream.attach(wire, chunked=False)
    stream.delta(0, "a")
    await _turn()
    failure = Failure(503, "worker_lost", "gone", None, True)
    stream.failed(failure)
    await _turn()
    flushes.tick(1.0)
    flushes.schedule(stream)
    await _turn()
    assert wire.contents() == ["0 assistant", "0 a", "error worker_lost", "DONE"]
    assert stream.done.result() == failure


async def test_a_failure_before_the_first_text_ends_a_stream_that_has_not_begun() -> None:
    stream, _ = _stream()
    failure = Failure(400, "too_long", "messages: too long", "messages")
    stream.delta(0, "")  # the row of an attempt that compute refused
    stream.failed(failure)
    await _turn()
    assert stream.done.result() == failure
    assert not stream.has_begun


async def test_logprobs_are_merged_with_their_text() -> None:
    stream, _ = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    for text in ("a", "b"):
        token = TokenLogprob(Candidate(1, text, text.encode(), -0.5), ())
        stream.delta(0, text, columns(token))
    await _turn()
    chunk = json.loads(wire.writes[0].split(b"\n\n")[1][6:])
    tokens = [each["token"] for each in chunk["choices"][0]["logprobs"]["content"]]
    assert (tokens, chunk["choices"][0]["delta"]["content"]) == (["a", "b"], "ab")


@given(
    rows=st.lists(st.lists(st.sampled_from(PARTS), max_size=3), max_size=8),
    writes=st.sets(st.integers(0, 7)),
)
def test_a_parsed_answer_is_the_same_however_its_rows_merge(
    rows: list[list[Part]], writes: set[int]
) -> None:
    async def streamed() -> Wire:
        stream, _ = _stream()
        wire = Wire()
        stream.attach(wire, chunked=False)
        for number, parts in enumerate(rows):
            stream.delta(0, "".join(part.text for part in parts), parts=tuple(parts))
            if number in writes:
                await _turn()
        await _turn()
        return wire

    deltas = asyncio.run(streamed()).deltas()
    parts = [part for row in rows for part in row]
    for kind, field in (("content", "content"), ("reasoning", "reasoning_content")):
        whole = "".join(part.text for part in parts if part.kind == kind)
        assert "".join(delta.get(field) or "" for delta in deltas) == whole


async def test_a_slow_clients_deltas_merge_until_it_reads_on() -> None:
    stream, flushes = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    stream.delta(0, "a")
    await _turn()
    wire.unsent = 1001
    for text in "bcd":
        stream.delta(0, text)
        await _turn()
    flushes.tick(1.0)
    await _turn()
    assert wire.contents() == ["0 assistant", "0 a"]
    wire.unsent = 0
    flushes.tick(2.0)
    await _turn()
    assert wire.contents() == ["0 assistant", "0 a", "0 bcd"]
    flushes.tick(30.0)
    await _turn()
    assert not wire.aborted


async def test_the_end_waits_for_a_slow_client() -> None:
    stream, flushes = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    wire.unsent = 1001
    stream.delta(0, "a")
    stream.finished(0, STOPPED)
    await _turn()
    assert not stream.done.done()
    wire.unsent = 1000
    flushes.tick(1.0)
    await _turn()
    assert wire.contents()[-1] == "DONE"
    assert stream.done.done()


async def test_a_client_that_is_too_far_behind_in_bytes_is_dropped() -> None:
    stream, _ = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    wire.unsent = 1001
    stream.delta(0, "x" * 5001)
    await _turn()
    assert wire.aborted and stream.dropped
    stream.delta(0, "y")
    await _turn()
    assert wire.writes == []


@pytest.mark.parametrize(("waited_s", "dropped"), [(9.9, False), (10.1, True)])
async def test_a_client_that_is_behind_for_too_long_is_dropped(
    waited_s: float, dropped: bool
) -> None:
    stream, flushes = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    wire.unsent = 1001
    stream.delta(0, "a")
    await _turn()
    flushes.tick(waited_s)
    await _turn()
    assert wire.aborted is dropped


async def test_nothing_is_written_to_a_closing_connection() -> None:
    stream, _ = _stream()
    wire = Wire()
    stream.attach(wire, chunked=False)
    wire.closing = True
    stream.delta(0, "a")
    await _turn()
    assert wire.writes == []
