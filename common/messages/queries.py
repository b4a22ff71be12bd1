"""Questions of a router to a worker, and their answers: what it did and when, and how it is."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal, TypeAlias

from common.errors import MalformedMessage
from common.messages.address import Address, AttemptId
from common.messages.arrays import Float64s
from common.messages.experts import ExpertLoad

Subject: TypeAlias = Literal["tokenizer", "prefix_cache_reset"]


@dataclass(frozen=True, slots=True)
class InspectionQuery:
    """Router to worker: describe the tokenizer, or reset the prefix cache and report the result."""

    TAG: ClassVar[str] = "inspection_query"
    query: AttemptId
    reply: Address
    subject: Subject


@dataclass(frozen=True, slots=True)
class Inspection:
    """Worker to router: the answer to an `InspectionQuery`, a JSON object."""

    TAG: ClassVar[str] = "inspection"
    query: AttemptId
    found_json: bytes


@dataclass(frozen=True, slots=True)
class TimelineQuery:
    """Router to worker: send the spans of the last seconds."""

    TAG: ClassVar[str] = "timeline_query"
    LINGERS: ClassVar[bool] = False
    query: AttemptId
    reply: Address
    seconds: float


@dataclass(frozen=True, slots=True)
class TrackArg:
    """A number of each span of a track, such as its rows."""

    name: str
    values: Float64s


@dataclass(frozen=True, slots=True)
class Track:
    """Spans of one kind, oldest first: what was done from `began_s` to `ended_s`.

    Times are those of the sender's monotonic clock; NaN is a span that is not known. Tracks of one
    `lane` are drawn in one line.
    """

    lane: str
    name: str
    began_s: Float64s
    ended_s: Float64s
    args: tuple[TrackArg, ...] = ()

    def check(self) -> None:
        """Raise `MalformedMessage` unless all columns have one length."""
        columns = (self.ended_s, *(arg.values for arg in self.args))
        if any(len(column) != len(self.began_s) for column in columns):
            raise MalformedMessage("a track's columns differ in length")


@dataclass(frozen=True, slots=True)
class TimelinePart:
    """Worker to router: the answer to a `TimelineQuery`.

    `unix_s` is Unix time less the monotonic clock, so that parts of several hosts can be put into
    one timeline.
    """

    TAG: ClassVar[str] = "timeline_part"
    LINGERS: ClassVar[bool] = False
    query: AttemptId
    unix_s: float
    tracks: tuple[Track, ...]


@dataclass(frozen=True, slots=True)
class StagePart:
    """What one process did; `service` and `name` say which it is."""

    service: Literal["router", "tokenizer", "compute", "detokenizer"]
    name: str
    unix_s: float
    tracks: tuple[Track, ...]
    experts: ExpertLoad | None = None  # as the router heard of it last


@dataclass(frozen=True, slots=True)
class Timeline:
    """What a router gives out: its own part, and those of the workers that have answered."""

    parts: tuple[StagePart, ...]
