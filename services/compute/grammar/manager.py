"""Compute's side of grammars: orders to the mask worker, its reports, a new one when it ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
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
from services.compute.grammar.compile_queue import CompileQueue, Done
from services.compute.grammar.masks import MaskMemory, MaskStatus
from services.compute.grammar.messages import (
    AcceptTokens,
    CompileGrammar,
    GrammarCompiled,
    GrammarSettings,
    MasksWritten,
    Order,
    SequenceFailed,
    pack_order,
    unpack_report,
)
from services.compute.grammar.sequences import StructuredSequences
from services.compute.step import BoolArray, Int32Array, SlotDelta, StepPlan, StepResult

MAX_FAILED_STARTS = 4  # in a row; then nothing waits for another one
RETRY_S = 30.0  # until that one is started all the same
START_TIMEOUT_S = 120.0  # for what takes seconds where there is a processor for it

SpawnWorker: TypeAlias = Callable[[GrammarSettings, MaskMemory, Received, Exited], ChildProcess]


def spawn_mask_worker(
    settings: GrammarSettings, memory: MaskMemory, received: Received, exited: Exited
) -> ChildProcess:
    """Start `python -m services.compute.grammar.mask_worker`, which shares the memory."""
    arguments = (settings.model_dump_json(), *map(str, memory.fds))
    module = "services.compute.grammar.mask_worker"
    return PipedChild(module, arguments, received, exited, pass_fds=memory.fds)


class GrammarManager:
    """A `MaskSource` whose masks a process makes that can be killed; it lives on the event loop.

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
        # Requests without a grammar wait for the process alone; their numbers are negative.
        self._waiting: dict[int, Done | None] = {}
        self._log = structlog.get_logger()

    @property
    def num_restarts(self) -> int:
        return self._worker.num_restarts

    def start(self) -> None:
        """Start the process; requests that come before it is ready wait."""
        self._worker.start()

    def close(self) -> None:
        """End the process; requests that wait for a grammar are not answered."""
        self._broken = Failure(503, "draining", "This replica is shutting down.", retryable=True)
        self._worker.close()
        self._memory.close()

    def prepare(self, grammar_spec: GrammarSpec, done: Done) -> int:
        """Make masks of this grammar possible; `done` is called once, perhaps at once.

        Returns a number to cancel it by.
        """
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
        elif grammar:
            self._worker.start()
            number = self._queue.add(grammar_spec, done)
            self._send_grammars()
            return number
        elif self._worker.is_ready:
            done(None)
        else:
            self._worker.start()
            number = -1 - len(self._waiting)
            self._waiting[number] = done
            return number
        return 0

    def cancel(self, number: int) -> None:
        """Do not call the `done` of this number."""
        if number < 0:
            self._waiting[number] = None
        else:
            self._queue.cancel(number)

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        """Sequences take slots; have the first masks of those with a grammar made."""
        for order in self._sequences.place(deltas, self._clock()):
            if self._broken is not None:
                self._sequences.fail(order.slot, order.epoch, self._broken.message, 500)
            else:
                self._send(order)

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        """Take the tokens drawn by a plan's structured samples; have the next masks made."""
        rows_R4 = self._sequences.advance(plan, result, skipped, self._clock())
        if len(rows_R4):
            self._send(AcceptTokens(rows_R4))

    def look(self, plan: StepPlan) -> MaskStatus:
        """Say which of the masks that a plan needs are there."""
        return self._sequences.look(plan)

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        """Copy the masks of those of the plan's structured samples that are ready."""
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
        self._answer_waiting(None)

    def child_broken(self, child: RestartingChild, why: str) -> None:
        child.give_up()  # a new process could not load either
        self._give_up(why)

    def child_reported(self, child: RestartingChild, report: list[Any]) -> None:
        match unpack_report(report):
            case MasksWritten():
                self._notify()
            case GrammarCompiled(number=number, error=error):
                self._queue.finished(number, error)
                self._send_grammars()
            case SequenceFailed(slot, epoch, message, status):
                self._sequences.fail(slot, epoch, message, status)
                self._notify()

    def child_ended(self, child: RestartingChild, exit: ChildExit) -> None:
        self._log.warning("mask worker ended", status=exit.status, was_ready=exit.was_ready)
        self._queue.worker_died()
        self._sequences.worker_died()
        if child.num_failed_starts >= MAX_FAILED_STARTS:
            child.postpone(RETRY_S)
            ended = f"the process ends with status {exit.status} before it is ready"
            self._give_up(f"it cannot be started: {exit.error}" if exit.error else ended)
        self._notify()

    def _send(self, order: Order) -> None:
        if self._worker.is_ready:
            self._worker.send(pack_order(order))

    def _send_grammars(self) -> None:
        if self._worker.is_ready:
            for number, grammar in self._queue.next(self._clock()):
                self._send(CompileGrammar(number, grammar))

    def _give_up(self, message: str) -> None:
        """Refuse the requests that wait, and new ones until a process is ready after all."""
        if self._broken is None:
            self._log.error("no masks of grammars", error=message)
        text = f"This replica cannot restrict tokens: {message}"
        self._broken = Failure(500, "guide_failed", text)
        self._queue.fail_all(self._broken)
        self._sequences.fail_all(message)
        self._answer_waiting(self._broken)
        self._notify()

    def _answer_waiting(self, failure: Failure | None) -> None:
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            if done is not None:
                done(failure)
