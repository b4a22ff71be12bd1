"""Compute's side of structured outputs: grammars to compile, orders to the mask worker."""

from __future__ import annotations

import time
from collections import OrderedDict
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import structlog

from common.child_process import (
    ChildExit,
    ChildProcess,
    Exited,
    PipedChild,
    Received,
    RestartingChild,
)
from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec
from services.compute.grammar.protocol import (
    AcceptTokens,
    CompileGrammar,
    GrammarCompiled,
    GrammarSettings,
    MaskMemory,
    MaskStatus,
    MasksWritten,
    Order,
    SequenceFailed,
    pack_order,
    unpack_report,
)
from services.compute.grammar.sequences import StructuredSequences, drawn_rows
from services.compute.shares import ClientShare, Shares
from services.compute.step import (
    BoolArray,
    ForcedTokens,
    Int32Array,
    SlotDelta,
    StepPlan,
    StepResult,
)

DRAINING = Failure(503, "draining", "This replica is shutting down.", retryable=True)

MAX_FAILED_STARTS = 4  # in a row; then nothing waits for another one
RETRY_S = 30.0  # until that one is started all the same
START_TIMEOUT_S = 120.0  # for what takes seconds where there is a processor for it
MAX_DEATHS = 2  # one may be an accident
PASSING_FACTOR = 4  # a known grammar may have to wait for one that is being compiled

Done = Callable[[Failure | None], None]
"""Called once: with None when the grammar can be used, or with the reason why it cannot be."""

SpawnWorker: TypeAlias = Callable[[GrammarSettings, MaskMemory, Received, Exited], ChildProcess]


def spawn_mask_worker(
    settings: GrammarSettings, memory: MaskMemory, received: Received, exited: Exited
) -> ChildProcess:
    """Start `python -m services.compute.grammar.mask_worker`, which shares the memory."""
    arguments = (settings.model_dump_json(), *map(str, memory.fds))
    module = "services.compute.grammar.mask_worker"
    return PipedChild(module, arguments, received, exited, pass_fds=memory.fds)


@dataclass(slots=True)
class _Compilation:
    number: int
    grammar_spec: GrammarSpec
    done: Done | None
    share: ClientShare
    goes_on: bool
    sent_s: float | None = None
    num_deaths: int = 0


