"""Links without sockets, for tests: nothing is delivered before the test says so.

Messages are encoded, decoded and checked as over ZeroMQ. Time is
the exchange's own and moves when the test moves it.
"""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from common.errors import InboxTaken, MessageTooLarge
from common.link.codec import SPOKEN, Codec
from common.link.inbox import LinkStats, MessageReceiver
from common.link.peer import Outbox
from common.link.shapes import Shapes
from common.link.transport import Deliver, PeerLost
from common.messages.address import Address
from common.messages.control import RouterAlive

_MAX_MESSAGE_BYTES = 64 << 20


@dataclass(slots=True)
class _Loss:
    """The next `num_left` messages that match are lost on the way."""

    matches: Callable[[Address, Any], bool]
    num_left: int


class Exchange:
    """Carries all messages of a test, in the order in which they were sent.

    With `auto`, what was sent is delivered in the next turn of the running loop.
    """

    def __init__(self, auto: bool = False, max_message_bytes: int = _MAX_MESSAGE_BYTES) -> None:
        self.now_s = 0.0
        self.max_message_bytes = max_message_bytes
        self._auto = auto
        self._auto_handle: asyncio.Handle | None = None
        self._lives: dict[str, int] = {}
        self._owners: dict[str, MemoryTransport] = {}  # by endpoint
        self._wire: deque[tuple[str, list[bytes]]] = deque()
        self._held: dict[str, list[list[bytes]]] = {}  # by endpoint, while delayed
        self._refusing: set[str] = set()
        self._losses: list[_Loss] = []

    def transport(
        self, name: str, inbox: Any, spoken: Mapping[int, Shapes] = SPOKEN
    ) -> MemoryTransport:
        """Give `name` its inbox; after `kill` this is its next life at the same endpoint."""
        endpoint = endpoint_of(name)
        if endpoint in self._owners:
            raise InboxTaken(f"{name} has its inbox already")
        life = self._lives[name] = self._lives.get(name, 0) + 1
        codec = Codec(inbox, spoken)
        owner = MemoryTransport(self, Address(endpoint, f"{name}.{life}", codec.version), codec)
        self._owners[endpoint] = owner
        return owner

    @property
    def num_in_flight(self) -> int:
        """Messages that were sent and not delivered yet, without delayed and waiting ones."""
        return len(self._wire)

    def deliver(self, num_messages: int | None = None) -> int:
        """Deliver the next `num_messages`, or all until nothing moves; returns how many it were."""
        num_done = 0
        while self._wire and (num_messages is None or num_done < num_messages):
            endpoint, frames = self._wire.popleft()
            num_done += 1
            owner = self._owners.get(endpoint)
            if owner is not None:
                owner.receive(frames)
        return num_done

    def advance(self, seconds: float) -> None:
        """Let time pass; outboxes that are undrained for too long lose their peers."""
        self.now_s += seconds
        for owner in list(self._owners.values()):
            owner.sweep()

    def drop(
        self,
        num_messages: int = 1,
        to: str | None = None,
        kind: type | None = None,
        where: Callable[[Any], bool] | None = None,
    ) -> None:
        """Lose the next messages, only those to the actor `to`, of the class `kind` and for which
        `where` is true, if given."""

        def matches(receiver: Address, message: Any) -> bool:
            right_name = to is None or receiver.endpoint == endpoint_of(to)
            right_kind = kind is None or isinstance(message, kind)
            return right_name and right_kind and (where is None or where(message))

        self._losses.append(_Loss(matches, num_messages))

    def delay(self, name: str) -> None:
        """Hold back what is sent to an actor from now on."""
        self._held.setdefault(endpoint_of(name), [])

    def release(self, name: str) -> None:
        """Send on what was held back, behind what is on its way."""
        for frames in self._held.pop(endpoint_of(name), []):
            self._put(endpoint_of(name), frames)

    def refuse(self, name: str) -> None:
        """Let an actor take no more messages: they wait in their senders' outboxes."""
        self._refusing.add(endpoint_of(name))

    def accept(self, name: str) -> None:
        """Let an actor take messages again; outboxes are emptied at once."""
        self._refusing.discard(endpoint_of(name))
        for owner in list(self._owners.values()):
            owner.flush()

    def heal(self) -> None:
        """Lose, hold back and refuse nothing any more."""
        self._losses.clear()
        for endpoint in list(self._held):
            self.release(endpoint.removeprefix("mem://"))
        for endpoint in list(self._refusing):
            self.accept(endpoint.removeprefix("mem://"))

    def kill(self, name: str) -> None:
        """End an actor's life: it gets and sends nothing more, and nobody tells its peers."""
        owner = self._owners.pop(endpoint_of(name), None)
        if owner is not None:
            owner.end()

    def takes(self, endpoint: str) -> bool:
        """Whether the endpoint has an owner that takes messages."""
        return endpoint in self._owners and endpoint not in self._refusing

    def push(self, to: Address, message: Any, frames: list[bytes]) -> None:
        """Put a message on the wire; for `MemoryTransport`."""
        for loss in self._losses:
            if loss.num_left and loss.matches(to, message):
                loss.num_left -= 1
                return
        if to.endpoint in self._held:
            self._held[to.endpoint].append(frames)
        else:
            self._put(to.endpoint, frames)

    def inject(self, name: str, frames: list[bytes]) -> None:
        """Put any bytes into an actor's inbox, as a broken or hostile peer would."""
        self._put(endpoint_of(name), frames)

    def _put(self, endpoint: str, frames: list[bytes]) -> None:
        self._wire.append((endpoint, frames))
        if self._auto and self._auto_handle is None:
            self._auto_handle = asyncio.get_running_loop().call_soon(self._deliver_turn)

    def _deliver_turn(self) -> None:
        self._auto_handle = None
        try:
            self.deliver(len(self._wire))
        finally:
            if self._wire and self._auto_handle is None:
                self._auto_handle = asyncio.get_running_loop().call_soon(self._deliver_turn)


