"""Messages of the version before are read and written as the release before does it."""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import MISSING, dataclass, field, fields, is_dataclass, replace
from pathlib import Path
from typing import Any, ClassVar

import msgpack
import pytest
from hypothesis import given
from hypothesis import strategies as st

from common.errors import MalformedMessage
from common.link.codec import SPOKEN, Codec, pack, unpack
from common.link.shapes import Inline, Shapes
from common.messages.address import PREVIOUS_VERSION, PROTOCOL_VERSION, Address
from common.messages.arrays import Int32s, Int64s, int32s, int64s, require
from common.messages.control import Abort, OtherProtocol, RouterAlive, WorkerAlive
from common.messages.generate import Generate, StreamHeader
from common.messages.previous import OLD_FORMS, OldForm
from tests import old_release
from tests.unit.common.message_strategies import INBOXES, members, values_of
from tests.unit.common.sample_messages import (
    ATTEMPT,
    HEADER,
    RECEIVER,
    ROUTE,
    SENDER,
    alive,
    samples,
)

FRAMES: dict[str, list[bytes]] = {
    name: [bytes.fromhex(frame) for frame in frames]
    for name, frames in json.loads(
        Path(__file__).with_name("frames_of_previous.json").read_text()
    ).items()
}
HEADER_OF_BEFORE = FRAMES["stream header"][0]
SAMPLES = samples(HEADER_OF_BEFORE)
NOW = [Codec(inbox) for inbox in INBOXES]
BEFORE = [Codec(inbox, old_release.SPOKEN) for inbox in INBOXES]
ANY_INBOX = range(len(INBOXES))
READERS = {member: i for i in ANY_INBOX for member in members(INBOXES[i])}
OF_NOW = Address("tcp://127.0.0.1:1", "1" * 16, PROTOCOL_VERSION)


def addresses_in(value: Any) -> Iterator[Address]:
    if isinstance(value, Address):
        yield value
    for name in getattr(value, "__slots__", ()):
        yield from addresses_in(getattr(value, name))


def test_a_frame_of_every_kind_of_message_is_recorded() -> None:
    assert {type(sample) for sample in SAMPLES.values()} == set(READERS)
    assert set(SAMPLES) | {"stream header"} == set(FRAMES)


@pytest.mark.parametrize("name", SAMPLES)
def test_what_the_release_before_wrote_is_read(name: str) -> None:
    envelope = NOW[READERS[type(SAMPLES[name])]].decode(FRAMES[name])
    assert envelope.message == SAMPLES[name]
    assert envelope.sender == SENDER
    known = [envelope.sender, *addresses_in(envelope.message)]
    assert {address.protocol for address in known} == {PREVIOUS_VERSION}


@pytest.mark.parametrize("name", SAMPLES)
def test_the_release_before_that_other_tests_run_writes_the_same_bytes(name: str) -> None:
    assert BEFORE[0].encode(SAMPLES[name], RECEIVER, SENDER) == FRAMES[name]


def without_new_fields(record: Any) -> Any:
    """A message as the release before could say it."""
    new = old_release.NEW_FIELDS.get(type(record), ())
    changes = {
        each.name: each.default if each.default_factory is MISSING else each.default_factory()
        for each in fields(record)
        if each.name in new
    }
    for each in fields(record):
        value = getattr(record, each.name)
        if each.name not in changes and is_dataclass(value):
            changes[each.name] = without_new_fields(value)
    return replace(record, **changes)


@pytest.mark.parametrize("inbox", ANY_INBOX)
@given(data=st.data())
def test_every_message_crosses_between_the_releases_unchanged(
    inbox: int, data: st.DataObject
) -> None:
    message = data.draw(st.one_of(*[values_of(kind) for kind in members(INBOXES[inbox])]))
    message = without_new_fields(message)
    for write, read in ((NOW, BEFORE), (BEFORE, NOW)):
        frames = write[inbox].encode(message, RECEIVER, SENDER)
        assert read[inbox].decode(frames).message == message


def test_a_stream_header_is_read_by_the_other_release() -> None:
    assert unpack(StreamHeader, HEADER_OF_BEFORE) == HEADER
    _, read = old_release.SPOKEN[old_release.VERSION].record(StreamHeader, 0)
    assert read(msgpack.unpackb(pack(HEADER)), Inline()) == HEADER


@pytest.mark.parametrize("newest", range(PREVIOUS_VERSION - 1, PROTOCOL_VERSION + 2))
def test_a_message_is_written_in_the_lower_version_of_both(newest: int) -> None:
    to = Address("tcp://127.0.0.1:1", "1" * 16, newest)
    frames = NOW[1].encode(Abort(ATTEMPT, "lost"), to, SENDER)
    written = msgpack.unpackb(frames[0])[0]
    assert written == min(max(newest, PREVIOUS_VERSION), PROTOCOL_VERSION)
    assert NOW[1].decode(frames).sender.protocol == written


def test_whose_version_is_not_known_is_written_to_in_the_one_before() -> None:
    unknown = Address("tcp://127.0.0.1:1", "")
    assert msgpack.unpackb(NOW[3].encode(alive(), unknown, SENDER)[0])[0] == PREVIOUS_VERSION


