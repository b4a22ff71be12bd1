"""A record of the usual length is read in one pass, with the result of reading field by field."""

from __future__ import annotations

import dataclasses
from typing import Any

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.link.codec import Codec, pack, unpack
from common.messages.address import PROTOCOL_VERSION, Address
from common.messages.generate import StreamHeader
from common.messages.sampling import SamplingParams
from tests.unit.common.message_strategies import INBOXES, members, values_of, wire_values

HERE = Address("ipc:///run/here.sock", "a" * 16, PROTOCOL_VERSION)
THERE = Address("tcp://127.0.0.1:4000", "b" * 16)
CODECS = {member: Codec(inbox) for inbox in INBOXES for member in members(inbox)}
messages = st.sampled_from(list(CODECS)).flatmap(values_of)


def read(codec: Codec, head: list[Any], columns: list[bytes]) -> Any:
    """What comes of a message: itself, or its fault."""
    try:
        return codec.decode([msgpack.packb(head), *columns]).message
    except MalformedMessage as error:
        return str(error)


@given(messages, st.data())
def test_the_reading_in_one_pass_and_by_field_agree(message: Any, data: st.DataObject) -> None:
    codec = CODECS[type(message)]
    frame, *columns = codec.encode(message, HERE, THERE)
    head: list[Any] = msgpack.unpackb(frame)
    if data.draw(st.booleans()):
        place = data.draw(st.integers(5, len(head) - 1))
        head[place] = data.draw(wire_values)
    in_one_pass = read(codec, head, columns)
    if "bytes of columns" not in str(in_one_pass):  # of a longer record, more may come
        assert read(codec, [*head, None], columns) == in_one_pass


def test_what_was_read_is_as_frozen_as_what_was_made() -> None:
    header = unpack(StreamHeader, pack(StreamHeader(HERE)))
    assert type(header) is StreamHeader
    assert type(header.reply) is Address
    assert hash(header) == hash(StreamHeader(HERE))
    assert dataclasses.replace(header, num_logprobs=2).num_logprobs == 2
    with pytest.raises(dataclasses.FrozenInstanceError):
        header.min_tokens = 5  # type: ignore[misc]


@pytest.mark.parametrize("temperature", [0, 1])
def test_an_int_in_a_floats_place_becomes_one_in_a_record_of_many_fields(temperature: int) -> None:
    sampling = unpack(SamplingParams, pack(SamplingParams(1, 1, temperature=temperature)))
    assert type(sampling.temperature) is float


def test_an_empty_list_is_told_from_what_is_no_list() -> None:
    assert unpack(StreamHeader, pack(StreamHeader(HERE))).stop == ()
    with pytest.raises(MalformedMessage, match="stop: list expected, got str ''"):
        unpack(StreamHeader, msgpack.packb([["e", "i", 7], ""]))
