"""What the processes of stages tell one another, over ZeroMQ: on one host, or on several.

Each has one inbox, to which the stage before and the one that leads write. Who is gone, stopped or
cut off loses the connections to its inbox, which a thread of those who write there notices: stages
that have parted never meet again.

Shape legend: T tokens, E hidden width.
"""

from __future__ import annotations

import math
import threading
import time
from collections import deque
from collections.abc import Callable
from enum import IntEnum
from typing import Any, NamedTuple

import numpy as np
import torch
import zmq
from torch import Tensor
from zmq.utils.monitor import recv_monitor_message

from common.errors import ConfigError, FatalError
from common.link.curve import Doorkeeper, Keys

HEARTBEAT_MS = 250
SILENCE_MS = 1250  # of ZeroMQ's own thread, which also answers while the process computes
LOOK_MS = 100  # between two looks at whether there is another connection to watch
TIMEOUT_S = 600.0  # of one step, however little processor time a stage gets
LINGER_MS = 500


class Kind(IntEnum):
    START = 1  # to a stage: who it is and what it has to load
    READY = 2  # from a stage, whose number it has: the limits of what it has loaded
    BROKEN = 3  # from a stage: why it cannot load
    LEAST = 4
    CALL = 5  # to a stage: one of the executor, of this number, or the end
    HIDDEN = 6


END = 0  # the number of the last call


class Message(NamedTuple):
    number: int
    payload: memoryview


class StageLink:
    """The sockets of one process, used by one thread; another one watches over its connections.

    That one calls `lost` when one of those that this process has begun is lost.
    """

    def __init__(self, keys: Keys | None, lost: Callable[[], object]) -> None:
        self._keys = keys
        self._lost = lost
        self._context: zmq.Context[Any] = zmq.Context()
        self._doorkeeper = None if keys is None else Doorkeeper(self._context, keys)
        self._sockets: list[zmq.Socket[bytes]] = []
        self._inbox = self._socket(zmq.PULL)
        self._monitors: list[zmq.Socket[bytes]] = []
        self._arrived: dict[int, deque[Message]] = {kind: deque() for kind in Kind}
        self._closing = threading.Event()
        self._thread = threading.Thread(target=self._watch, name="stages", daemon=True)
        self._thread.start()

    def bind(self, endpoint: str) -> None:
        """Let others write here; ConfigError if that cannot be."""
        if self._keys is not None:
            self._keys.protect_inbox(self._inbox)
        try:
            self._inbox.bind(endpoint)
        except zmq.ZMQError as error:
            raise ConfigError(
                f"compute.pipeline_stages: {endpoint} cannot be bound here ({error}); it has to be "
                "a free port at an address of this host."
            ) from error

    def connect(self, endpoint: str) -> zmq.Socket[bytes]:
        """The way to another process, which need not be there yet."""
        outbox = self._socket(zmq.PUSH)
        self._monitors.append(outbox.get_monitor_socket(zmq.EVENT_DISCONNECTED))
        if self._keys is not None:
            self._keys.protect_link(outbox)
        outbox.connect(endpoint)
        return outbox

    def take(self, kind: Kind) -> Message:
        """Wait for the next message of a kind."""
        while (message := self.look(kind, LOOK_MS)) is None:
            pass
        return message

    def look(self, kind: Kind, wait_ms: int) -> Message | None:
        """The next message of a kind, if one comes within this time.

        Raises ConfigError where a stage says that it cannot load.
        """
        arrived, deadline_s = self._arrived[kind], time.monotonic() + wait_ms / 1000
        while not arrived:
            left_ms = round(1000 * (deadline_s - time.monotonic()))
            if not self._inbox.poll(max(0, left_ms)):
                return None
            head, payload = self._inbox.recv_multipart(copy=False)
            what, number = head.bytes
            self._arrived[what].append(Message(number, payload.buffer))
            if broken := self._arrived[Kind.BROKEN]:
                raise ConfigError(str(broken.popleft().payload, "utf-8"))
        return arrived.popleft()

    def close(self) -> None:
        self._closing.set()
        self._thread.join()
        self._context.destroy(LINGER_MS)

    def _socket(self, kind: int) -> zmq.Socket[bytes]:
        socket: zmq.Socket[bytes] = self._context.socket(kind)
        self._sockets.append(socket)  # until all are closed
        socket.setsockopt(zmq.HEARTBEAT_IVL, HEARTBEAT_MS)
        socket.setsockopt(zmq.HEARTBEAT_TIMEOUT, SILENCE_MS)
        return socket

    def _watch(self) -> None:
        """Let in whose keys are the deployment's, and look for lost connections."""
        doorkeeper = self._doorkeeper
        while not self._closing.is_set():
            poller = zmq.Poller()
            for socket in (*self._monitors, *([doorkeeper.socket] if doorkeeper else ())):
                poller.register(socket, zmq.POLLIN)
            for socket, _ in poller.poll(LOOK_MS):
                if doorkeeper is not None and socket is doorkeeper.socket:
                    doorkeeper.answer_all()
                    continue
                recv_monitor_message(socket)
                if not self._closing.is_set():
                    self._lost()


def send(outbox: zmq.Socket[bytes], kind: Kind, payload: Any = b"", number: int = 0) -> None:
    """Send a message, whose memory stays as it is until it has left."""
    outbox.send_multipart((bytes((kind, number)), payload), copy=False)


class LinkedStages:
    """`Stages` that write to the inbox of the next one, and the last to that of the first."""

    def __init__(self, number: int, count: int, link: StageLink, following: Any) -> None:
        self.number = number
        self.count = count
        self.num_here = 1
        self._link = link
        self._next: zmq.Socket[bytes] = following
        self._due_at_s = math.inf

    def send(self, x_TE: Tensor) -> None:
        send(self._next, Kind.HIDDEN, x_TE.contiguous().view(torch.uint8).numpy())

    def receive(self, room_TE: Tensor, wait_ms: int) -> bool:
        message = self._link.look(Kind.HIDDEN, wait_ms)
        if message is None:
            now_s = time.monotonic()
            self._due_at_s = min(self._due_at_s, now_s + TIMEOUT_S)
            if now_s > self._due_at_s:
                raise FatalError(f"the stage before has made nothing of a step for {TIMEOUT_S:g} s")
            return False
        self._due_at_s, room = math.inf, room_TE.view(torch.uint8).numpy()
        made = np.frombuffer(message.payload, dtype=np.uint8)
        if made.size != room.size:
            raise FatalError(
                f"{made.size} bytes came from another stage for {len(room)} tokens, not {room.size}"
            )
        room[:] = made.reshape(room.shape)
        return True

    def least(self, value: int) -> int:
        """Once around it becomes the least, once more all hear of it."""
        is_first, is_last = self.number == 0, self.number == self.count - 1
        if not is_first:
            value = min(value, self._heard())
        self._say(value)
        value = self._heard()
        if not is_last:
            self._say(value)
        return value

    def close(self) -> None:
        pass  # the link is its owner's

    def _say(self, value: int) -> None:
        send(self._next, Kind.LEAST, str(value).encode())

    def _heard(self) -> int:
        return int(bytes(self._link.take(Kind.LEAST).payload))
