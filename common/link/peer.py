"""One link to one peer: a PUSH socket and the outbox before it."""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass
from typing import Any

import zmq

from common.link.curve import Keys
from common.link.probe import Probe
from common.messages.address import Address

PATIENCE_S = 2.0
# Each merge copies what is there, and its reader's loop stands still for all of it at once.
_MAX_MERGED_BYTES = 64 << 10


@dataclass(slots=True)
class Waiting:
    """A message with its size; `frames` are gone once it has absorbed another."""

    message: Any
    num_bytes: int
    frames: list[bytes] | None


class Outbox:
    """The messages that wait for one peer, first in, first out; the clock is an argument.

    A new message is joined to the last one if that has a method `merged`, which returns one message
    for both or None. So the steps that wait for a slow peer share a few messages.
    """

    def __init__(self, max_message_bytes: int) -> None:
        self._queue: deque[Waiting] = deque()
        self._num_bytes = 0
        self._max_bytes = 2 * max_message_bytes
        self._max_merged_bytes = min(max_message_bytes // 2, _MAX_MERGED_BYTES)
        self._moved_s = 0.0
        self.num_merged = 0

    def __len__(self) -> int:
        return len(self._queue)

    @property
    def holds_up(self) -> bool:
        """Whether a closing transport should wait for these messages; a heartbeat can go."""
        return any(getattr(waiting.message, "LINGERS", True) for waiting in self._queue)

    @property
    def first(self) -> Waiting:
        return self._queue[0]

    def put(self, message: Any, frames: list[bytes], num_bytes: int, now_s: float) -> None:
        if not self._queue:
            self._moved_s = now_s
        self._num_bytes += num_bytes
        if self._queue and self._merge(message, num_bytes):
            return
        self._queue.append(Waiting(message, num_bytes, frames))

    def sent(self, now_s: float) -> None:
        self._num_bytes -= self._queue.popleft().num_bytes
        self._moved_s = now_s

    def overdue(self, now_s: float, patience_s: float = PATIENCE_S) -> bool:
        """Whether nothing has been sent for too long, or too many bytes wait."""
        if not self._queue:
            return False
        return now_s - self._moved_s >= patience_s or self._num_bytes > self._max_bytes

    def _merge(self, message: Any, num_bytes: int) -> bool:
        last = self._queue[-1]
        merge = getattr(last.message, "merged", None)
        if merge is None or last.num_bytes + num_bytes > self._max_merged_bytes:
            return False
        merged = merge(message)
        if merged is None:
            return False
        last.message = merged
        last.num_bytes += num_bytes
        last.frames = None
        self.num_merged += 1
        return True


_HIGH_WATER_MARK = 64  # beyond it messages wait in the outbox, where they merge
# A full inbox leaves heartbeats unread; libzmq then hangs up and loses messages on their way: at
# 900 ms, 560 of 8,600 messages to a detokenizer that was behind. Leases find dead peers; these
# heartbeats only clear away connections whose other end vanished without a word.
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 30_000
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 1000
# Where a network is cut, TCP asks less and less often, up to minutes, and would see as late that it
# is healed: data that nobody acknowledges for so long, and connections that nobody answers, are
# given up and begun anew. Leases end sooner, so nothing is lost that they would have kept.
_UNACKNOWLEDGED_MS = 3_000
_CONNECT_TIMEOUT_MS = 1_000
_PROBE_AGAIN_S = 0.2
# Plain integers: joining two flags of pyzmq's enum takes 0.5 us, ten times a message of ten frames.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Peer:
    """A PUSH socket to one address; it never blocks and queues nothing for a dead peer."""

    __slots__ = (
        *("_probe", "_probe_at_s", "_was_open", "address", "fd", "outbox", "socket"),
        *("succeeded", "to_probe", "used_s", "watched"),
    )

    def __init__(self, address: Address, link: zmq.Socket[bytes], outbox: Outbox) -> None:
        self.address = address
        self.socket = link
        self.outbox = outbox
        self.fd = int(link.getsockopt(zmq.FD))
        self.watched = False
        self.used_s = 0.0
        self.succeeded = False  # a newer link leads to another instance at the same endpoint
        self.to_probe = False  # it says nothing, and somebody wants to know whether it is there
        self._was_open = False
        self._probe: Probe | None = None
        self._probe_at_s = 0.0

    @property
    def takes_messages(self) -> bool:
        """Whether libzmq is connected and has room. This may consume the descriptor's signal."""
        takes = bool(int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT)
        self._was_open |= takes
        return takes

    def why_gone(self, now_s: float) -> str:
        """Say why no process is there any more, as far as is known now; else nothing.

        It is looked for where somebody asks, or a link that was open is not: then the kernel of a
        host refuses connections at once, and nobody has to wait for a lease.
        """
        if self._probe is None:
            is_broken = self._was_open and not self.takes_messages
            if now_s < self._probe_at_s or not (self.to_probe or is_broken):
                return ""
            try:
                self._probe = Probe(self.address.endpoint, now_s)
            except OSError:  # descriptors may have run out; it is tried again
                self._probe_at_s = now_s + _PROBE_AGAIN_S
                return ""
        why = self._probe.why_gone(now_s)
        if why is None:
            return ""
        self._probe.close()
        self._probe, self._probe_at_s, self.to_probe = None, now_s + _PROBE_AGAIN_S, False
        return why

    def close(self, linger_ms: int = 0) -> None:
        """Close the link; libzmq goes on with what it has taken for so long."""
        if self._probe is not None:
            self._probe.close()
        self.socket.close(linger_ms)

    def push(self, frames: list[bytes]) -> bool:
        """Hand a message to libzmq; False when it cannot take it now.

        `send` looks at what the I/O thread reports only every few million ticks, EVENTS always
        does: so a message that `send` refuses is tried again if EVENTS allows it.
        """
        while not self._push_once(frames):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                return False
        return True

    def _push_once(self, frames: list[bytes]) -> bool:
        link = self.socket
        last = len(frames) - 1
        for place, frame in enumerate(frames):
            try:
                link.send(frame, _LAST if place == last else _MORE)
            except zmq.Again:
                self._finish_dropped(frames, place)
                return False
        return True

    def _finish_dropped(self, frames: list[bytes], place: int) -> None:
        """End a message whose pipe went away in the middle.

        libzmq has rolled back its first frames and swallows the rest up to the last one, which must
        therefore be sent before the message is tried again.
        """
        last = len(frames) - 1
        if 0 < place < last:
            for rest in range(place + 1, last + 1):
                self.socket.send(frames[rest], _LAST if rest == last else _MORE)


def connect(
    context: zmq.Context[Any], to: Address, outbox: Outbox, keys: Keys | None, shortcut: str = ""
) -> Peer:
    """Open a link; `to.endpoint` must be literal. Raises `zmq.ZMQError` if libzmq refuses it.

    It goes by the path of a shortcut, if there is one, and without keys then.
    """
    link: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    try:
        link.setsockopt(zmq.IMMEDIATE, 1)  # else messages queue for a peer that never answers
        link.setsockopt(zmq.LINGER, 0)
        link.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        link.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        link.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        link.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        link.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        link.setsockopt(zmq.TCP_MAXRT, _UNACKNOWLEDGED_MS)
        link.setsockopt(zmq.CONNECT_TIMEOUT, _CONNECT_TIMEOUT_MS)
        if "[" in to.endpoint:
            link.setsockopt(zmq.IPV6, 1)
        if keys is not None and not shortcut:
            keys.protect_link(link)
        link.connect(f"ipc://{shortcut}" if shortcut else to.endpoint)
    except BaseException:
        link.close(0)
        raise
    return Peer(to, link, outbox)
