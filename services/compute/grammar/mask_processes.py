"""The processes of a mask worker: several that make masks, each those of its slots, and one for the
masks that are slow.

All are forks of the first one, made once the tokenizer is loaded; none lives without the others.
The first one takes the orders, keeps those of its own slots and hands on the rest.
"""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Iterator, Sequence
from functools import partial
from queue import SimpleQueue
from typing import NamedTuple, Protocol

from common.child_main import FrameWriter, die_with_parent, read_frames
from services.compute.grammar.protocol import AcceptTokens, CompileGrammar, Order, pack_order

ANOTHER_ENDED = 70  # status of the first process when one of the others has ended


class Seat(NamedTuple):
    """Which of the processes this is, and its pipes."""

    number: int
    orders: Iterator[bytes] | None  # None: the first one's, which are the engine's
    others: tuple[FrameWriter, ...]  # of the first one: to those that make masks beside it
    slow: FrameWriter | None  # None: this one makes the masks that are slow


def fork(num_makers: int) -> Seat:
    """Fork this process, which has no threads yet; returns in each of them."""
    to_makers = [os.pipe() for _ in range(num_makers - 1)]
    to_slow = [os.pipe() for _ in range(num_makers)]
    first = os.getpid()
    # If another one ends, so does the first: the service then starts all again.
    signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(ANOTHER_ENDED))
    for number, (reading, _) in enumerate(to_makers, 1):
        if not os.fork():
            _follow(first)
            orders = read_frames(partial(os.read, reading))
            return Seat(number, orders, (), FrameWriter(to_slow[number][1]))
    if not os.fork():
        _follow(first)
        return Seat(num_makers, _merged([reading for reading, _ in to_slow]), (), None)
    others = tuple(FrameWriter(writing) for _, writing in to_makers)
    return Seat(0, None, others, FrameWriter(to_slow[0][1]))


def _follow(first: int) -> None:
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(0)
    die_with_parent()
    if os.getppid() != first:
        os._exit(0)


def _merged(fds: Sequence[int]) -> Iterator[bytes]:
    """Frames of several pipes, which never end."""
    frames: SimpleQueue[bytes] = SimpleQueue()

    def read(fd: int) -> None:
        for frame in read_frames(partial(os.read, fd)):
            frames.put(frame)

    for fd in fds:
        threading.Thread(target=read, args=(fd,), daemon=True).start()
    while True:
        yield frames.get()


class Taker(Protocol):
    """Takes orders of some slots."""

    def take(self, order: Order) -> None: ...


class SharedOrders:
    """Gives each process the orders of its slots, which are those that leave its number."""

    def __init__(self, own: Taker, others: Sequence[FrameWriter]) -> None:
        self._own = own
        self._others = others

    def take(self, order: Order) -> None:
        count = 1 + len(self._others)
        match order:
            case AcceptTokens(rows_R4):
                owner_R = rows_R4[:, 0] % count
                for number, other in enumerate(self._others, 1):
                    if (owner_R == number).any():  # first: they begin meanwhile
                        other.write(pack_order(AcceptTokens(rows_R4[owner_R == number])))
                self._own.take(AcceptTokens(rows_R4[owner_R == 0]))
                return
            case CompileGrammar():  # whose sequence takes which slot is not known yet
                for other in self._others:
                    other.write(pack_order(order))
            case _ if number := order.slot % count:
                self._others[number - 1].write(pack_order(order))
                return
        self._own.take(order)
