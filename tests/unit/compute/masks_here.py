"""A mask worker in this process, some of whose masks come late, and which dies now and then."""

from __future__ import annotations

import random
from collections.abc import Sequence
from pathlib import Path

from services.compute.grammar.backend import GrammarBackend
from services.compute.grammar.mask_worker import MaskWorker
from services.compute.grammar.protocol import (
    AcceptTokens,
    GrammarSettings,
    MaskMemory,
    MaskStatus,
    Report,
    SequenceFailed,
)
from services.compute.grammar.sequences import StructuredSequences, drawn_rows
from services.compute.step import (
    BoolArray,
    ForcedTokens,
    Int32Array,
    SlotDelta,
    StepPlan,
    StepResult,
)
from tests.flow.structured_ring import EOS, VOCAB_SIZE, save_tokenizer


class MasksHere:
    """A `MaskSource` that has every mask at once; with `late` it hides that share of them, and as
    often it starts its worker again between two looks."""

    def __init__(self, folder: Path, num_slots: int, late: float = 0.0) -> None:
        settings = GrammarSettings(
            folder=str(save_tokenizer(folder)),
            vocab_size=VOCAB_SIZE,
            eos_token_ids=(EOS,),
            num_slots=num_slots,
        )
        self._memory = MaskMemory.create(num_slots, VOCAB_SIZE)
        self._sequences = StructuredSequences(self._memory, timeout_s=60.0)
        self._settings, self._backend = settings, GrammarBackend(settings)
        self._start()
        self._late, self._rng = late, random.Random(1)
        self.num_late = 0

    def _start(self) -> None:
        self._worker = MaskWorker(
            self._settings, self._backend, self._memory, self._reported, 0, None
        )
        for order in self._sequences.all(0.0):
            self._worker.take(order)

    def _reported(self, report: Report) -> None:
        assert not isinstance(report, SequenceFailed), report

    def place(self, deltas: Sequence[SlotDelta]) -> None:
        for order in self._sequences.place(deltas, 0.0):
            self._backend.compile(order.grammar_spec.grammar)  # so that it needs no other thread
            self._worker.take(order)

    def advance(self, plan: StepPlan, result: StepResult, skipped: frozenset[int]) -> None:
        rows_R4 = drawn_rows(plan, result, skipped)
        if len(rows_R4):
            self._worker.take(AcceptTokens(rows_R4))
            self._sequences.advance(rows_R4, 0.0)

    def awaited(self) -> list[tuple[int, int]]:
        return self._sequences.awaited()

    def forced(self) -> list[ForcedTokens]:
        return self._sequences.forced()

    def look(self, plan: StepPlan) -> MaskStatus:
        if self._rng.random() < self._late:
            self._sequences.worker_died()
            self._start()
        status = self._sequences.look(plan)
        for sample in range(len(status.ready)):
            if self._rng.random() < self._late:
                status.ready[sample] = False
                self.num_late += 1
        return status

    def bits_GW(self, plan: StepPlan, ready: BoolArray) -> Int32Array:
        return self._sequences.bits_GW(plan, ready)

    def close(self) -> None:
        self._memory.close()
