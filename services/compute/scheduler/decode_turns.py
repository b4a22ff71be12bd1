"""Turns: whose next tokens a step has, of the sequences that decode.

In a pipeline as many groups of them take turns as steps are in flight: each sequence is in one of
these, as its next token follows from its last.
"""

from __future__ import annotations

from collections.abc import Set

from services.compute.scheduler.sequence import Sequence
from services.compute.scheduler.state import RunningBatch, by_order


class DecodeTurns:
    def __init__(self, running: RunningBatch, num_groups: int) -> None:
        self._running = running
        self._num_groups = num_groups
        self._turn: list[Sequence] = []

    def begin(self) -> list[Sequence]:
        """All that decode; of several groups the next: those whose last token is known, as many as
        make groups of one size. Who waits for pages is the youngest and has its turn last."""
        decoding = self._running.decoding
        if self._num_groups == 1:
            return decoding
        known = [s for s in decoding if s.num_scheduled_tokens < s.num_tokens]
        known.sort(key=by_order)
        self._turn = known[: -(-len(decoding) // self._num_groups)]
        return self._turn

    def rows(self, held: Set[Sequence]) -> list[Sequence]:
        """Those of them that still run and are not held; the same list while they are the same."""
        if self._num_groups > 1:
            return [s for s in self._turn if s.slot >= 0 and s not in held]
        decoding = self._running.decoding
        return [s for s in decoding if s not in held] if held else decoding