class CompileQueue:
    """Has grammars compiled one at a time, so that it is clear which one the worker dies of.

    What goes on from a lost worker goes first, since a client reads it already. Then the client
    whose grammars have taken the least time: one with many that are costly lets another wait for
    the one that is being compiled, and for no more.

    Grammars that were compiled before do no harm: they are sent at once, since the worker may have
    dropped them. An empty grammar (lists of tokens) needs nothing but a worker.
    """

    def __init__(self, timeout_s: float, max_known: int) -> None:
        self._timeout_s = timeout_s
        self._max_known = max_known
        self._entries: dict[int, _Compilation] = {}
        self._running: _Compilation | None = None
        self._known: OrderedDict[str, None] = OrderedDict()
        self._last_number = 0
        self._shares = Shares()  # in milliseconds
        self._floor = 0  # the counter of the client whose grammar was the last to be compiled

    def __len__(self) -> int:
        return len(self._entries)

    def add(
        self, grammar_spec: GrammarSpec, done: Done, client: str = "", goes_on: bool = False
    ) -> int:
        """Return a number to cancel it by."""
        share = self._shares.of(client)
        if not share.num_open:
            share.join({entry.share for entry in self._entries.values()}, self._floor)
        share.num_open += 1
        self._last_number += 1
        entry = _Compilation(self._last_number, grammar_spec, done, share, goes_on)
        self._entries[self._last_number] = entry
        return self._last_number

    def cancel(self, number: int) -> None:
        """Do not call this one's `done`; a compilation that has begun goes on."""
        entry = self._entries.get(number)
        if entry is None:
            return
        entry.done = None
        if entry.sent_s is None:
            self._remove(entry)

    def next(self, now_s: float) -> list[tuple[int, str]]:
        """Return number and text of the grammars to send to the worker now."""
        for entry in list(self._entries.values()):
            if not entry.grammar_spec.grammar:
                self._end(entry, None)
        waiting = [entry for entry in self._entries.values() if entry.sent_s is None]
        due = [entry for entry in waiting if entry.grammar_spec.grammar in self._known]
        if self._running is None and len(due) < len(waiting):
            unknown = (each for each in waiting if each.grammar_spec.grammar not in self._known)
            self._running = min(unknown, key=_turn)
            due.append(self._running)
        for entry in due:
            entry.sent_s = now_s
        due.sort(key=lambda entry: entry.number)
        return [(entry.number, entry.grammar_spec.grammar) for entry in due]

    def finished(self, number: int, error: str, now_s: float) -> None:
        """Take the worker's answer; a grammar without an error can be used."""
        entry = self._entries.get(number)
        if entry is None:
            return
        self._charge(entry, now_s)
        if error:
            self._refuse(entry, "invalid_grammar", f"cannot be used: {error}")
            return
        self._known[entry.grammar_spec.grammar] = None
        self._known.move_to_end(entry.grammar_spec.grammar)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        self._end(entry, None)

    def overdue(self, now_s: float) -> bool:
        """Refuse grammars that take too long; True if there are any: the worker must be killed."""
        overdue = False
        for entry in list(self._entries.values()):
            factor = 1 if entry is self._running else PASSING_FACTOR
            if entry.sent_s is not None and now_s - entry.sent_s >= factor * self._timeout_s:
                overdue = True
                self._charge(entry, now_s)
                message = f"takes over {self._timeout_s:g} s to compile; make it smaller or simpler"
                self._refuse(entry, "grammar_timeout", message)
        return overdue

    def worker_died(self, now_s: float) -> None:
        """Queue everything again, except a grammar that was being compiled at two deaths.

        Its client has had the time that this one took: else each death would be free.
        """
        running = self._running
        if running is not None:
            self._charge(running, now_s)
        self._running = None
        for entry in list(self._entries.values()):
            entry.sent_s = None
            if entry.done is None:
                self._remove(entry)
        if running is not None and running.number in self._entries:
            running.num_deaths += 1
            if running.num_deaths >= MAX_DEATHS:
                message = "cannot be used: its compiler dies of it; make it smaller or less deep"
                self._refuse(running, "invalid_grammar", message)

    def fail_all(self, failure: Failure) -> None:
        for entry in list(self._entries.values()):
            self._end(entry, failure)

    def _refuse(self, entry: _Compilation, code: str, message: str) -> None:
        field = entry.grammar_spec.field
        self._end(entry, Failure(400, code, f"The grammar of {field} {message}.", field))

    def _charge(self, entry: _Compilation, now_s: float) -> None:
        if entry is self._running and entry.sent_s is not None:
            entry.share.tokens += max(1, round(1000 * (now_s - entry.sent_s)))
            self._floor = entry.share.tokens

    def _remove(self, entry: _Compilation) -> None:
        del self._entries[entry.number]
        entry.share.num_open -= 1

    def _end(self, entry: _Compilation, failure: Failure | None) -> None:
        self._remove(entry)
        if entry is self._running:
            self._running = None
        if entry.done is not None:
            entry.done(failure)


def _turn(entry: _Compilation) -> tuple[bool, int, int]:
    return not entry.goes_on, entry.share.tokens, entry.number


