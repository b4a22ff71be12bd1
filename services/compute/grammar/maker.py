"""The maker: carries out orders, so that nobody waits for somebody else's grammar."""

from __future__ import annotations

import threading
from collections.abc import Callable
from functools import partial
from queue import SimpleQueue
from time import thread_time

import numpy as np

from services.compute.grammar.compiler import Compiler
from services.compute.grammar.frames import (
    Advance,
    Failed,
    Made,
    Order,
    Place,
    Prepare,
    Prepared,
    Report,
)
from services.compute.grammar.masks import MaskMemory, mask_words, stamp
from services.compute.grammar.matcher import GrammarError, SequenceMatcher, TokenRefused
from services.compute.grammar.rules import bits_of
from services.compute.grammar.settings import GuideSettings

SLOW_S = 0.002
"""A sequence whose mask took more processor time is handed to the other process. A mask of JSON
takes 5 to 130 us (128k tokens), and 64 of them in one thread 0.5 ms, where llguidance's own threads
took 0.6 ms on four cores. One of `s: s s | s s s | "a"` takes 0.7 s in the end, and as long again
to take its token, with Python's lock held: so a thread would not do."""

_MASKS, _GRAMMARS = range(2)  # the lanes of a plane


class Lane:
    """A thread that does what is put on it, one after the other."""

    def __init__(self, name: str) -> None:
        self._jobs: SimpleQueue[Callable[[], None]] = SimpleQueue()
        threading.Thread(target=self._run, name=name, daemon=True).start()

    def put(self, job: Callable[[], None]) -> None:
        """Let it be done when its turn comes."""
        self._jobs.put(job)

    def _run(self) -> None:
        while True:
            self._jobs.get()()


class Maker:
    """Keeps a matcher for each slot and writes its masks to a plane of the shared memory.

    Masks are made by whoever calls `take`, and grammars compiled beside it. `hand_over` takes the
    orders for sequences that have become slow, to the maker of the other plane.
    """

    def __init__(
        self,
        settings: GuideSettings,
        compiler: Compiler,
        memory: MaskMemory,
        report: Callable[[Report], None],
        plane: int,
        hand_over: Callable[[Order], None] | None,
    ) -> None:
        self._everything_W = bits_of(range(settings.vocab_size), settings.vocab_size)
        self._compiler = compiler
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
        self._scratch = [np.zeros(words, dtype=np.int32) for _ in range(2)]
        self._compiling = Lane("grammars")

    def take(self, order: Order) -> None:
        """Carry out one order, or see to it that it is."""
        match order:
            case Advance():
                self._advance(order.rows_R4.tolist(), _MASKS)
            case Place():
                self._place(order)
            case Prepare():
                self._prepare(order)

    def _prepare(self, order: Prepare) -> None:
        if self._compiler.kept(order.grammar) is not None:
            self._report(Prepared(order.number))
            return

        def compile_it() -> None:
            try:
                self._compiler.compile(order.grammar)
            except Exception as error:  # whatever it is, it is this grammar's
                self._report(Prepared(order.number, str(error) or type(error).__name__))
            else:
                self._report(Prepared(order.number))

        self._compiling.put(compile_it)

    def _place(self, place: Place) -> None:
        with self._lock:
            self._epochs[place.slot] = place.epoch
            self._gone.pop(place.slot, None)
            self._matchers.pop(place.slot, None)
            self._starting[place.slot] = []
        grammar = place.guidance.grammar
        if grammar and self._compiler.kept(grammar) is None:  # dropped since it was prepared
            self._compiling.put(partial(self._start, place, _GRAMMARS))
        else:
            self._start(place, _MASKS)

    def _start(self, place: Place, lane: int) -> None:
        """Make the first mask of a sequence in its slot."""
        self._make(place.slot, place.epoch, lane, partial(self._begin, place))
        self._report(Made())
        # The mask that was just made again may have been there, and used, before.
        with self._lock:
            is_owner = self._epochs[place.slot] == place.epoch
            early = self._starting.pop(place.slot, []) if is_owner else []
        if early:
            self._advance(early, lane)

    def _begin(self, place: Place) -> SequenceMatcher | None:
        grammar = place.guidance.grammar
        copied = self._compiler.compile(grammar) if grammar else None
        matcher = SequenceMatcher(place, copied, self._everything_W)
        began_s = thread_time()
        for _ in matcher.replay():
            if self._hand_over is not None and thread_time() - began_s > 4 * SLOW_S:
                self._let_go(place)
                return None
        with self._lock:
            if self._epochs.get(place.slot) == place.epoch:
                self._matchers[place.slot] = matcher
        return matcher

    def _advance(self, rows: list[list[int]], lane: int) -> None:
        made = False
        gone: list[list[int]] = []
        for row in rows:
            slot, epoch, index, token = row
            if self._starting and self._comes_early(row):
                continue
            matcher = self._matchers.get(slot)
            if matcher is not None and matcher.owns(slot, epoch):
                follow = partial(self._follow, matcher, index, token)
                made |= self._make(slot, epoch, lane, follow)
            elif self._gone.get(slot) == epoch:
                gone.append(row)
        if made:
            self._report(Made())
        if gone and self._hand_over is not None:
            self._hand_over(Advance(np.array(gone, dtype=np.int32)))

    def _comes_early(self, row: list[int]) -> bool:
        """Keep a token of a sequence that is still being started, for then."""
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
            slot = matcher.place.slot
            if self._matchers.get(slot) is matcher:
                del self._matchers[slot]
        return None

    def _make(
        self, slot: int, epoch: int, lane: int, get_there: Callable[[], SequenceMatcher | None]
    ) -> bool:
        """Bring a sequence's matcher to the next token and make its mask; False if it ended."""
        memory, mask_W, shown = self._memory, self._scratch[lane], 2 * self._plane + lane
        memory.lane_slots[shown] = slot
        memory.lanes[shown] = stamp(epoch, 0)
        began_s = thread_time()
        try:
            matcher = get_there()
            if matcher is None:
                return False
            matcher.fill(mask_W)
            with self._lock:
                if self._epochs.get(slot) == epoch:
                    memory.masks_PNW[self._plane, slot] = mask_W
                    memory.name(slot, self._plane, epoch, matcher.index)
            if self._hand_over is not None and thread_time() - began_s > SLOW_S:
                self._let_go(matcher.place)
        except Exception as error:  # whatever it is, it is this sequence's
            is_known = isinstance(error, (GrammarError, TokenRefused))
            kind = "" if is_known else f"{type(error).__name__}: "
            status = 400 if isinstance(error, (GrammarError, MemoryError)) else 500
            self._report(Failed(slot, epoch, f"{kind}{error}", status))
        finally:
            memory.lanes[shown] = 0
        return True

    def _let_go(self, place: Place) -> None:
        """Let the other process go on with a sequence."""
        with self._lock:
            if self._hand_over is None or self._epochs.get(place.slot) != place.epoch:
                return
            self._gone[place.slot] = place.epoch
            self._matchers.pop(place.slot, None)
            self._hand_over(place)
