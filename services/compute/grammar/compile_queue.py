"""Grammars that wait to be compiled, one at a time: so it is clear which one a worker dies of."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass

from common.messages.failure import Failure
from common.messages.sampling import GrammarSpec

Done = Callable[[Failure | None], None]
"""Called once: with None when the grammar can be used, or with the reason why it cannot be."""

MAX_DEATHS = 2  # one may be an accident
PASSING_FACTOR = 4  # a known grammar may have to wait for one that is being compiled


@dataclass(slots=True)
class _Compilation:
    number: int
    grammar_spec: GrammarSpec
    done: Done | None
    sent_s: float | None = None
    num_deaths: int = 0


class CompileQueue:
    """First come, first served; grammars that were compiled before do not queue.

    Those are sent as well, since the worker may have dropped them, but they do no harm.
    """

    def __init__(self, timeout_s: float, max_known: int) -> None:
        self._timeout_s = timeout_s
        self._max_known = max_known
        self._entries: dict[int, _Compilation] = {}
        self._running: _Compilation | None = None
        self._known: OrderedDict[str, None] = OrderedDict()
        self._last_number = 0

    def __len__(self) -> int:
        return len(self._entries)

    def add(self, grammar_spec: GrammarSpec, done: Done) -> int:
        """Queue a grammar; return its number."""
        self._last_number += 1
        self._entries[self._last_number] = _Compilation(self._last_number, grammar_spec, done)
        return self._last_number

    def cancel(self, number: int) -> None:
        """Do not call this one's `done`; a grammar that is being compiled goes on to its end."""
        entry = self._entries.get(number)
        if entry is None:
            return
        entry.done = None
        if entry.sent_s is None:
            del self._entries[number]

    def next(self, now_s: float) -> list[tuple[int, str]]:
        """Return number and text of the grammars to send to the worker now."""
        due = []
        for entry in self._entries.values():
            is_known = entry.grammar_spec.grammar in self._known
            if entry.sent_s is not None or not (is_known or self._running is None):
                continue
            if not is_known:
                self._running = entry
            entry.sent_s = now_s
            due.append((entry.number, entry.grammar_spec.grammar))
        return due

    def finished(self, number: int, error: str) -> None:
        """Take the worker's answer: the grammar can be used, or the error says why not."""
        entry = self._entries.get(number)
        if entry is None:
            return
        if error:
            self._refuse(entry, "invalid_grammar", f"cannot be used: {error}")
            return
        self._known[entry.grammar_spec.grammar] = None
        self._known.move_to_end(entry.grammar_spec.grammar)
        if len(self._known) > self._max_known:
            self._known.popitem(last=False)
        self._end(entry, None)

    def overdue(self, now_s: float) -> bool:
        """Refuse grammars that take too long; True if there are any, and the worker must die."""
        overdue = False
        for entry in list(self._entries.values()):
            factor = 1 if entry is self._running else PASSING_FACTOR
            if entry.sent_s is not None and now_s - entry.sent_s >= factor * self._timeout_s:
                overdue = True
                message = f"takes over {self._timeout_s:g} s to compile; make it smaller or simpler"
                self._refuse(entry, "grammar_timeout", message)
        return overdue

    def worker_died(self) -> None:
        """Send everything again, but for a grammar that was being compiled at two deaths."""
        running, self._running = self._running, None
        for entry in list(self._entries.values()):
            entry.sent_s = None
            if entry.done is None:
                del self._entries[entry.number]
        if running is not None and running.number in self._entries:
            running.num_deaths += 1
            if running.num_deaths >= MAX_DEATHS:
                message = "cannot be used: its compiler dies of it; make it smaller or less deep"
                self._refuse(running, "invalid_grammar", message)

    def fail_all(self, failure: Failure) -> None:
        """Answer every request with a failure."""
        for entry in list(self._entries.values()):
            self._end(entry, failure)

    def _refuse(self, entry: _Compilation, code: str, message: str) -> None:
        field = entry.grammar_spec.field
        self._end(entry, Failure(400, code, f"The grammar of {field} {message}.", field))

    def _end(self, entry: _Compilation, failure: Failure | None) -> None:
        del self._entries[entry.number]
        if entry is self._running:
            self._running = None
        if entry.done is not None:
            entry.done(failure)
