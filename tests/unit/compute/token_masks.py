"""A runner whose structured samples get masks that a test makes."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np

from common.messages.sampling import GrammarSpec
from services.compute.step import Int32Array, StepPlan, StepResult, TokenMasks

GRAMMAR_SPEC = GrammarSpec(grammar="start: /a/")

Allow = Callable[[int, int], Sequence[int] | None]
"""The ids that a slot may take for an output number; None for a mask that was not ready."""


def bits_of(allowed: Sequence[int], vocab_size: int) -> Int32Array:
    """A row of mask bits [M]."""
    there = np.zeros(-(-vocab_size // 32) * 32, dtype=np.uint8)
    there[list(allowed)] = 1
    return np.packbits(there, bitorder="little").view(np.int32)


class MaskingRunner:
    """Marks samples as structured and masks them as `allow` says; the rest is the runner's."""

    def __init__(self, runner: Any, allow: Allow) -> None:
        self._runner = runner
        self._allow = allow
        self._structured: dict[int, bool] = {}
        self.spec = runner.spec
        self.skipped: list[tuple[int, int]] = []  # slot and output number

    def forward(self, plan: StepPlan) -> Any:
        for delta in plan.slots:
            self._structured[delta.slot] = delta.sampling.grammar_spec is not None
        slots = plan.row_slot[plan.sample_row].tolist()
        structured = tuple(s for s, slot in enumerate(slots) if self._structured[slot])
        return self._runner.forward(replace(plan, structured=structured))

    def sample(self, ticket: Any) -> Any:
        plan: StepPlan = ticket.plan
        slots = plan.row_slot[plan.sample_row].tolist()
        samples, rows, skipped = [], [], []
        for sample in plan.structured:
            where = slots[sample], int(plan.sample_index[sample])
            allowed = self._allow(*where)
            if allowed is None:
                skipped.append(sample)
                self.skipped.append(where)
            else:
                samples.append(sample)
                rows.append(bits_of(allowed, self.spec().vocab_size))
        words = -(-self.spec().vocab_size // 32)
        bits = np.array(rows, dtype=np.int32).reshape(len(rows), words)
        masks = TokenMasks(np.array(samples, dtype=np.int32), bits, tuple(skipped))
        return self._runner.sample(ticket, masks if plan.structured else None)

    def result(self, ticket: Any) -> StepResult:
        return self._runner.result(ticket)
