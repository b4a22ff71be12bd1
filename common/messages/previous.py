"""How this protocol version differs from the one before, which a release speaks, too.

A new field with a default, at the end of a record, is no difference: an older peer passes over it,
and its own records lack it. A packed `StreamHeader` may change in no other way, because compute
hands it on unread. Every other change makes a new version, once a release: copy the record as it
was to here, write the two functions that translate it, and enter them in `OLD_FORMS`; the entries
of earlier versions go. What a new kind of message asks for, an older peer does not do: look at the
address's `protocol` before it is sent.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, fields
from typing import Any, NamedTuple

from common.messages.address import PREVIOUS_VERSION, Address
from common.messages.arrays import Int64s
from common.messages.control import Load, ModelCard, ServiceName, WorkerAlive


class OldForm(NamedTuple):
    """A record as the version before has it, and how to translate to it and back.

    `newer` raises `MalformedMessage` for what is right in the old form only.
    """

    form: type
    older: Callable[[Any], Any]
    newer: Callable[[Any], Any]

    def translated(
        self, write: Callable[..., Any], read: Callable[..., Any]
    ) -> tuple[Callable[..., Any], Callable[..., Any]]:
        """Return (write, read) of today's record, given those of the old form."""
        return (
            lambda value, parts: write(self.older(value), parts),
            lambda value, columns: self.newer(read(value, columns)),
        )


@dataclass(frozen=True, slots=True)
class WorkerAlive6:
    """Only this said a version in 6, and routers refused another one than theirs.

    7: the address says it, so that all stations of a route know it of each other.
    """

    service: ServiceName
    address: Address
    protocol_version: int
    model: ModelCard
    load: Load
    beat: int
    progress: int
    stall_after_s: float
    draining: bool
    open_counters: Int64s
    caught_up: bool = True


def kept(old: Any, new: Any) -> dict[str, Any]:
    """Return the values of a record's fields that another form has, too."""
    names = {field.name for field in fields(new)}
    return {field.name: getattr(old, field.name) for field in fields(old) if field.name in names}


OLD_FORMS: Mapping[type, OldForm] = {
    WorkerAlive: OldForm(
        WorkerAlive6,
        older=lambda new: WorkerAlive6(
            protocol_version=PREVIOUS_VERSION, **kept(new, WorkerAlive6)
        ),
        newer=lambda old: WorkerAlive(**kept(old, WorkerAlive)),
    ),
}