def test_the_first_heartbeat_already_says_what_its_sender_speaks() -> None:
    heartbeat = WorkerAlive(**{**fields_of(alive()), "address": OF_NOW})
    frames = NOW[3].encode(heartbeat, Address("tcp://127.0.0.1:1", ""), OF_NOW)
    message = NOW[3].decode(frames).message
    assert message == heartbeat
    assert message.address.protocol == PROTOCOL_VERSION
    assert BEFORE[3].decode(frames).message == heartbeat


def fields_of(record: Any) -> dict[str, Any]:
    return {name: getattr(record, name) for name in record.__slots__}


def test_addresses_in_a_message_say_what_their_owners_speak() -> None:
    generate = Generate(ATTEMPT, OF_NOW, b"", int32s(), SAMPLES["generate"].sampling, b"", 0.0)
    for to, known in ((OF_NOW, PROTOCOL_VERSION), (RECEIVER, PROTOCOL_VERSION)):
        message = NOW[1].decode(NOW[1].encode(generate, to, SENDER)).message
        assert message.detokenizer.protocol == known
    packed = pack(StreamHeader(reply=OF_NOW))
    assert unpack(StreamHeader, packed).reply.protocol == PROTOCOL_VERSION


@pytest.mark.parametrize("version", [PREVIOUS_VERSION - 1, PROTOCOL_VERSION + 1, -1, 1 << 60])
def test_of_another_version_only_the_envelope_is_read(version: int) -> None:
    head = [version, RECEIVER.instance_id, SENDER.endpoint, SENDER.instance_id, "new", {"a": 1}][:5]
    envelope = NOW[1].decode([msgpack.packb([*head, ["what", "ever"]]), b"columns"])
    assert envelope.message == OtherProtocol(version, "new")
    assert envelope.sender == SENDER
    assert envelope.to_instance_id == RECEIVER.instance_id


@pytest.mark.parametrize("version", [None, "7", 7.0, True, [7]])
def test_a_version_that_is_no_number_is_malformed(version: Any) -> None:
    with pytest.raises(MalformedMessage, match="protocol version"):
        NOW[1].decode([msgpack.packb([version, "", "", "", "abort"])])


def test_the_release_before_reads_nothing_of_this_one() -> None:
    frames = NOW[1].encode(RouterAlive(ROUTE.reply, 1), OF_NOW, SENDER)
    assert BEFORE[1].decode(frames).message == OtherProtocol(PROTOCOL_VERSION, "router_alive")
    assert BEFORE[1].encode(RouterAlive(ROUTE.reply, 1), OF_NOW, SENDER) != frames


def test_the_table_of_old_forms_is_that_of_one_version() -> None:
    assert set(SPOKEN) == {PROTOCOL_VERSION, PREVIOUS_VERSION}
    assert all(old.form.__name__.endswith(str(PREVIOUS_VERSION)) for old in OLD_FORMS.values())


# --- the mechanism, with a difference that has columns and lies inside other records


@dataclass(frozen=True, slots=True)
class Scores:
    ids: Int64s
    label: str = ""

    def check(self) -> None:
        require(len(self.ids) < 3, "too many ids")


@dataclass(frozen=True, slots=True)
class OldScores:
    count: int
    ids: Int32s


@dataclass(frozen=True, slots=True)
class Step:
    TAG: ClassVar[str] = "step"
    one: Scores
    maybe: Scores | None = None
    rest: list[Scores] = field(default_factory=list)
    last: int = 0


def newer(old: OldScores) -> Scores:
    require(old.count == len(old.ids), "count against ids")
    return Scores(int64s(old.ids), "old")


def older(new: Scores) -> OldScores:
    return OldScores(len(new.ids), int32s(new.ids))


STEPS = Codec(Step, {2: Shapes({}), 1: Shapes({Scores: OldForm(OldScores, older, newer)})})
ONE, MAYBE, REST = (Scores(int64s(ids), "old") for ids in ((1, 2), (3,), ()))
STEP = Step(ONE, MAYBE, [REST], 9)


def step_frames() -> list[bytes]:
    return STEPS.encode(STEP, Address("a", "b", 1), SENDER)


def test_a_record_is_translated_wherever_it_lies() -> None:
    frames = step_frames()
    assert msgpack.unpackb(frames[0])[5:] == [[2, 8], [1, 4], [[0, b""]], 9]
    assert frames[1] == int32s((1, 2, 3)).tobytes()
    assert STEPS.decode(frames).message == STEP
    assert STEPS.decode(STEPS.encode(STEP, Address("a", "b", 2), SENDER)).message == STEP


def test_what_the_old_form_does_not_allow_is_malformed() -> None:
    head, columns = step_frames()
    fields = msgpack.unpackb(head)
    fields[5][0] = 3
    with pytest.raises(MalformedMessage, match="step: one: inconsistent: count against ids"):
        STEPS.decode([msgpack.packb(fields), columns])
    fields[5] = [2]
    with pytest.raises(MalformedMessage, match="step: one: OldScores without ids"):
        STEPS.decode([msgpack.packb(fields), columns])
