"""The mask worker: `python -m services.compute.grammar.mask_worker SETTINGS MEMORY_FDS`.

It takes orders from the engine's process and writes masks to the memory that both share. It is two
processes: the second one, forked once the tokenizer is loaded, makes the masks that are slow.
"""

from __future__ import annotations

import gc
import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from time import monotonic, thread_time
from typing import TypeVarTuple

import numpy as np

from common.child_main import FrameWriter, die_with_parent, limit_memory, read_frames, serve
from services.compute.grammar.backend import (
    GrammarBackend,
    GrammarError,
    MaskRow,
    SequenceMatcher,
    TokenRefused,
    bits_of,
)
from services.compute.grammar.protocol import (
    AcceptTokens,
    CompileGrammar,
    GrammarCompiled,
    GrammarSettings,
    MaskMemory,
    MasksWritten,
    Order,
    Report,
    SequenceFailed,
    StartSequence,
    pack_order,
    pack_report,
    stamp,
    unpack_order,
)
from services.compute.step import mask_words

# A sequence whose mask took more processor time goes to the second process. A mask of JSON takes 5
# to 130 us (128k tokens), and 64 of them in one thread 0.5 ms, where llguidance's own threads took
# 0.6 ms on four cores. One of `s: s s | s s s | "a"` takes 0.7 s in the end, and as long again to
# take its token, with Python's lock held: so a thread would not do.
SLOW_S = 0.002

SECOND_ENDED = 70  # status of the first process when the second one has ended

_MASKS, _GRAMMARS = range(2)  # the threads of a process

Args = TypeVarTuple("Args")


class _ProcessorTime:
    """Tells whether something took a thread long by its processor time, which takes 0.7 us to ask
    for: only what took long by the clock, too, is asked about."""

    def start(self) -> None:
        self._began_s = self._asked_s = monotonic()
        self._used_s = thread_time()

    def exceeds(self, limit_s: float) -> bool:
        """Whether what came since the last call took longer."""
        began_s, self._began_s = self._began_s, monotonic()
        if self._began_s - began_s <= limit_s:
            return False
        # What came before since the last question took at most as long as the clock says.
        before_s, asked_s = self._used_s + began_s - self._asked_s, self._began_s
        self._asked_s, self._used_s = asked_s, thread_time()
        return self._used_s - before_s > limit_s


