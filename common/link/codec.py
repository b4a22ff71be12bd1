"""The wire form of a message: a MessagePack head, and one frame with all its array columns.

The head is `[protocol version, destination's instance id, sender's endpoint, sender's instance id,
tag, fields…]`. It is written in the newest version that sender and destination both speak. Fields
go by position: fields with defaults may be missing at the end (an older sender), further ones are
passed over (a newer sender that writes the same protocol version). A column
stands in the head as its number of bytes; the second frame has the columns one behind the other,
little-endian. A message without columns, or with empty ones only, has no second frame.
"""

from __future__ import annotations

import types
import typing
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Final, TypeVar

import msgpack

from common.errors import MalformedMessage
from common.link.records import Columns, Inline
from common.link.shapes import Shapes
from common.messages.address import PREVIOUS_VERSION, PROTOCOL_VERSION, Address
from common.messages.control import OtherProtocol
from common.messages.previous import OLD_FORMS

T = TypeVar("T")

MAX_FRAMES = 2
_FIRST_FIELD = 5
_MAX_ITEMS = 1 << 18  # as many ids as any model's context has
_MAX_NAME_CHARACTERS = 512  # an ipc path has 107 bytes, a host name 255

SPOKEN: Final = {PROTOCOL_VERSION: Shapes({}), PREVIOUS_VERSION: Shapes(OLD_FORMS)}


@dataclass(frozen=True, slots=True)
class Envelope:
    """A message with where it was meant to go and where it came from."""

    to_instance_id: str
    sender: Address
    message: Any


_address = lru_cache(1024)(Address)  # the same few senders: 0.3 us, where making one takes 0.8


class Codec:
    """Writes any message, and reads those of one inbox's closed union."""

    def __init__(self, inbox: Any, spoken: Mapping[int, Shapes] = SPOKEN) -> None:
        """Take the union type of an inbox, such as `ComputeInbox`, or one message class."""
        self.versions = sorted(spoken)
        self.version = self.versions[-1]
        self._spoken = spoken
        self._writes: dict[tuple[int, Any], tuple[int, str, Any]] = {}
        is_union = typing.get_origin(inbox) in (typing.Union, types.UnionType)
        members = typing.get_args(inbox) if is_union else (inbox,)
        self._reads = {
            version: {
                tag: read for tag, (_, _, read) in shapes.tagged(members, _FIRST_FIELD).items()
            }
            for version, shapes in spoken.items()
        }

    def encode(self, message: Any, to: Address, sender: Address) -> list[bytes]:
        """Return the frames of any message, also of another inbox's union.

        Raises `MalformedMessage` for what the wire cannot carry (text with lone surrogates,
        integers over 64 bits).
        """
        parts: list[bytes | array[Any]] = []
        entry = self._writes.get((to.protocol, message.__class__))
        version, tag, write = entry or self._writer(to.protocol, message.__class__)
        fields = write(message, parts)
        head = (version, to.instance_id, sender.endpoint, sender.instance_id, tag, *fields)
        parts = [part for part in parts if part]
        return [_packed(head), b"".join(parts)] if parts else [_packed(head)]

    def decode(self, frames: Sequence[bytes]) -> Envelope:
        """Read and validate; raises `MalformedMessage` and nothing else, whatever comes.

        Of another protocol version only the envelope is read; the message is `OtherProtocol`.
        """
        if not 1 <= len(frames) <= MAX_FRAMES:
            raise MalformedMessage(f"{len(frames)} frames; a message has 1 or {MAX_FRAMES}")
        head = _unpacked(frames[0])
        if type(head) is not list or len(head) < _FIRST_FIELD:
            raise MalformedMessage("the head is no list of an envelope and fields")
        version, *names = head[:_FIRST_FIELD]
        if type(version) is not int:
            raise MalformedMessage(f"protocol version {version!r:.20}")
        for name in names:
            if type(name) is not str or len(name) > _MAX_NAME_CHARACTERS:
                raise MalformedMessage(f"envelope: a short str expected, got {name!r:.40}")
        to_instance_id, endpoint, instance_id, tag = names
        sender = _address(endpoint, instance_id, version)
        reads = self._reads.get(version)
        if reads is None:
            return Envelope(to_instance_id, sender, OtherProtocol(version, tag))
        read = reads.get(tag)
        if read is None:
            raise MalformedMessage(f"tag {tag!r:.40} is none of {sorted(reads)}")
        columns = Columns(frames[1] if len(frames) == MAX_FRAMES else b"")
        try:
            message = read(head, columns)
            columns.finish()
        except MalformedMessage as error:
            raise MalformedMessage(f"{tag}: {error}") from None
        return Envelope(to_instance_id, sender, message)

    def _writer(self, newest: int, cls: Any) -> tuple[int, str, Any]:
        """Return how to write a message to a peer that speaks up to a version."""
        version = max(self.versions[0], min(newest, self.version))  # too old: it refuses that, too
        write, _ = self._spoken[version].record(cls, _FIRST_FIELD)
        entry = version, cls.TAG, write
        if abs(newest - self.version) <= 1:  # a peer may claim anything
            self._writes[newest, cls] = entry
        return entry


def pack(value: Any) -> bytes:
    """Write a plain dataclass, such as `StreamHeader`, into one piece of no version."""
    write, _ = SPOKEN[max(SPOKEN)].record(type(value), 0)
    return _packed(write(value, None))


def unpack(cls: type[T], data: bytes) -> T:
    """Read what `pack` wrote; raises `MalformedMessage` and nothing else, whatever comes."""
    _, read = SPOKEN[max(SPOKEN)].record(cls, 0)
    value: T = read(_unpacked(data), Inline())
    return value


def _packed(value: Any) -> bytes:
    try:
        packed: bytes = msgpack.packb(value, use_bin_type=True)
    except (UnicodeEncodeError, OverflowError) as error:
        raise MalformedMessage(f"cannot be put on the wire: {error}") from error
    return packed


def _unpacked(data: bytes) -> Any:
    try:
        return msgpack.unpackb(data, max_array_len=_MAX_ITEMS, max_map_len=0, max_ext_len=0)
    except (ValueError, TypeError, msgpack.UnpackException) as error:
        raise MalformedMessage(f"no MessagePack: {type(error).__name__} {error!s:.80}") from None
