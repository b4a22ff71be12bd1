"""Where the tokens of each slot go: which attempt, past which detokenizer, to which router."""

from __future__ import annotations

from itertools import count
from typing import NamedTuple

import numpy as np
import numpy.typing as npt

from common.messages.address import Address
from services.compute.scheduler.protocol import StepTokens
from services.compute.scheduler.sequence import Sequence
from services.compute.step import Int32Array

_NOWHERE = -1


class _Group(NamedTuple):
    """The samples of a step that go the same way, and the counters of their attempts."""

    detokenizer: Address
    router: str
    samples: npt.NDArray[np.intp]
    counter_S: npt.NDArray[np.int64]


class Routes:
    """Sorts a step's tokens by detokenizer and router, from arrays that are kept by slot.

    While the samples are those of the step before, as they are most of the time, and nobody has
    taken a slot since, they are not even sorted again: alone a sequence costs 2 us less so.
    """

    __slots__ = ("_counter_of", "_groups", "_number_of", "_numbers", "_slot_S")

    def __init__(self, num_slots: int) -> None:
        self._counter_of = np.zeros(num_slots, dtype=np.int64)
        self._number_of = np.full(num_slots, _NOWHERE, dtype=np.int32)
        self._numbers: dict[tuple[Address, str], int] = {}
        self._slot_S: Int32Array | None = None  # what `_groups` were made of
        self._groups: list[_Group] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def enter(self, sequence: Sequence) -> None:
        """A sequence has taken its slot."""
        slot, attempt = sequence.slot, sequence.attempt
        self._number_of[slot] = self._number(sequence.params.detokenizer, attempt.router)
        self._counter_of[slot] = attempt.counter
        self._slot_S = None

    def sort(
        self, slot_S: Int32Array, index_S: Int32Array, token_S: Int32Array, told: list[int]
    ) -> list[StepTokens]:
        """Sort a step's tokens, each with its output index, but for the samples in `told`.

        The array of slots must not change after the call: while it is the same, so are they.
        """
        if len(told) == len(slot_S):
            return []
        if told or slot_S is not self._slot_S:
            self._groups = self._grouped(slot_S, told)
            self._slot_S = None if told else slot_S
        return [
            StepTokens(
                group.detokenizer,
                group.router,
                group.counter_S,
                index_S[group.samples],
                token_S[group.samples],
            )
            for group in self._groups
        ]

    def _grouped(self, slot_S: Int32Array, told: list[int]) -> list[_Group]:
        number_S = self._number_of[slot_S]
        number_S[told] = _NOWHERE
        groups = []
        for (detokenizer, router), number in self._numbers.items():
            (samples,) = (number_S == number).nonzero()
            if len(samples):
                counter_S = self._counter_of[slot_S[samples]]
                groups.append(_Group(detokenizer, router, samples, counter_S))
        return groups

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