class MaskWorker:
    """Keeps a matcher for each slot and writes its masks to one plane of the shared memory.

    Masks are made in the thread that calls `take`, grammars are compiled in another one.
    `hand_over` takes the orders for slow sequences to the worker of the other plane.
    """

    def __init__(
        self,
        settings: GrammarSettings,
        backend: GrammarBackend,
        memory: MaskMemory,
        report: Callable[[Report], None],
        plane: int,
        hand_over: Callable[[Order], None] | None,
    ) -> None:
        self._everything_W = bits_of(range(settings.vocab_size), settings.vocab_size)
        self._backend = backend
        self._memory = memory
        self._plane = plane
        self._report = report
        self._hand_over = hand_over
        self._matchers: dict[int, SequenceMatcher] = {}
        self._epochs: dict[int, int] = {}  # of each slot's owner
        self._gone: dict[int, int] = {}  # slot and epoch of those handed over
        self._starting: dict[int, list[list[int]]] = {}  # by slot: tokens that come too early
        self._lock = threading.Lock()  # on the four above, and on what is written
        words = mask_words(settings.vocab_size)
        # The thread that makes masks is the one in which slots change their owners: it writes to
        # where masks are read. The other one may be late, and writes here first.
        self._rows = [MaskRow(mask_W) for mask_W in memory.masks_PNW[plane]]
        self._scratch = MaskRow(np.zeros(words, dtype=np.int32))
        self._working = memory.thread_slots.data, memory.thread_stamps.data
        self._compiling = ThreadPoolExecutor(1, "grammars")
        self._times = _ProcessorTime(), _ProcessorTime()  # of each thread

    def take(self, order: Order) -> None:
        self._times[_MASKS].start()
        match order:
            case AcceptTokens():
                self._advance(order.rows_R4.tolist(), _MASKS)
            case StartSequence():
                self._begin(order)
            case CompileGrammar():
                self._compile(order)

    def _compile(self, order: CompileGrammar) -> None:
        if self._backend.kept(order.grammar) is not None:
            self._report(GrammarCompiled(order.number))
            return

        def compile_it() -> None:
            try:
                self._backend.compile(order.grammar)
            except Exception as error:  # any error is this grammar's
                self._report(GrammarCompiled(order.number, str(error) or type(error).__name__))
            else:
                self._report(GrammarCompiled(order.number))

        self._compiling.submit(compile_it)

    def _begin(self, start: StartSequence) -> None:
        with self._lock:
            self._epochs[start.slot] = start.epoch
            self._gone.pop(start.slot, None)
            self._matchers.pop(start.slot, None)
            self._starting[start.slot] = []
        grammar = start.grammar_spec.grammar
        if grammar and self._backend.kept(grammar) is None:  # dropped since it was prepared
            self._compiling.submit(self._start, start, _GRAMMARS)
        else:
            self._start(start, _MASKS)

    def _start(self, start: StartSequence, thread: int) -> None:
        self._times[thread].start()
        self._make(start.slot, start.epoch, thread, self._replay, start)
        self._report(MasksWritten())
        # After a restart the engine may already have used this mask and sent the next token.
        with self._lock:
            is_owner = self._epochs[start.slot] == start.epoch
            early = self._starting.pop(start.slot, []) if is_owner else []
        if early:
            self._advance(early, thread)

    def _replay(self, start: StartSequence) -> SequenceMatcher | None:
        grammar = start.grammar_spec.grammar
        copied = self._backend.compile(grammar) if grammar else None
        matcher = SequenceMatcher(start, copied, self._everything_W)
        began_s = thread_time()
        for _ in matcher.replay():
            if self._hand_over is not None and thread_time() - began_s > 4 * SLOW_S:
                self._let_go(start)
                return None
        with self._lock:
            if self._epochs.get(start.slot) == start.epoch:
                self._matchers[start.slot] = matcher
        return matcher

    def _advance(self, rows: list[list[int]], thread: int) -> None:
        has_written = False
        gone: list[list[int]] = []
        for row in rows:
            slot, epoch, index, token = row
            if self._starting and self._comes_early(row):
                continue
            matcher = self._matchers.get(slot)
            if matcher is not None and matcher.epoch == epoch:
                if matcher.has_taken(index, token):
                    continue
                has_written |= self._make(slot, epoch, thread, self._follow, matcher, index, token)
            elif self._gone.get(slot) == epoch:
                gone.append(row)
        if has_written:
            self._report(MasksWritten())
        if gone and self._hand_over is not None:
            self._hand_over(AcceptTokens(np.array(gone, dtype=np.int32)))

    def _comes_early(self, row: list[int]) -> bool:
        """Keep a token of a sequence until it has started."""
        slot, epoch = row[0], row[1]
        with self._lock:
            early = self._starting.get(slot)
            if early is None or self._epochs[slot] != epoch:
                return False
            early.append(row)
            return True

    def _follow(self, matcher: SequenceMatcher, index: int, token: int) -> SequenceMatcher | None:
        if matcher.consume(index, token):
            return matcher
        with self._lock:
            slot = matcher.start.slot
            if self._matchers.get(slot) is matcher:
                del self._matchers[slot]
        return None

    def _make(
        self,
        slot: int,
        epoch: int,
        thread: int,
        proceed: Callable[[*Args], SequenceMatcher | None],
        *args: *Args,
    ) -> bool:
        """Advance a sequence's matcher to the next token and make its mask; False if it ended."""
        place = 2 * self._plane + thread
        slots, stamps = self._working
        slots[place] = slot
        stamps[place] = stamp(epoch, 0)
        try:
            matcher = proceed(*args)
            if matcher is None:
                return False
            if thread == _MASKS:
                forced = matcher.fill_ahead(self._rows[slot])
                self._memory.name(slot, self._plane, epoch, matcher.index, forced)
            else:
                forced = self._fill_and_copy(matcher, slot)
            if self._times[thread].exceeds(SLOW_S * (1 + len(forced))):
                self._let_go(matcher.start)
        except Exception as error:  # any error is this sequence's
            is_known = isinstance(error, (GrammarError, TokenRefused))
            kind = "" if is_known else f"{type(error).__name__}: "
            status = 400 if isinstance(error, (GrammarError, MemoryError)) else 500
            self._report(SequenceFailed(slot, epoch, f"{kind}{error}", status))
        finally:
            stamps[place] = 0
        return True

    def _fill_and_copy(self, matcher: SequenceMatcher, slot: int) -> tuple[int, ...]:
        """Make a mask of a slot that may have another owner by then."""
        forced = matcher.fill_ahead(self._scratch)
        with self._lock:
            if self._epochs.get(slot) == matcher.epoch:
                self._rows[slot].array_W[:] = self._scratch.array_W
                self._memory.name(slot, self._plane, matcher.epoch, matcher.index, forced)
        return forced

    def _let_go(self, start: StartSequence) -> None:
        with self._lock:
            if self._hand_over is None or self._epochs.get(start.slot) != start.epoch:
                return
            self._gone[start.slot] = start.epoch
            self._matchers.pop(start.slot, None)
            self._hand_over(start)


