"""The codec carries every message unchanged and lets nothing malformed through."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.link.codec import Codec, pack, unpack
from common.messages.address import PROTOCOL_VERSION, Address, AttemptId
from common.messages.arrays import Float32s, Int32s, float32s, int32s
from common.messages.control import Abort, Load
from common.messages.generate import ComputeInbox, Generate, StreamHeader
from common.messages.sampling import SamplingParams
from common.messages.text import RouterInbox, TextGenerated
from common.messages.tokenize import TokenizerInbox
from common.messages.tokens import DetokenizeQuery, DetokenizerInbox, TokensGenerated
from tests.unit.common.message_strategies import INBOXES, members, values_of, wire_values

HERE = Address("ipc:///run/here.sock", "a" * 16, PROTOCOL_VERSION)
THERE = Address("tcp://127.0.0.1:4000", "b" * 16)
CODECS = [Codec(inbox) for inbox in INBOXES]
COMPUTE = Codec(ComputeInbox)

transport = st.sampled_from(range(len(INBOXES))).flatmap(
    lambda i: st.tuples(
        st.just(i), st.one_of(*[values_of(member) for member in members(INBOXES[i])])
    )
)


def head_of(*fields: Any, tag: str = "abort", version: int = PROTOCOL_VERSION) -> bytes:
    head = [version, HERE.instance_id, THERE.endpoint, THERE.instance_id, tag, *fields]
    return bytes(msgpack.packb(head))


@given(transport)
def test_every_message_of_every_inbox_comes_back_as_it_was(case: tuple[int, Any]) -> None:
    inbox, message = case
    frames = CODECS[inbox].encode(message, HERE, THERE)
    envelope = CODECS[inbox].decode(frames)
    assert envelope.message == message
    assert type(envelope.message) is type(message)
    assert envelope.sender == THERE
    assert envelope.to_instance_id == HERE.instance_id


@given(st.integers(0, 3), st.lists(st.binary(max_size=200), max_size=5))
def test_random_bytes_are_malformed_and_nothing_worse(inbox: int, frames: list[bytes]) -> None:
    with pytest.raises(MalformedMessage):
        CODECS[inbox].decode(frames)


@given(transport, st.data())
def test_mutated_mail_decodes_or_is_malformed(case: tuple[int, Any], data: st.DataObject) -> None:
    inbox, message = case
    frames = CODECS[inbox].encode(message, HERE, THERE)
    which = data.draw(st.integers(0, len(frames) - 1))
    frame = bytearray(frames[which])
    for _ in range(data.draw(st.integers(1, 3))):
        if frame:
            frame[data.draw(st.integers(0, len(frame) - 1))] = data.draw(st.integers(0, 255))
    frames[which] = bytes(frame[: data.draw(st.integers(0, len(frame)))])
    if data.draw(st.booleans()):
        frames.pop(data.draw(st.integers(0, len(frames) - 1)))
    try:
        CODECS[inbox].decode(frames)
    except MalformedMessage:
        pass


@given(st.integers(0, 3), st.data())
def test_well_formed_heads_with_any_fields_decode_or_are_malformed(
    inbox: int, data: st.DataObject
) -> None:
    tags = [member.TAG for member in members(INBOXES[inbox])]
    head = head_of(
        *data.draw(st.lists(wire_values, max_size=20)), tag=data.draw(st.sampled_from(tags))
    )
    try:
        CODECS[inbox].decode([head, *data.draw(st.lists(st.binary(), max_size=3))])
    except MalformedMessage:
        pass


@given(values_of(StreamHeader))
def test_a_stream_header_survives_packing(header: StreamHeader) -> None:
    assert unpack(StreamHeader, pack(header)) == header


@given(st.binary())
def test_unpacking_random_bytes_is_malformed_or_a_header(data: bytes) -> None:
    try:
        assert isinstance(unpack(StreamHeader, data), StreamHeader)
    except MalformedMessage:
        pass


def malformed(*frames: bytes, codec: Codec = COMPUTE) -> str:
    with pytest.raises(MalformedMessage) as caught:
        codec.decode(frames)
    return str(caught.value)


def test_an_unknown_tag_is_named() -> None:
    assert "'nonsense' is none of" in malformed(head_of(tag="nonsense"))


def test_another_inboxs_message_is_refused() -> None:
    frames = Codec(TokenizerInbox).encode(
        DetokenizeQuery(AttemptId("r", 1), HERE, int32s()), HERE, THERE
    )
    assert "detokenize_query" in malformed(*frames)


def test_a_missing_field_is_named() -> None:
    assert malformed(head_of(["r", 1])) == "abort: Abort without reason"
    assert "AttemptId without counter" in malformed(head_of(["r"], "lost"))


def test_a_wrong_type_is_told_with_its_place() -> None:
    assert malformed(head_of(["r", "one"], "lost")).startswith("abort: attempt: counter: int exp")


def test_a_bool_is_no_int() -> None:
    assert "int expected, got bool True" in malformed(head_of(["r", True], "lost"))


def test_a_float_is_no_int() -> None:
    assert "int expected, got float" in malformed(head_of(["r", 1.0], "lost"))


def test_an_int_over_64_bits_is_refused() -> None:
    assert "64 bits" in malformed(head_of(["r", 1 << 63], "lost"))


def test_a_negative_counter_is_refused() -> None:
    assert "counter is out of range" in malformed(head_of(["r", -1], "lost"))


def test_a_word_that_is_no_reason_is_refused() -> None:
    assert "reason: one of" in malformed(head_of(["r", 1], "boredom"))
    assert "reason: one of" in malformed(head_of(["r", 1], ["lost"]))


def test_nan_is_no_load() -> None:
    with pytest.raises(MalformedMessage, match="kv_usage: float expected, got NaN"):
        unpack(Load, pack(Load(1, 1, 1, float("nan"))))


def test_an_int_will_do_where_a_float_is_wanted() -> None:
    load = unpack(Load, pack(Load(1, 1, 1, 1)))
    assert type(load.kv_usage) is float


def test_so_many_choices_that_a_loop_over_them_would_hang_are_refused() -> None:
    header = b""
    generate = Generate(
        AttemptId("r", 1), HERE, b"", int32s(), SamplingParams(1, 1), header, 0.0, 1 << 40
    )
    with pytest.raises(MalformedMessage, match="num_choices"):
        COMPUTE.decode(COMPUTE.encode(generate, HERE, THERE))


def test_nothing_at_all_is_malformed() -> None:
    assert malformed() == "0 frames; a message has 1 or 2"


def test_a_deep_nest_is_malformed() -> None:
    assert "MessagePack" in malformed(b"\x91" * 100_000)


def test_an_array_that_claims_more_items_than_there_are_bytes_is_malformed() -> None:
    assert "MessagePack" in malformed(b"\xdd\xff\xff\xff\xff")


def query_frames() -> list[bytes]:
    return DETOKENIZER.encode(DetokenizeQuery(AttemptId("r", 1), HERE, int32s([1, 2])), HERE, THERE)


DETOKENIZER = Codec(DetokenizerInbox)


def test_a_column_is_little_endian() -> None:
    assert query_frames()[1] == b"\x01\0\0\0\x02\0\0\0"


def test_a_column_of_a_broken_length_is_refused() -> None:
    head, column = query_frames()
    fields: list[Any] = msgpack.unpackb(head)
    fields[7] = 7
    assert "ids: 7 bytes are no whole number of 4" in malformed(
        msgpack.packb(fields), column[:-1], codec=DETOKENIZER
    )


def test_a_prompt_stays_the_bytes_of_its_frame() -> None:
    ids = int32s([1, 70_000]).tobytes()
    generate = Generate(AttemptId("r", 1), HERE, ids, int32s(), SamplingParams(1, 1), b"", 0.0)
    frames = COMPUTE.encode(generate, HERE, THERE)
    assert frames[1] == b"\x01\0\0\0\x70\x11\x01\0"
    assert COMPUTE.decode(frames).message.prompt_ids is frames[1]
    frames[1] = frames[1][:-1]
    assert "prompt_ids: a column of 8 bytes where 7 are left" in malformed(*frames, codec=COMPUTE)


def test_packed_numbers_are_bytes_or_the_senders_mistake() -> None:
    ids: Any = int32s([1])
    generate = Generate(AttemptId("r", 1), HERE, ids, int32s(), SamplingParams(1, 1), b"", 0.0)
    with pytest.raises(TypeError, match="packed numbers expected"):
        COMPUTE.encode(generate, HERE, THERE)


def test_a_missing_frame_is_refused() -> None:
    fault = malformed(query_frames()[0], codec=DETOKENIZER)
    assert "ids: a column of 8 bytes where 0 are left" in fault


def test_a_frame_too_many_is_refused() -> None:
    assert "3 frames" in malformed(*query_frames(), b"", codec=DETOKENIZER)


def test_data_that_no_column_has_is_refused() -> None:
    head, column = query_frames()
    fault = malformed(head, column + b"\0", codec=DETOKENIZER)
    assert "9 bytes of columns, 8 expected" in fault


@pytest.mark.parametrize("size", [-4, 12, 1 << 62, 4.0, None, True, b""])
def test_a_column_of_a_size_that_cannot_be_is_refused(size: Any) -> None:
    head, column = query_frames()
    fields: list[Any] = msgpack.unpackb(head)
    assert fields[7] == 8
    fields[7] = size
    fault = malformed(msgpack.packb(fields), column, codec=DETOKENIZER)
    assert "ids: a column of" in fault


def test_a_message_without_numbers_is_one_frame() -> None:
    assert len(DETOKENIZER.encode(TokensGenerated(1), HERE, THERE)) == 1


def test_text_that_utf8_cannot_carry_is_refused_at_the_sender() -> None:
    abort = Abort(AttemptId("\ud800", 1), "lost")
    with pytest.raises(MalformedMessage, match="cannot be put on the wire"):
        COMPUTE.encode(abort, HERE, THERE)


def test_a_list_for_a_column_is_the_senders_mistake() -> None:
    query = DetokenizeQuery(AttemptId("r", 1), HERE, [1, 2])  # type: ignore[arg-type]
    with pytest.raises(TypeError, match="array of type 'i'"):
        DETOKENIZER.encode(query, HERE, THERE)


@dataclass(frozen=True, slots=True)
class Old:
    TAG: ClassVar[str] = "grown"
    name: str
    ids: Int32s
    number: int = 7


@dataclass(frozen=True, slots=True)
class New:
    TAG: ClassVar[str] = "grown"
    name: str
    ids: Int32s
    number: int = 7
    scores: Float32s = dataclasses.field(default_factory=float32s)
    label: str = "none"


def test_an_older_senders_missing_fields_get_their_defaults() -> None:
    frames = Codec(Old).encode(Old("a", int32s([1]), 9), HERE, THERE)
    assert Codec(New).decode(frames).message == New("a", int32s([1]), 9)


def test_a_newer_senders_further_fields_and_columns_are_passed_over() -> None:
    frames = Codec(New).encode(New("a", int32s([1]), 9), HERE, THERE)
    assert Codec(Old).decode(frames).message == Old("a", int32s([1]), 9)


def test_one_tag_cannot_stand_for_two_messages() -> None:
    with pytest.raises(TypeError, match="two messages"):
        Codec(Old | New)


def test_a_message_that_opens_many_requests_has_no_frame_for_each_of_them() -> None:
    rows = range(300)
    message = TextGenerated()
    for row in rows:
        message.add(row, 0, (), "")
        message.open(3, 0, int32s([row, 1, 2]))
    codec = Codec(RouterInbox)
    frames = codec.encode(message, HERE, THERE)
    assert len(frames) == 2
    assert codec.decode(frames).message == message
