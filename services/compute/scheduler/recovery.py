"""What goes on from a lost worker, beside what is served here: its share of a step's prompt tokens.

It has its turn first, and there may be so much of it that nothing else would be computed for
seconds: neither the first tokens of new requests nor the next ones of those that run.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import chain

from services.compute.scheduler.sequence import Sequence
from services.compute.scheduler.state import RunningBatch
from services.compute.scheduler.waiting import WaitingQueue

# Of the tokens that a step may compute of prompts: with more of them, first tokens came later than
# twice their usual time (benchmarks/results/recovery.md).
RECOVERY_SHARE = 8
LEAST_TOKENS = 32


@dataclass(slots=True)
class PrefillBudget:
    """The prompt tokens left of a step, and how many of them `recovery` may take."""

    tokens: int
    recovery: int

    def of(self, sequence: Sequence) -> int:
        """How many of its known tokens a sequence may compute."""
        return min(self.tokens, self.recovery) if sequence.params.goes_on else self.tokens

    def take(self, sequence: Sequence, count: int) -> None:
        self.tokens -= count
        if sequence.params.goes_on:
            self.recovery -= count


def prefill_budget(tokens: int, running: RunningBatch, waiting: WaitingQueue) -> PrefillBudget:
    """Divide a step's prompt tokens, if there is anything to recover and anything beside it."""
    if not (waiting.num_going_on or any(s.params.goes_on for s in running.prefilling)):
        return PrefillBudget(tokens, tokens)
    begun_here = (not s.params.goes_on for s in chain(running.decoding, running.prefilling))
    if len(waiting) == waiting.num_going_on and not any(begun_here):
        return PrefillBudget(tokens, tokens)
    return PrefillBudget(tokens, min(tokens, max(LEAST_TOKENS, tokens // RECOVERY_SHARE)))