def work(orders: Iterator[bytes], owner: FrameWriter) -> int:
    """Serve until the orders end; the command line has `GrammarSettings`, the memory's fds."""
    settings = GrammarSettings.model_validate_json(sys.argv[1])
    if settings.cores:  # the engine's thread may keep a core for itself
        os.sched_setaffinity(0, settings.cores)
    try:
        memory_fd, names_out, names_in = map(int, sys.argv[2:])
        fds = (memory_fd, names_out, names_in)
        memory = MaskMemory(fds, settings.num_slots, settings.vocab_size)
        backend = GrammarBackend(settings)
    except Exception as error:  # the service reports it and goes on without grammars
        owner.broken(f"{type(error).__name__}: {error}")
        return 1
    gc.freeze()
    to_second, second_orders = _fork()
    limit_memory(settings.memory_mb << 20)

    def report(report: Report) -> None:
        # Two processes write to this pipe: the kernel keeps frames this short in one piece.
        owner.write(pack_report(report))

    if second_orders is not None:
        worker = MaskWorker(settings, backend, memory, report, 1, None)
        orders = second_orders
    else:
        handing_over = ThreadPoolExecutor(1)  # the second process may be too busy to read

        def hand_over(order: Order) -> None:
            handing_over.submit(lambda: to_second.write(pack_order(order)))

        worker = MaskWorker(settings, backend, memory, report, 0, hand_over)
        owner.ready()
    for order in orders:
        worker.take(unpack_order(order))
    return 0


def _fork() -> tuple[FrameWriter, Iterator[bytes] | None]:
    """Fork this process, which has no threads yet; neither lives without the other.

    Returns the pipe to the second process and, in that process, its orders.
    """
    reading, writing = os.pipe()
    first = os.getpid()
    # If the second one ends, so does the first: the service then starts both again.
    signal.signal(signal.SIGCHLD, lambda number, frame: os._exit(SECOND_ENDED))
    if os.fork():
        os.close(reading)
        return FrameWriter(writing), None
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    os.close(writing)
    os.close(0)
    die_with_parent()
    if os.getppid() != first:
        os._exit(0)
    return FrameWriter(-1), read_frames(partial(os.read, reading))


if __name__ == "__main__":
    serve(work)
