"""Compute's side of the guide: orders out, reports in, and a new process when one ends."""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence

import structlog

from common.messages.failure import Failure
from common.messages.guidance import Guidance
from services.compute.grammar.compile_queue import CompileQueue, Done
from services.compute.grammar.frames import (
    Advance,
    Broken,
    Failed,
    Made,
    Prepare,
    Prepared,
    Ready,
    Report,
)
from services.compute.grammar.masks import MaskMemory
from services.compute.grammar.placements import Placements
from services.compute.grammar.process import Process, Spawn
from services.compute.grammar.protocol import Look
from services.compute.grammar.settings import GuideSettings
from services.compute.step import BoolArray, Int32Array, SlotDelta, StepPlan, StepResult

_BACKOFF_S = (0.1, 5.0)
MAX_EARLY_DEATHS = 4  # in a row, before it was ready; then nobody is to wait for another
RETRY_S = 30.0  # until that one is started all the same
START_TIMEOUT_S = 120.0  # for what takes seconds where there is a processor for it


class GuideClient:
    """Implements `Guide` with a process that can be killed; it lives on the event loop.

    `news` is called when masks have come or sequences have failed.
    """

    def __init__(
        self,
        settings: GuideSettings,
        spawn: Spawn,
        news: Callable[[], None],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._settings = settings
        self._spawn = spawn
        self._news = news
        self._clock = clock
        self._memory = MaskMemory.create(settings.num_slots, settings.vocab_size)
        self._placements = Placements(self._memory, settings.step_timeout_s)
        self._queue = CompileQueue(settings.compile_timeout_s, settings.cache_entries)
        self._process: Process | None = None
        self._ready = False
        self._began_s = 0.0
        self._restart_at_s = 0.0
        self._backoff_s = _BACKOFF_S[0]
        self._num_early_deaths = 0
        self._broken: Failure | None = None
        self._is_hopeless = False
        self._waiting: dict[int, Done] = {}  # for the process alone, by negative numbers
        self._log = structlog.get_logger()
        self.num_restarts = 0

    def start(self) -> None:
        """Start the process; what comes before it is ready waits."""
        self._ready = False
        self._began_s = self._clock()
        try:
            self._process = self._spawn(self._settings, self._memory, self._reported, self._exited)
        except OSError as error:  # of memory, processes or descriptors; there may be some later
            self._log.warning("guide not started", error=str(error))
            self._ended(f"it cannot be started: {error}")

    def close(self) -> None:
        """End the process; who waits for a grammar is not told."""
        process, self._process, self._ready = self._process, None, False
        self._is_hopeless = True
        self._broken = Failure(503, "draining", "This replica is shutting down.", retryable=True)
        if process is not None:
            process.close()
        self._memory.close()

    def prepare(self, guidance: Guidance, done: Done) -> int:
        """Have masks of this guidance made possible; `done` is called once, perhaps at once.

        Returns a number to cancel it by.
        """
        grammar = guidance.grammar
        size = len(grammar) if grammar.isascii() else len(grammar.encode("utf-8", "replace"))
        if self._broken is not None:
            done(self._broken)
        elif size > self._settings.max_grammar_bytes:
            done(
                Failure(
                    400,
                    "grammar_too_large",
                    f"The grammar of {guidance.field} has {size} bytes; at most "
                    f"{self._settings.max_grammar_bytes} are taken.",
                    guidance.field,
                )
            )
        elif grammar:
            self._start_first()
            number = self._queue.add(guidance, done)
            self._send_grammars()
            return number
        elif self._ready:
            done(None)
        else:
            self._start_first()
            number = -1 - len(self._waiting)
            self._waiting[number] = done
            return number
        return 0

    def cancel(self, number: int) -> None:
        """Do not tell whoever asked under this number."""
        if number < 0:
            self._waiting[number] = _nobody
        else:
            self._queue.cancel(number)

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        """Sequences take slots; those with guidance get their first masks made."""
        for order in self._placements.place(deltas, self._clock()):
            if self._broken is not None:
                self._placements.fail(order.slot, order.epoch, self._broken.message, 500)
            elif self._ready and self._process is not None:
                self._process.send(order)

    def advance(self, plan: StepPlan, result: StepResult, void: frozenset[int]) -> None:
        """Take the tokens of a plan's guided samples, but for void ones; make the next masks."""
        rows_R4 = self._placements.advance(plan, result, void, self._clock())
        if len(rows_R4) and self._ready and self._process is not None:
            self._process.send(Advance(rows_R4))

    def look(self, plan: StepPlan) -> Look:
        """Say which of the masks that a plan needs are there."""
        return self._placements.look(plan)

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        """Copy the masks of those of the plan's guided samples that are ready."""
        return self._placements.bits_GW(plan, ready)

    def tick(self, now_s: float) -> None:
        """Fail what takes too long, with the process that is stuck in it; start a new one."""
        if self._process is None:
            if not self._is_hopeless and now_s >= self._restart_at_s and self.num_restarts:
                self.start()
            return
        if not self._ready:
            if now_s - self._began_s >= START_TIMEOUT_S:
                self._process.kill()
            return
        if self._queue.overdue(now_s) | self._placements.overdue(now_s):
            self._process.kill()
            self._news()

    def _start_first(self) -> None:
        if self._process is None and not self.num_restarts:
            self.start()

    def _send_grammars(self) -> None:
        if not self._ready or self._process is None:
            return
        for number, grammar in self._queue.next(self._clock()):
            self._process.send(Prepare(number, grammar))

    def _reported(self, report: Report) -> None:
        match report:
            case Made():
                self._news()
            case Prepared(number=number, error=error):
                self._queue.finished(number, error)
                self._send_grammars()
            case Failed():
                self._placements.fail(report.slot, report.epoch, report.message, report.status)
                self._news()
            case Ready():
                self._begin()
            case Broken(message=message):
                self._is_hopeless = True  # there is nothing that a new process would do better
                self._give_up(message)

    def _begin(self) -> None:
        """A new process: tell it all that the one before knew."""
        now_s = self._clock()
        self._ready, self._broken = True, None
        self._backoff_s, self._num_early_deaths = _BACKOFF_S[0], 0
        self._log.info("guide ready", seconds=round(now_s - self._began_s, 2))
        if self._process is not None:
            for order in self._placements.all(now_s):
                self._process.send(order)
        self._send_grammars()
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(None)

    def _exited(self, status: int) -> None:
        self._log.warning("guide ended", status=status, was_ready=self._ready)
        self._ended(f"the process ends with status {status} before it is ready")

    def _ended(self, why: str) -> None:
        """There is no process now: start another, at once if the last one ever worked."""
        self._process, was_ready, self._ready = None, self._ready, False
        self._queue.guide_died()
        self._placements.guide_died()
        self.num_restarts += 1
        self._restart_at_s = self._clock()
        if not was_ready:
            self._num_early_deaths += 1
            self._restart_at_s += self._backoff_s
            self._backoff_s = min(2 * self._backoff_s, _BACKOFF_S[1])
            if self._num_early_deaths >= MAX_EARLY_DEATHS:
                self._restart_at_s = self._clock() + RETRY_S
                self._give_up(why)
        self._news()
        if was_ready and not self._is_hopeless:
            self.start()

    def _give_up(self, message: str) -> None:
        """Refuse who waits, and who comes until a guide is there after all."""
        if self._broken is None:
            self._log.error("no guide", error=message)
        told = f"This replica cannot restrict tokens: {message}"
        self._broken = Failure(500, "guide_failed", told)
        self._queue.fail_all(self._broken)
        self._placements.fail_all(message)
        waiting, self._waiting = self._waiting, {}
        for done in waiting.values():
            done(self._broken)
        self._news()


def _nobody(failure: Failure | None) -> None:
    """Whoever asked has gone."""
