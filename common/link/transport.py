"""What an actor sees of its links: one inbox that delivers messages, and a way to send.

`common.link.sockets.ZmqTransport` speaks ZeroMQ; tests have one in memory (`tests.memory_link`).
Delivery is at most once: a lost connection can lose messages but never doubles or reorders them;
receivers detect the gap by (attempt, first index).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

from common.messages.address import Address

Deliver = Callable[[Any, Address], None]
"""Called on the loop with each message of the inbox's union and the address of its sender."""

PeerLost = Callable[[Address], None]
"""Called on the loop for a peer that is not there, or whose outbox stayed undrained for too long.
The messages in it are dropped."""


class Transport(Protocol):
    """All links of one actor."""

    why_lost: str
    """What was found of the peer that `PeerLost` was last called for."""

    @property
    def address(self) -> Address:
        """The owner's own inbox, to be put into messages as a place to answer to."""

    @property
    def inbox_empty(self) -> bool:
        """Whether all messages that had arrived were delivered; leases may be judged only then."""

    def resolve(self, endpoint: str) -> tuple[str, ...]:
        """Return the literal endpoints that a router's name stands for, as far as known now.

        Never waits; looks names up again once a second. `ConfigError` for what is no endpoint.
        """

    def open(self, deliver: Deliver, peer_lost: PeerLost) -> None:
        """Start delivering messages; before this nothing is read."""

    def send(self, to: Address, message: Any) -> None:
        """Send without ever blocking; what a peer cannot take yet waits in its outbox, merged.

        Raises `MessageTooLarge` when the encoded message is over the receiver's size limit, and
        `MalformedMessage` for what the wire cannot carry.
        """

    async def all_sent(self, within_s: float) -> None:
        """Wait, for so long at most, until names were looked up and nothing waits to be sent."""

    def probe(self, to: Address) -> None:
        """Find out whether a peer that says nothing is there; `PeerLost` within 1.2 s if not.

        The kernels answer, so a peer that is busy counts as there.
        """

    def forget(self, peer: Address) -> None:
        """Close the link to a peer that is known to be gone and drop what waits for it."""

    async def close(self, linger_s: float) -> None:
        """Send what still waits, for `linger_s` at most, then close every socket.

        Heartbeats may be lost: when a whole deployment ends, no process is left to read them.
        """
