"""What every inbox does with mail that has come: decode, check whom it is for, count, log."""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, replace

import structlog

from common.errors import MalformedMessage
from common.link.codec import Codec, Envelope
from common.messages.address import Address
from common.messages.control import RouterAlive, WorkerAlive

_CONTROL = (WorkerAlive, RouterAlive)
"""May be addressed to whoever is there: their senders look for one another."""

_LOG_INTERVAL_S = 1.0  # a broken or hostile peer must not fill the disk


@dataclass(slots=True)
class LinkStats:
    """Counters of one actor's links since its start; the last two are of this moment."""

    num_sent: int = 0
    num_received: int = 0
    num_malformed: int = 0
    num_misaddressed: int = 0
    num_merged: int = 0
    num_dropped: int = 0  # waited for a peer that was lost or forgotten
    num_peers_lost: int = 0
    num_refused_keys: int = 0
    num_waiting: int = 0
    num_links: int = 0  # over sockets

    def count_refused_key(self) -> None:
        """Count a client that was not let in."""
        self.num_refused_keys += 1

    def copy(self) -> LinkStats:
        """Return the counters as they are now."""
        return replace(self)


class MessageReceiver:
    """Lets in what parses and is meant for this instance; the rest is counted and dropped."""

    def __init__(self, codec: Codec, owner: Address, stats: LinkStats) -> None:
        self._codec = codec
        self._owner = owner
        self._stats = stats
        self._log = structlog.get_logger()
        self._logged_s = 0.0

    def accept(self, frames: Sequence[bytes]) -> Envelope | None:
        """Return the mail, or None for what must go no further."""
        try:
            envelope = self._codec.decode(frames)
        except MalformedMessage as error:
            self._stats.num_malformed += 1
            self._warn("mail dropped: it does not parse", error=str(error))
            return None
        to = envelope.to_instance_id
        if to == self._owner.instance_id or (not to and isinstance(envelope.message, _CONTROL)):
            self._stats.num_received += 1
            return envelope
        self._stats.num_misaddressed += 1
        return None

    def _warn(self, event: str, **details: str) -> None:
        now_s = time.monotonic()
        if now_s - self._logged_s >= _LOG_INTERVAL_S:
            self._logged_s = now_s
            self._log.warning(event, num_malformed=self._stats.num_malformed, **details)