class GrammarManager:
    """A `MaskSource` whose masks a killable process makes; it lives on the event loop.

    `notify` is called when masks have come or sequences have failed.
    """

    def __init__(
        self,
        settings: GrammarSettings,
        spawn: SpawnWorker,
        notify: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._notify = notify
        self._clock = clock
        self._memory = MaskMemory.create(settings.num_slots, settings.vocab_size)
        self._sequences = StructuredSequences(self._memory, settings.step_timeout_s)
        self._queue = CompileQueue(settings.compile_timeout_s, settings.cache_entries)
        self._worker = RestartingChild(
            lambda received, exited: spawn(settings, self._memory, received, exited),
            self,
            clock,
            START_TIMEOUT_S,
        )
        self._broken: Failure | None = None
        self._log = structlog.get_logger()

    def start(self) -> None:
        self._worker.start()

    def close(self) -> None:
        self._broken = DRAINING
        self._worker.close()
        self._memory.close()

    def prepare(
        self, grammar_spec: GrammarSpec, done: Done, client: str = "", goes_on: bool = False
    ) -> int:
        """Compile a client's grammar and call `done` once, maybe at once; returns a number to
        cancel by."""
        grammar = grammar_spec.grammar
        size = len(grammar) if grammar.isascii() else len(grammar.encode("utf-8", "replace"))
        if self._broken is not None:
            done(self._broken)
        elif size > self._settings.max_grammar_bytes:
            message = (
                f"The grammar of {grammar_spec.field} has {size} bytes; at most "
                f"{self._settings.max_grammar_bytes} are taken."
            )
            done(Failure(400, "grammar_too_large", message, grammar_spec.field))
        else:
            self._worker.start()
            number = self._queue.add(grammar_spec, done, client, goes_on)
            self._send_grammars()
            return number
        return 0

    def cancel(self, number: int) -> None:
        self._queue.cancel(number)

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        for order in self._sequences.place(deltas, self._clock()):
            if self._broken is not None:
                broken = self._broken
                self._sequences.fail(order.slot, order.epoch, broken.message, broken.status)
            else:
                self._send(order)

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        rows_R4 = drawn_rows(plan, result, skipped)
        if len(rows_R4):
            self._send(AcceptTokens(rows_R4))  # first: the worker begins meanwhile
            self._sequences.advance(rows_R4, self._clock())

    def awaited(self) -> list[tuple[int, int]]:
        return self._sequences.awaited()

    def forced(self) -> list[ForcedTokens]:
        return self._sequences.forced()

    def look(self, plan: StepPlan) -> MaskStatus:
        return self._sequences.look(plan)

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        return self._sequences.bits_GW(plan, ready)

    def tick(self, now_s: float) -> None:
        """Fail whatever takes too long and kill the process that is stuck in it; restart it."""
        self._worker.tick(now_s)
        if self._worker.is_ready and self._queue.overdue(now_s) | self._sequences.overdue(now_s):
            self._worker.kill()
            self._notify()

    def child_ready(self, child: RestartingChild) -> None:
        """Repeat to a new process all that the one before knew."""
        now_s = self._clock()
        self._broken = None
        self._log.info("mask worker ready", seconds=round(now_s - child.started_s, 2))
        for order in self._sequences.all(now_s):
            self._send(order)
        self._send_grammars()

    def child_broken(self, child: RestartingChild, why: str) -> None:
        child.give_up()  # a new process could not load either
        self._give_up(why, 500)

    def child_reported(self, child: RestartingChild, report: list[Any]) -> None:
        match unpack_report(report):
            case MasksWritten():
                self._notify()
            case GrammarCompiled(number=number, error=error):
                self._queue.finished(number, error, self._clock())
                self._send_grammars()
            case SequenceFailed(slot, epoch, message, status):
                self._sequences.fail(slot, epoch, message, status)
                self._notify()

    def child_ended(self, child: RestartingChild, exit: ChildExit) -> None:
        self._log.warning("mask worker ended", status=exit.status, was_ready=exit.was_ready)
        self._queue.worker_died(self._clock())
        self._sequences.worker_died()
        if child.num_failed_starts >= MAX_FAILED_STARTS:
            child.postpone(RETRY_S)
            ended = f"the process ends with status {exit.status} before it is ready"
            why = f"it cannot be started: {exit.error}" if exit.error else ended
            self._give_up(why, 503)  # it is this host that lacks something, or kills
        self._notify()

    def _send(self, order: Order) -> None:
        if self._worker.is_ready:
            self._worker.send(pack_order(order))

    def _send_grammars(self) -> None:
        if self._worker.is_ready:
            for number, grammar in self._queue.next(self._clock()):
                self._send(CompileGrammar(number, grammar))

    def _give_up(self, message: str, status: int) -> None:
        """Refuse the requests that wait, and new ones until a process is ready after all.

        With status 503 another replica may take them, and those that run.
        """
        if self._broken is None:
            self._log.error("no masks of grammars", error=message)
        text = f"This replica cannot restrict tokens: {message}"
        self._broken = Failure(status, "guide_failed", text, retryable=status == 503)
        self._queue.fail_all(self._broken)
        self._sequences.fail_all(message, status)
        self._notify()
