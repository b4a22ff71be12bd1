"""What passes between compute and its guide, and how it is framed.

Each frame is a little-endian 32-bit length and one MessagePack array; never pickle.
"""

from __future__ import annotations

import struct
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, TypeAlias

import msgpack
import numpy as np

from common.messages.guidance import Guidance
from services.compute.step import Int32Array

HEADER = struct.Struct("<I")
MAX_FRAME_BYTES = 1 << 28


@dataclass(frozen=True, slots=True)
class Prepare:
    """Compile a grammar and keep it, and answer with a `Prepared` of the same number."""

    number: int
    grammar: str


@dataclass(frozen=True, slots=True)
class Place:
    """A sequence has taken a slot: make the mask of the token after `output_ids`.

    What ends it: the model's own `eos_ids` and the client's `stop_ids`.
    """

    slot: int
    epoch: int
    guidance: Guidance
    eos_ids: tuple[int, ...]
    stop_ids: tuple[int, ...]
    min_tokens: int
    ignore_eos: bool
    max_tokens: int
    output_ids: tuple[int, ...]


@dataclass(frozen=True, slots=True)
class Advance:
    """Tokens of guided slots, each to be followed by the next mask.

    Columns: slot, epoch, output index, token.
    """

    rows_R4: Int32Array


@dataclass(frozen=True, slots=True)
class Ready:
    """The guide has loaded the tokenizer and takes orders."""


@dataclass(frozen=True, slots=True)
class Broken:
    """The guide cannot work at all, and says why before it ends."""

    message: str


@dataclass(frozen=True, slots=True)
class Prepared:
    """A grammar is there to be used, or `error` says why it cannot be."""

    number: int
    error: str = ""


@dataclass(frozen=True, slots=True)
class Made:
    """New masks are in the shared memory, and named."""


@dataclass(frozen=True, slots=True)
class Failed:
    """A sequence will get no mask any more: a 400 by its grammar's fault, else a 500."""

    slot: int
    epoch: int
    message: str
    status: int = 400


Order: TypeAlias = Prepare | Place | Advance
Report: TypeAlias = Ready | Broken | Prepared | Made | Failed


def pack_order(order: Order) -> bytes:
    """Frame what the guide is to do; UnicodeEncodeError for half a surrogate pair."""
    match order:
        case Prepare():
            return _framed(["prepare", order.number, order.grammar])
        case Place():
            guidance = order.guidance
            return _framed(
                [
                    "place",
                    order.slot,
                    order.epoch,
                    [guidance.grammar, guidance.allowed_token_ids, guidance.banned_sequences],
                    order.eos_ids,
                    order.stop_ids,
                    order.min_tokens,
                    order.ignore_eos,
                    order.max_tokens,
                    np.array(order.output_ids, dtype=np.int32).tobytes(),
                ]
            )
        case Advance():
            return _framed(["advance", order.rows_R4.tobytes()])


def unpack_order(data: bytes) -> Order:
    """Read an order out of its frame."""
    tag, *fields = msgpack.unpackb(data)
    if tag == "advance":
        return Advance(np.frombuffer(fields[0], dtype=np.int32).reshape(-1, 4))
    if tag == "prepare":
        return Prepare(*fields)
    slot, epoch, (grammar, allowed, banned), eos_ids, stop_ids, *limits, outputs = fields
    min_tokens, ignore_eos, max_tokens = limits
    return Place(
        slot,
        epoch,
        Guidance(grammar, tuple(allowed), tuple(map(tuple, banned))),
        tuple(eos_ids),
        tuple(stop_ids),
        min_tokens,
        ignore_eos,
        max_tokens,
        tuple(np.frombuffer(outputs, dtype=np.int32).tolist()),
    )


_TAGS: dict[type[Report], str] = {
    Ready: "ready",
    Broken: "broken",
    Prepared: "prepared",
    Made: "made",
    Failed: "failed",
}
_REPORTS: dict[str, type[Report]] = {tag: kind for kind, tag in _TAGS.items()}


def pack_report(report: Report) -> bytes:
    """Frame what the guide has to say."""
    fields = [getattr(report, name) for name in report.__slots__]
    return _framed([_TAGS[type(report)], *fields])


def unpack_report(data: bytes) -> Report:
    """Read out of its frame what the guide had to say."""
    tag, *fields = msgpack.unpackb(data)
    return _REPORTS[tag](*fields)


class FrameReader:
    """Cuts a stream of bytes into frames."""

    __slots__ = ("_data",)

    def __init__(self) -> None:
        self._data = bytearray()

    def feed(self, data: bytes) -> Iterator[bytes]:
        """Take bytes and yield the frames that are complete; ValueError for one too large."""
        buffer = self._data
        buffer += data
        while len(buffer) >= HEADER.size:
            (size,) = HEADER.unpack_from(buffer)
            if size > MAX_FRAME_BYTES:
                raise ValueError(f"a frame of {size} bytes")
            end = HEADER.size + size
            if len(buffer) < end:
                return
            frame = bytes(buffer[HEADER.size : end])
            del buffer[:end]
            yield frame


def _framed(values: list[Any]) -> bytes:
    packed: bytes = msgpack.packb(values)
    return HEADER.pack(len(packed)) + packed
