"""Where the tokens of each slot go: which attempt, past which detokenizer, to which router."""

from __future__ import annotations

from itertools import count

import numpy as np

from common.messages.address import Address
from services.compute.scheduler.protocol import StepTokens
from services.compute.scheduler.sequence import Sequence
from services.compute.step import Int32Array

_NOWHERE = -1


class Routes:
    """Sorts a step's tokens by detokenizer and router, from arrays that are kept by slot."""

    __slots__ = ("_counter_of", "_number_of", "_numbers")

    def __init__(self, num_slots: int) -> None:
        self._counter_of = np.zeros(num_slots, dtype=np.int64)
        self._number_of = np.full(num_slots, _NOWHERE, dtype=np.int32)
        self._numbers: dict[tuple[Address, str], int] = {}

    def __len__(self) -> int:
        return len(self._numbers)

    def enter(self, sequence: Sequence) -> None:
        """A sequence has taken its slot."""
        slot, attempt = sequence.slot, sequence.attempt
        self._number_of[slot] = self._number(sequence.params.detokenizer, attempt.router)
        self._counter_of[slot] = attempt.counter

    def sort(
        self, slot_S: Int32Array, index_S: Int32Array, token_S: Int32Array, told: list[int]
    ) -> list[StepTokens]:
        """Sort a step's tokens, each with its output index, but for the samples in `told`."""
        number_S = self._number_of[slot_S]
        if told:
            number_S[told] = _NOWHERE
        found = []
        for (detokenizer, router), number in self._numbers.items():
            (rows,) = (number_S == number).nonzero()
            if len(rows):
                counter_S = self._counter_of[slot_S[rows]]
                tokens = StepTokens(detokenizer, router, counter_S, index_S[rows], token_S[rows])
                found.append(tokens)
        return found

    def _number(self, detokenizer: Address, router: str) -> int:
        """The number of a route; a new one takes that of a route that no slot has any more."""
        route = (detokenizer, router)
        number = self._numbers.get(route)
        if number is None:
            used = set(self._number_of.tolist())
            self._numbers = {r: n for r, n in self._numbers.items() if n in used}
            number = next(n for n in count() if n not in used)
            self._numbers[route] = number
        return number
