"""What happened to sequences, gathered until the engine takes it; a step's tokens as columns."""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from itertools import count
from typing import NamedTuple, TypeAlias

import numpy as np
import numpy.typing as npt

from common.messages.address import Address, AttemptId
from common.messages.failure import Ending, EndReason, Failure, Usage
from common.messages.generate import Generate
from common.messages.logprobs import PromptLogprobs
from common.messages.tokens import TokenLogprobs
from services.compute.scheduler.sequence import Sequence
from services.compute.step import Int32Array

_NOWHERE = -1


@dataclass(slots=True)  # not frozen: that would take 0.72 us to make, not 0.15; never change one
class SequenceOutput:
    """New tokens of one sequence, its end, or both.

    `opened` marks the attempt's first output; only there and with `ending` the header is read.
    `first_index` continues where the output before ended (len(output_ids) at the start).
    """

    attempt: AttemptId
    detokenizer: Address
    header: bytes
    first_index: int
    token_ids: tuple[int, ...]
    num_logprobs: int = -1
    logprobs: tuple[TokenLogprobs, ...] = ()
    opened: bool = False
    ending: Ending | None = None
    prompt_tokens: int = 0  # with `opened`
    cached_tokens: int = 0  # with `opened`
    scored: tuple[PromptLogprobs, ...] = ()
    queued_s: float | None = None  # with `opened`
    drafted: tuple[int, int] | None = None  # accepted and rejected so far, if there were drafts


class StepTokens(NamedTuple):
    """One more token, and nothing else, of each of many sequences: 0.1 ms less at 256 of them.

    Sequence s is attempt (`router`, counter_S[s]); its token is output number index_S[s].
    """

    detokenizer: Address
    router: str
    counter_S: npt.NDArray[np.int64]
    index_S: Int32Array
    token_S: Int32Array


Output: TypeAlias = SequenceOutput | StepTokens


def attempt_of(request: Generate, choice: int) -> AttemptId:
    return AttemptId(request.attempt.router, request.attempt.counter + choice)


def never_started(
    request: Generate, attempt: AttemptId, reason: EndReason, failure: Failure | None
) -> SequenceOutput:
    """The only output of a choice that ended before it became a sequence."""
    num_outputs = len(request.output_ids)
    usage = Usage(len(request.prompt_ids) // 4, 0, num_outputs)
    return SequenceOutput(
        attempt=attempt,
        detokenizer=request.detokenizer,
        header=request.header,
        first_index=num_outputs,
        token_ids=(),
        num_logprobs=request.sampling.num_logprobs,
        opened=True,
        ending=Ending(reason, usage, failure=failure),
    )


def sequence_outputs(outputs: Iterable[Output]) -> Iterator[SequenceOutput]:
    """Spell out the tokens of a step as an output for each sequence."""
    for item in outputs:
        if isinstance(item, SequenceOutput):
            yield item
            continue
        columns = (item.counter_S.tolist(), item.index_S.tolist(), item.token_S.tolist())
        for counter, index, token in zip(*columns, strict=True):
            attempt = AttemptId(item.router, counter)
            yield SequenceOutput(attempt, item.detokenizer, b"", index, (token,))


class _Group(NamedTuple):
    """The samples of a step that go the same way, and the counters of their attempts."""

    detokenizer: Address
    router: str
    samples: npt.NDArray[np.intp] | slice
    counter_S: npt.NDArray[np.int64]


class OutputRoutes:
    """Sorts a step's tokens by detokenizer and router, from arrays that are kept by slot.

    While the samples are those of the step before, as in most steps, they are not sorted again.
    """

    def __init__(self, num_slots: int) -> None:
        self._counter_of = np.zeros(num_slots, dtype=np.int64)
        self._number_of = np.full(num_slots, _NOWHERE, dtype=np.int32)
        self._numbers: dict[tuple[Address, str], int] = {}
        self._slot_S: Int32Array | None = None  # what `_groups` were made of
        self._groups: list[_Group] = []

    def __len__(self) -> int:
        return len(self._numbers)

    def enter(self, sequence: Sequence) -> None:
        slot, attempt = sequence.slot, sequence.attempt
        self._number_of[slot] = self._number(sequence.params.detokenizer, attempt.router)
        self._counter_of[slot] = attempt.counter
        self._slot_S = None

    def sort(
        self, slot_S: Int32Array, index_S: Int32Array, token_S: Int32Array, apart: list[int]
    ) -> list[StepTokens]:
        """Sort a step's tokens, each with its output index, but for the samples in `apart`.

        The array of slots must not change after the call: while it is the same, so are they.
        """
        if len(apart) == len(slot_S):
            return []
        if apart or slot_S is not self._slot_S:
            self._groups = self._grouped(slot_S, apart)
            self._slot_S = None if apart else slot_S
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

    def _grouped(self, slot_S: Int32Array, apart: list[int]) -> list[_Group]:
        number_S = self._number_of[slot_S]
        number_S[apart] = _NOWHERE
        groups = []
        for (detokenizer, router), number in self._numbers.items():
            (samples,) = (number_S == number).nonzero()
            if len(samples):
                counter_S = self._counter_of[slot_S[samples]]
                all_go = len(samples) == len(slot_S)  # as most often: then nothing is copied
                samples = slice(None) if all_go else samples
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
