"""The runner of plans over an executor of uploads: everything that a step needs is packed here."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from services.compute.expert_counters import ExpertCounters
from services.compute.kernels.sampling.slot_entries import entries_that_fit, pack_entries
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.runner.draft_rows import folded, spread_masks
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.protocol import RunnerSpec, SlotErrors, check_tokens
from services.compute.runner.uploads import (
    MAX_PAGE_ENTRIES,
    NO_SLOT_ROWS,
    StepPacker,
    pack_masks,
    split,
    without_rows,
)
from services.compute.sampling.slots import slots_of
from services.compute.step import (
    Int32Array,
    SlotDelta,
    StepPlan,
    StepResult,
    TokenMasks,
    mask_words,
)


class Ticket:
    """A step on its way: its plan, and the executor's own ticket."""

    __slots__ = ("launched", "plan")

    def __init__(self, plan: StepPlan, launched: Any) -> None:
        self.plan = plan
        self.launched = launched


class PackingRunner:
    """Packs each plan and hands the bytes to the executor, here or, through it, elsewhere."""

    def __init__(self, executor: Executor) -> None:
        self.executor = executor
        self._spec = executor.spec()
        self._packer = StepPacker(self._spec.max_num_seqs)

    def spec(self) -> RunnerSpec:
        return self._spec

    def forward(self, plan: StepPlan) -> Ticket:
        """Pack and launch deltas and the forward pass.

        Raises ValueError for a token id outside the vocabulary, once the deltas are applied.
        """
        slot_rows = self._place(plan.slots) if plan.slots else NO_SLOT_ROWS
        try:
            check_tokens(plan, self._spec.vocab_size)
        except ValueError:
            for part in split(without_rows(plan), MAX_PAGE_ENTRIES):
                self._launch(part, slot_rows)
            raise
        *parts, step = split(plan, MAX_PAGE_ENTRIES)
        for part in parts:
            self._launch(part, NO_SLOT_ROWS)
        return Ticket(plan, self._launch(step, slot_rows))

    def go_on(self, ticket: Ticket) -> bool:
        try:
            return self.executor.go_on(ticket.launched)
        except BaseException:
            self._packer.forget_rows()
            raise

    def sample(self, ticket: Ticket, masks: TokenMasks | None = None) -> Ticket:
        """Launch the draws and their way to the host.

        Raises ValueError where a structured sample is neither masked nor skipped.
        """
        plan, num_ints = ticket.plan, 0
        if plan.structured:
            num_ints = self._pack_masks(plan, masks)
        ticket.launched = self.executor.sample(ticket.launched, num_ints)
        return ticket

    def result(self, ticket: Ticket) -> StepResult:
        result = self.executor.result(ticket.launched)
        return folded(result, ticket.plan) if len(ticket.plan.num_drafts) else result

    def ready(self, ticket: Ticket) -> bool:
        return self.executor.ready(ticket.launched)

    def transfer(self, direction: Direction, pages: PagePairs) -> Any:
        return self.executor.transfer(direction, pages)

    def transferred(self, ticket: Any) -> bool:
        return self.executor.transferred(ticket)

    def expert_counters(self) -> ExpertCounters | None:
        return self.executor.expert_counters()

    def close(self) -> None:
        self.executor.close()

    def _launch(self, plan: StepPlan, slot_rows: Int32Array) -> Any:
        packer, executor = self._packer, self.executor
        num_ints = packer.pack(plan, slot_rows, executor.buffer(UploadKind.STEP))
        try:
            return executor.forward(num_ints)
        except BaseException:
            packer.forget_rows()
            raise

    def _place(self, deltas: Sequence[SlotDelta]) -> Int32Array:
        """Send what new sequences bring; return their slot rows [N, 1+W].

        Raises SlotErrors, before anything is sent, for those whose settings cannot be packed.
        """
        rows, entries, errors = [], [], {}
        for delta in deltas:
            try:
                row, brought = slots_of((delta,), self._spec.vocab_size)
            except Exception as error:  # of a list that is too long
                errors[delta.slot] = error
            else:
                rows.append(row)
                entries += brought
        if errors:
            raise SlotErrors(errors) from next(iter(errors.values()))
        buffer = self.executor.buffer
        if entries:
            room = len(buffer(UploadKind.ENTRIES))
            for part in entries_that_fit(entries, room):
                self.executor.enter(pack_entries(part, buffer(UploadKind.ENTRIES)))
        return np.concatenate(rows)

    def _pack_masks(self, plan: StepPlan, masks: TokenMasks | None) -> int:
        missing = set(plan.structured)
        if masks is not None:
            missing.difference_update(masks.samples.tolist(), masks.skipped)
        if masks is None or missing:
            raise ValueError(
                f"step {plan.step_id}: no mask for structured samples {sorted(missing)}"
            )
        if len(plan.num_drafts):
            masks = spread_masks(masks, plan)
        buffer = self.executor.buffer(UploadKind.MASKS)
        spec = self._spec
        return pack_masks(masks, spec.max_num_seqs, mask_words(spec.vocab_size), buffer)
