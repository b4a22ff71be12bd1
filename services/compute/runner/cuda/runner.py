"""The CUDA runner: step plans as two graph launches, one upload before them and one copy after.

It knows slots, pages and rows; requests, prefixes and queues are the scheduler's. Nothing here
waits for the device but `result`.

Shape legend: S samples, W words of a result.
"""

from __future__ import annotations

import time
from dataclasses import dataclass

import numpy as np
import torch

from services.compute.kernels.slot_words import NUM_WORDS
from services.compute.layers.paged_cache import PagedCache
from services.compute.runner.cuda.packing import (
    MAX_PAGE_ENTRIES,
    pack,
    split,
    without_rows,
)
from services.compute.runner.cuda.pooler import Pooled
from services.compute.runner.cuda.prompt_scorer import Scored
from services.compute.runner.cuda.staging import MaskStaging, Results, SlotStaging, Staging
from services.compute.runner.cuda.step_machine import StepMachine
from services.compute.runner.cuda.stream import DeviceClock, DeviceStream, Mark
from services.compute.runner.device_errors import fatal_if_the_device_fails, place_all
from services.compute.runner.protocol import RunnerSpec, check_tokens
from services.compute.step import (
    Float32Array,
    Int32Array,
    RowScores,
    StepPlan,
    StepResult,
    TokenMasks,
)

NO_RESULT: Int32Array = np.zeros((0, 2), dtype=np.int32)
NO_SLOT_ROWS: Int32Array = np.zeros((0, 1 + NUM_WORDS), dtype=np.int32)


@dataclass(slots=True)
class CudaTicket:
    """A launched step: its plan, and where and when its tokens can be read."""

    plan: StepPlan
    begin: Mark
    upload: int = 0
    slot_upload: int = 0
    mask_upload: int = 0
    scored: Scored | None = None
    pooled: Pooled | None = None
    end: Mark | None = None
    result_SW: Int32Array | None = None  # holds the result once `end` has passed


class CudaRunner:
    """Runs step plans one after the other in the order given."""

    def __init__(
        self, machine: StepMachine, cache: PagedCache, spec: RunnerSpec, stream: DeviceStream
    ) -> None:
        self._machine = machine
        self._cache = cache
        self._spec = spec
        self._stream = stream
        self._clock = DeviceClock()
        pinned = machine.packed.device.type == "cuda"
        num_buffers = machine.sizes.num_buffers
        self._staging = Staging(machine.packed, num_buffers, stream.synchronize)
        self._slots = SlotStaging(machine.entries, num_buffers, stream.synchronize, machine.enter)
        self._masks = MaskStaging(machine.sampler.masks, num_buffers, stream.synchronize)
        self._results = Results(num_buffers, machine.max_result_ints, pinned)

    def spec(self) -> RunnerSpec:
        return self._spec

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> CudaTicket:
        """Launch transfers, deltas and the forward pass.

        Raises ValueError for a token id outside the vocabulary.
        """
        # A step begins with the first work that the device gets for it. Mostly that is its upload:
        # packing before it takes the host longer than the device needs to be idle.
        works_first = plan.swap_out or plan.swap_in or plan.slots
        begin = self._stream.mark() if works_first else None
        slot_rows, slot_upload = NO_SLOT_ROWS, 0
        if plan.slots:
            slot_rows = np.empty((len(plan.slots), 1 + NUM_WORDS), dtype=np.int32)
            slot_rows[:, 0] = [delta.slot for delta in plan.slots]
            placed = place_all(self._machine.sampler.place, plan.slots)
            slot_rows[:, 1:] = np.concatenate([rows for rows, _ in placed])
            slot_upload = self._slots.upload_entries(
                [entry for _, part in placed for entry in part]
            )
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        try:
            check_tokens(plan, self._spec.vocab_size)
        except ValueError:
            self._apply(without_rows(plan), slot_rows)
            raise
        if len(plan.page_slot) > MAX_PAGE_ENTRIES:
            *parts, plan = split(plan, MAX_PAGE_ENTRIES)
            for part in parts:
                self._apply(part, NO_SLOT_ROWS)
        num_ints = pack(plan, slot_rows, self._staging.buffer())
        ticket = CudaTicket(plan, begin or self._stream.mark(), slot_upload=slot_upload)
        ticket.upload = self._staging.upload(num_ints)
        self._machine.forward(plan.num_tokens, plan.num_decode_rows == plan.num_rows)
        if plan.scores:
            ticket.scored = self._machine.scorer.start(plan)
        if plan.pools and self._machine.pooler is not None:
            ticket.pooled = self._machine.pooler.start(plan)
        return ticket

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def sample(self, ticket: CudaTicket, masks: TokenMasks | None = None) -> CudaTicket:
        """Launch the draws and their way to the host."""
        plan, machine = ticket.plan, self._machine
        if len(plan.sample_row):
            slots = plan.row_slot[plan.sample_row]
            if plan.structured:
                ticket.mask_upload = self._masks.upload_masks(plan, masks)
            variant = machine.sampler.variant(slots, plan.sample_index)
            result_SW = machine.sample(variant, len(plan.sample_row))
            ticket.result_SW = self._results.copy(result_SW)
        else:
            ticket.result_SW = NO_RESULT
        ticket.end = self._stream.mark()
        return ticket

    @fatal_if_the_device_fails
    def result(self, ticket: CudaTicket) -> StepResult:
        if ticket.end is None or ticket.result_SW is None:
            raise RuntimeError(f"step {ticket.plan.step_id} has not been sampled")
        waited = not ticket.end.query()
        ticket.end.synchronize()
        self._staging.done(ticket.upload)
        self._slots.done(ticket.slot_upload)
        self._masks.done(ticket.mask_upload)
        start_s, end_s = self._clock.times_of(ticket.begin, ticket.end, time.monotonic(), waited)
        plan = ticket.plan
        tokens, finite, logprobs = self._machine.sampler.unpack(ticket.result_SW, plan)
        scores: dict[int, RowScores] = {}
        if ticket.scored is not None:
            scores = self._machine.scorer.take(plan, ticket.scored)
        embeddings: dict[int, Float32Array] = {}
        if ticket.pooled is not None and self._machine.pooler is not None:
            embeddings = self._machine.pooler.take(ticket.pooled)
        return StepResult(
            step_id=plan.step_id,
            tokens=tokens[:, None],
            n_valid=finite.astype(np.int32),
            nonfinite=~finite,
            logprobs=logprobs,
            device_start_s=start_s,
            device_end_s=end_s,
            scores=scores,
            embeddings=embeddings,
        )

    def ready(self, ticket: CudaTicket) -> bool:
        return ticket.end is not None and ticket.end.query()

    def close(self) -> None:
        self._stream.synchronize()

    def _apply(self, plan: StepPlan, slot_rows: Int32Array) -> None:
        """Change the resident tables as the plan says, and run no rows of it."""
        for part in split(plan, MAX_PAGE_ENTRIES):
            self._staging.upload(pack(part, slot_rows, self._staging.buffer()))
            self._machine.apply()