class MemoryTransport:
    """`common.link.transport.Transport` through an exchange."""

    def __init__(self, exchange: Exchange, address: Address, codec: Codec) -> None:
        self._exchange = exchange
        self._address = address
        self._codec = codec
        self._stats = LinkStats()
        self._receiver = MessageReceiver(self._codec, address, self._stats)
        self._outboxes: dict[Address, Outbox] = {}
        self._unread: list[list[bytes]] = []
        self._deliver: Deliver | None = None
        self._peer_lost: PeerLost | None = None
        self._alive = True
        self.why_lost = ""

    @property
    def address(self) -> Address:
        """`mem://NAME` and `NAME.LIFE`: telling in a test's failure."""
        return self._address

    @property
    def inbox_empty(self) -> bool:
        """Whether nothing waits for `open`; the wire does not count."""
        return not self._unread

    def stats(self) -> LinkStats:
        """Return the counters as they are now."""
        stats = replace(self._stats)
        stats.num_waiting = sum(map(len, self._outboxes.values()))
        stats.num_merged += sum(outbox.num_merged for outbox in self._outboxes.values())
        return stats

    def resolve(self, endpoint: str) -> tuple[str, ...]:
        """Return the endpoint: here every name is literal."""
        return (endpoint,)

    def open(self, deliver: Deliver, peer_lost: PeerLost) -> None:
        """Start delivering messages, first those that came before."""
        self._deliver = deliver
        self._peer_lost = peer_lost
        unread, self._unread = self._unread, []
        for frames in unread:
            self.receive(frames)

    def send(self, to: Address, message: Any) -> None:
        """Send, or let wait what the peer does not take; raises `MessageTooLarge`."""
        frames = self._codec.encode(message, to, self._address)
        num_bytes = sum(map(len, frames))
        if num_bytes > self._exchange.max_message_bytes:
            raise MessageTooLarge(f"{type(message).__name__} of {num_bytes} bytes")
        if not self._alive:
            return
        outbox = self._outboxes.get(to)
        if not outbox and self._exchange.takes(to.endpoint):
            self._stats.num_sent += 1
            self._exchange.push(to, message, frames)
            return
        if outbox is None:
            outbox = self._outboxes[to] = Outbox(self._exchange.max_message_bytes)
        outbox.put(message, frames, num_bytes, self._exchange.now_s)

    async def all_sent(self, within_s: float) -> None:
        """Nothing: what a peer takes has been sent."""

    def probe(self, to: Address) -> None:
        """Send something that is lost like any message, if nobody is there."""
        self.send(to, RouterAlive(self._address, 0))

    def forget(self, peer: Address) -> None:
        """Drop what waits for a peer."""
        outbox = self._outboxes.pop(peer, None)
        if outbox is not None:
            self._stats.num_dropped += len(outbox)
            self._stats.num_merged += outbox.num_merged

    async def close(self, linger_s: float) -> None:
        """Leave the exchange; what can be sent has been sent."""
        self.flush()
        if self._alive:
            self._exchange.kill(self._address.endpoint.removeprefix("mem://"))

    def receive(self, frames: list[bytes]) -> None:
        """Take a message off the wire; for the exchange."""
        if self._deliver is None:
            self._unread.append(frames)
            return
        envelope = self._receiver.accept(frames)
        if envelope is not None:
            self._deliver(envelope.message, envelope.sender)

    def flush(self) -> None:
        """Send what peers take now; for the exchange."""
        for to, outbox in self._outboxes.items():
            while outbox and self._exchange.takes(to.endpoint):
                first = outbox.first
                frames = first.frames or self._codec.encode(first.message, to, self._address)
                self._exchange.push(to, first.message, frames)
                outbox.sent(self._exchange.now_s)
                self._stats.num_sent += 1

    def sweep(self) -> None:
        """Give up peers whose messages do not leave; for the exchange."""
        self.flush()
        for to in [to for to, o in self._outboxes.items() if o.overdue(self._exchange.now_s)]:
            self.forget(to)
            self._stats.num_peers_lost += 1
            self.why_lost = "its messages do not leave"
            if self._peer_lost is not None:
                self._peer_lost(to)

    def end(self) -> None:
        """Go silent for good; for the exchange."""
        self._alive = False
        self._deliver = None
        self._outboxes.clear()


def endpoint_of(name: str) -> str:
    """Return the endpoint of the actor `name`, also before it has an inbox."""
    return f"mem://{name}"
