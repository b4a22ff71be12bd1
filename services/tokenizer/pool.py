"""The pool: assigns jobs to processes and decides what happens to a job whose process dies.

Each process has one job at a time, so that killing it hurts that job alone. Everything is on the
loop and nothing waits; processes report through callbacks.

Short texts go to a process too: the hop costs 0.07 ms (50 bytes: 0.08 ms against 0.01 ms on the
loop), and longer ones would hold the loop while they are encoded: 0.3 ms at 2 kB, 270 at 1 MB.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import structlog

from common.child_main import framed
from common.child_process import BACKOFF_S, ChildExit, RestartingChild, Spawn
from common.errors import ModelError
from common.link.codec import pack
from common.messages.address import AttemptId
from common.messages.arrays import int32s
from common.messages.failure import Failure
from common.messages.tokenize import OutputRules
from common.telemetry import log
from services.tokenizer.config import TokenizerSettings
from services.tokenizer.jobs import Job, Outcome, unpack_outcome

# A prompt of this size takes 17 ms (3.8 MB/s, byte-level BPE of 20,000 tokens); prompts from here
# on leave one process to the others.
LARGE_PROMPT_BYTES = 64 << 10
_MAX_TRIES = 2
_MAX_FAILED_STARTS = 3  # of one process in a row, before the first is ready; one may be an accident

Done = Callable[[Outcome], None]


@dataclass(slots=True, eq=False)
class _Entry:
    number: int
    job: Job
    done: Done | None  # None: cancelled
    timeout_s: float
    is_large: bool
    deadline_s: float
    attempts: tuple[AttemptId, ...]  # whose job it is, for the log
    traceparents: tuple[str, ...]
    queued_s: float
    began_s: float = 0.0
    num_tries: int = 0
    timed_out: bool = False


class Pool:
    """Hands jobs to processes, first come, first served; a `ChildOwner` of these processes."""

    def __init__(
        self,
        settings: TokenizerSettings,
        spawn: Spawn,
        clock: Callable[[], float] = time.monotonic,
        trial: Job | None = None,
    ) -> None:
        """If `trial` is refused, the first job that there is, the log says why."""
        self._settings = settings
        self._clock = clock
        self._trial = trial
        self._children = [
            RestartingChild(spawn, self, clock) for _ in range(settings.num_processes)
        ]
        self._running: dict[RestartingChild, _Entry] = {}
        self._waiting: dict[int, _Entry] = {}  # by number, in the order of their turns
        self._max_large = max(1, settings.num_processes - 1)
        self._last_number = 0
        self._first_ready: asyncio.Future[None] | None = None
        self._log = structlog.get_logger()
        self.num_finished = 0
        self._busy_s = 0.0  # of jobs that have ended

    async def start(self) -> None:
        """Start the processes and wait for the first; ModelError when the folder is unusable."""
        self._first_ready = asyncio.get_running_loop().create_future()
        for child in self._children:
            child.start()
        try:
            while not self._first_ready.done():
                await asyncio.wait([self._first_ready], timeout=BACKOFF_S[0])
                self.tick()
            self._first_ready.result()
        except ModelError:
            self.stop()
            raise
        if self._trial is not None:
            self.submit(self._trial, _warn_of_refused)

    def stop(self) -> None:
        """End the processes; what they worked on is not reported."""
        self._waiting.clear()
        for entry in self._running.values():
            entry.done = None
        for child in self._children:
            child.close()

    @property
    def num_running(self) -> int:
        return len(self._running)

    @property
    def busy_s(self) -> float:
        """For how long its processes have worked, all of them at once being a second a second."""
        now_s = self._clock()
        running_s = sum(now_s - entry.began_s for entry in self._running.values())
        return (self._busy_s + running_s) / len(self._children)

    @property
    def queue_age_s(self) -> float:
        """How long the job has waited that waits longest."""
        since_s = min((entry.queued_s for entry in self._waiting.values()), default=None)
        return 0.0 if since_s is None else self._clock() - since_s

    @property
    def num_restarts(self) -> int:
        return sum(child.num_restarts for child in self._children)

    def submit(
        self, job: Job, done: Done, attempt: AttemptId | None = None, traceparent: str = ""
    ) -> int:
        """Take a job; `done` is called once, later, unless it is cancelled by its number first.

        Should its process end, the log names the attempt.
        """
        self._last_number += 1
        timeout_s = self._settings.encode_timeout_s
        if job.is_confined:
            # Once for the template, once for the answer's grammar.
            timeout_s += 2 * self._settings.template_timeout_s
        entry = _Entry(
            number=self._last_number,
            job=job,
            done=done,
            timeout_s=timeout_s,
            is_large=job.size >= LARGE_PROMPT_BYTES,
            deadline_s=self._clock() + timeout_s,
            attempts=() if attempt is None else (attempt,),
            traceparents=() if attempt is None else (traceparent,),
            queued_s=self._clock(),
        )
        self._waiting[entry.number] = entry
        self._dispatch()
        return entry.number

    def cancel(self, number: int) -> None:
        """Forget a job: its `done` is not called. A process that already runs it finishes it."""
        self._waiting.pop(number, None)
        for entry in self._running.values():
            if entry.number == number:
                entry.done = None

    def tick(self) -> None:
        """Restart processes, kill those that take too long, fail jobs that waited too long."""
        now_s = self._clock()
        for child in self._children:
            child.tick(now_s)
        for child, entry in self._running.items():
            if now_s >= entry.deadline_s and not entry.timed_out:
                entry.timed_out = True
                child.kill()
        for entry in [entry for entry in self._waiting.values() if now_s >= entry.deadline_s]:
            del self._waiting[entry.number]
            message = "the prompt waited too long for a process of the tokenizer; try again"
            failure = Failure(503, "overloaded", message, retryable=True)
            self._finish(entry, Outcome(int32s(), failure=failure))

    def child_ready(self, child: RestartingChild) -> None:
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_result(None)
        self._dispatch()

    def child_broken(self, child: RestartingChild, why: str) -> None:
        self._log.error("tokenizer process cannot load", error=why)
        self._fail_start(why)

    def child_reported(self, child: RestartingChild, report: list[Any]) -> None:
        outcome = unpack_outcome(report)
        if outcome.retiring:
            child.retire()
        self._finish(self._taken_from(child), outcome)
        self._dispatch()

    def child_ended(self, child: RestartingChild, exit: ChildExit) -> None:
        entry = self._taken_from(child) if child in self._running else None
        is_deed_of_template = exit.status == -signal.SIGALRM
        if is_deed_of_template or child.num_failed_starts >= _MAX_FAILED_STARTS:
            self._fail_start(_early_end(exit.status, self._settings))
        logger = log.for_attempts(entry.attempts, entry.traceparents) if entry else self._log
        logger.warning("tokenizer process ended", status=exit.status, had_job=entry is not None)
        if entry is None:
            return
        failure = None if entry.done is None else _death(entry, exit.status, self._settings)
        if entry.done is None or failure is not None:
            self._finish(entry, Outcome(int32s(), failure=failure))
        else:  # perhaps it was killed from outside: once more, before those that came later
            self._waiting = {entry.number: entry, **self._waiting}
        self._dispatch()

    def _dispatch(self) -> None:
        for child in self._children:
            if not child.is_ready or child in self._running:
                continue
            entry = self._next()
            if entry is None:
                return
            entry.num_tries += 1
            entry.began_s = self._clock()
            entry.deadline_s = entry.began_s + entry.timeout_s
            self._running[child] = entry
            child.send(framed(pack(entry.job)))

    def _taken_from(self, child: RestartingChild) -> _Entry:
        entry = self._running.pop(child)
        self._busy_s += self._clock() - entry.began_s
        return entry

    def _next(self) -> _Entry | None:
        num_large = sum(entry.is_large for entry in self._running.values())
        for number, entry in self._waiting.items():
            if not entry.is_large or num_large < self._max_large:
                return self._waiting.pop(number)
        return None

    def _finish(self, entry: _Entry, outcome: Outcome) -> None:
        self.num_finished += 1
        done, entry.done = entry.done, None
        if done is not None:
            done(outcome)

    def _fail_start(self, why: str) -> None:
        if self._first_ready is not None and not self._first_ready.done():
            self._first_ready.set_exception(ModelError(why))


def _early_end(status: int, settings: TokenizerSettings) -> str:
    """Explain why a process ended before it was ready; jinja2 folds constants when it compiles."""
    if status == -signal.SIGALRM:
        return (
            f"the model's chat template takes over {settings.template_timeout_s:g} s to compile; "
            "is it meant for this server?"
        )
    return f"a tokenizer process ended with status {status} before it was ready"


def _death(entry: _Entry, status: int, settings: TokenizerSettings) -> Failure | None:
    """Explain the death of a job's process; None when the job deserves another try."""
    rules = entry.job.rules
    if status == -signal.SIGALRM:
        has_rules = rules != OutputRules()
        what = "the chat template or the answer's grammar" if has_rules else "the chat template"
        message = f"{what} took longer than {settings.template_timeout_s:g} s for this request"
        return Failure(400, "template_error", message)
    if entry.timed_out:
        message = f"the prompt could not be tokenized within {entry.timeout_s:g} s"
        return Failure(500, "tokenizer_timeout", message)
    if entry.num_tries < _MAX_TRIES:
        return None
    if rules.structure is not None or rules.tools is not None:
        # Schemas are read by a native library; an enum of -2**63 is one that it dies of.
        field = "tools" if rules.structure is None else rules.structure.field
        message = f"{field} cannot be made a grammar: what reads it dies of it"
        return Failure(400, "invalid_grammar", message, field)
    message = f"the tokenizer's process died {entry.num_tries} times on this prompt"
    return Failure(500, "tokenizer_failed", message)


def _warn_of_refused(outcome: Outcome) -> None:
    if outcome.failure is not None:
        structlog.get_logger().warning("chats will be refused", why=outcome.failure.message)
