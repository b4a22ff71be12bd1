"""One link to one peer: a PUSH socket and the outbox before it."""

from __future__ import annotations

from typing import Any

import zmq

from common.link.curve import Keys
from common.link.outbox import Outbox
from common.messages.address import Address

_HIGH_WATER_MARK = 64  # beyond it mail waits in the outbox, where it merges
# An inbox that is full leaves heartbeats unread, and who hangs up then loses what was on its way:
# at 900 ms, 560 of 8,600 messages to a detokenizer that was behind. Who is dead, leases say; this
# only clears connections away whose other end vanished without a word.
_HEARTBEAT_MS = 5_000
_HEARTBEAT_TIMEOUT_MS = 30_000
_RECONNECT_MS = 100
_MAX_RECONNECT_MS = 1000
# Plain integers: joining two flags of pyzmq's enum takes 0.5 us, ten times a message of ten frames.
_LAST = int(zmq.NOBLOCK)
_MORE = int(zmq.NOBLOCK | zmq.SNDMORE)


class Peer:
    """A PUSH socket to one address. It never blocks and queues nothing for a dead peer."""

    __slots__ = ("address", "fd", "outbox", "socket", "succeeded", "used_s", "watched")

    def __init__(self, address: Address, socket: zmq.Socket[bytes], outbox: Outbox) -> None:
        self.address = address
        self.socket = socket
        self.outbox = outbox
        self.fd = int(socket.getsockopt(zmq.FD))
        self.watched = False
        self.used_s = 0.0
        self.succeeded = False  # a link to another life at the same endpoint was opened after it

    def push(self, frames: list[bytes]) -> bool:
        """Hand a message to libzmq; False when it cannot take it now.

        `send` looks at news from the I/O thread only now and then (every few million ticks), EVENTS
        always does: so what send refuses is tried again if EVENTS says that it may be.
        """
        while not self._push_once(frames):
            if not int(self.socket.getsockopt(zmq.EVENTS)) & zmq.POLLOUT:
                return False
        return True

    def _push_once(self, frames: list[bytes]) -> bool:
        socket = self.socket
        last = len(frames) - 1
        for place, frame in enumerate(frames):
            try:
                socket.send(frame, _LAST if place == last else _MORE)
            except zmq.Again:
                self._finish_dropped(frames, place)
                return False
        return True

    def _finish_dropped(self, frames: list[bytes], place: int) -> None:
        """End a message whose pipe went away in the middle.

        libzmq has rolled its first frames back and swallows what follows up to the last one, which
        must therefore come before the message is tried anew.
        """
        last = len(frames) - 1
        if 0 < place < last:
            for rest in range(place + 1, last + 1):
                self.socket.send(frames[rest], _LAST if rest == last else _MORE)


def connect(context: zmq.Context[Any], to: Address, outbox: Outbox, keys: Keys | None) -> Peer:
    """Open a link; `to.endpoint` must be literal. Raises `zmq.ZMQError` if libzmq refuses it."""
    socket: zmq.Socket[bytes] = context.socket(zmq.PUSH)
    try:
        socket.setsockopt(zmq.IMMEDIATE, 1)  # else mail queues for whoever never answers
        socket.setsockopt(zmq.LINGER, 0)
        socket.setsockopt(zmq.SNDHWM, _HIGH_WATER_MARK)
        socket.setsockopt(zmq.HEARTBEAT_IVL, _HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, _HEARTBEAT_TIMEOUT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL, _RECONNECT_MS)
        socket.setsockopt(zmq.RECONNECT_IVL_MAX, _MAX_RECONNECT_MS)
        if "[" in to.endpoint:
            socket.setsockopt(zmq.IPV6, 1)
        if keys is not None:
            keys.protect_link(socket)
        socket.connect(to.endpoint)
    except BaseException:
        socket.close(0)
        raise
    return Peer(to, socket, outbox)
