"""The CUDA executor: uploads as two graph launches, one copy before them and one after.

It knows slots, pages and rows; requests, prefixes and queues are the scheduler's. Nothing here
waits for the device but `result`.

Shape legend: S samples, W words of a result.
"""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch

from services.compute.expert_counters import ExpertCounters
from services.compute.kernels.drafts.draft_tokens import said_drafts, unpack_drafts
from services.compute.kernels.step.step_buffers import (
    HEADER_INTS,
    NUM_DECODE_ROWS,
    NUM_ROWS,
    NUM_SAMPLES,
    NUM_TOKENS,
)
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.paged_cache import PagedCache
from services.compute.runner.cuda.expert_moves import ExpertMoves
from services.compute.runner.cuda.handover import NO_HANDOVER, Handover
from services.compute.runner.cuda.pooler import Pooled
from services.compute.runner.cuda.prompt_scorer import Scored
from services.compute.runner.cuda.staging import Results, Staging
from services.compute.runner.cuda.step_machine import StepMachine
from services.compute.runner.cuda.stream import DeviceClock, DeviceStream, Mark
from services.compute.runner.device_errors import fatal_if_the_device_fails
from services.compute.runner.executor import UploadKind
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.uploads import NUM_POOLS, NUM_SCORES, VARIANT, StepUpload, step_id_of
from services.compute.sampling.slots import Variant
from services.compute.step import (
    NO_DRAFTS,
    NO_IDS,
    Float32Array,
    Int32Array,
    RowScores,
    StepResult,
)

NO_RESULT: Int32Array = np.zeros((0, 2), dtype=np.int32)


class ServedExperts(NamedTuple):
    """What is counted of a mixture's experts, and what exchanges them."""

    counters: ExpertCounters | None = None
    moves: ExpertMoves | None = None


NO_EXPERTS = ServedExperts()


@dataclass(slots=True)
class CudaTicket:
    """A launched step: its header, and where and when its tokens can be read.

    One that waits gets from another stage what it goes on with.
    """

    step: Int32Array
    header: list[int]
    begin: Mark
    waits: bool = False
    upload: int = 0
    entries_upload: int = 0
    mask_upload: int = 0
    scored: Scored | None = None
    pooled: Pooled | None = None
    end: Mark | None = None
    result_SW: Int32Array | None = None  # holds the result once `end` has passed


class CudaExecutor:
    """Executes uploads one after the other in the order given."""

    def __init__(
        self,
        machine: StepMachine,
        cache: PagedCache,
        spec: RunnerSpec,
        stream: DeviceStream,
        experts: ServedExperts = NO_EXPERTS,
        handover: Handover = NO_HANDOVER,
    ) -> None:
        self._machine = machine
        self._cache = cache
        self._spec = spec
        self._stream = stream
        self._counters, self._moves = experts
        self._handover = handover
        self._handed_on: deque[CudaTicket] = deque()  # whose uploads may still be read
        self._copies = stream.beside()
        self._clock = DeviceClock()
        pinned = machine.packed.device.type == "cuda"
        num_buffers, wait = machine.sizes.num_buffers, stream.synchronize
        self._steps = Staging(machine.packed, num_buffers, wait)
        self._entries = Staging(machine.entries, num_buffers, wait)
        self._masks = Staging(machine.sampler.masks.packed, num_buffers, wait)
        self._stagings = {
            UploadKind.ENTRIES: self._entries,
            UploadKind.STEP: self._steps,
            UploadKind.MASKS: self._masks,
        }
        self._results = Results(num_buffers, machine.max_result_ints, pinned)
        self._begin: Mark | None = None  # of a step whose entries went before it
        self._entries_upload = 0

    def spec(self) -> RunnerSpec:
        return self._spec

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._stagings[kind].buffer()

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def enter(self, num_ints: int) -> None:
        self._begin = self._begin or self._stream.mark()
        self._entries_upload = self._entries.upload(num_ints)
        self._machine.enter()

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def forward(self, num_ints: int) -> CudaTicket:
        """Raises ValueError for prompts that cannot be scored, once the step is launched."""
        while self._handed_on and self._is_past(self._handed_on[0]):
            self._read(self._handed_on.popleft())
        ints = self._steps.buffer()[:num_ints]
        header = ints[:HEADER_INTS].tolist()
        # A step begins with the first work that the device gets for it.
        ticket = CudaTicket(ints, header, self._begin or self._stream.mark())
        ticket.entries_upload, self._begin = self._entries_upload, None
        ticket.upload = self._steps.upload(num_ints)
        drafter = self._machine.drafter
        if drafter is not None:
            drafter.draft(ints, header)
        if not header[NUM_ROWS]:
            self._machine.apply()
            return ticket
        ticket.waits = not self._handover.received(header[NUM_TOKENS])
        if not ticket.waits:
            self._launch(ticket)
        return ticket

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def go_on(self, ticket: CudaTicket) -> bool:
        """The device computes, not this thread: whether it has the step by now."""
        if ticket.waits and self._handover.received(ticket.header[NUM_TOKENS]):
            ticket.waits, ticket.begin = False, self._stream.mark()
            self._launch(ticket)
        return not ticket.waits

    def _launch(self, ticket: CudaTicket) -> None:
        header, machine = ticket.header, self._machine
        if self._moves is not None:
            self._moves.step()
        only_decodes = header[NUM_DECODE_ROWS] == header[NUM_ROWS]
        machine.forward(header[NUM_TOKENS], only_decodes)
        ticket.end = self._handover.hand_on(header[NUM_TOKENS])
        if ticket.end is not None:
            self._handed_on.append(ticket)
            return
        if header[NUM_SCORES]:
            ticket.scored = machine.scorer.start(StepUpload.read(ticket.step))
        if header[NUM_POOLS] and machine.pooler is not None:
            ticket.pooled = machine.pooler.start(StepUpload.read(ticket.step))

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def sample(self, ticket: CudaTicket, num_ints: int) -> CudaTicket:
        """Launch the draws and their way to the host."""
        num_samples = ticket.header[NUM_SAMPLES]
        if num_samples:
            if num_ints:
                ticket.mask_upload = self._masks.upload(num_ints)
            result_SW = self._machine.sample(Variant(ticket.header[VARIANT]), num_samples)
            ticket.result_SW = self._results.copy(result_SW)
        else:
            ticket.result_SW = NO_RESULT
        ticket.end = self._stream.mark()
        return ticket

    @fatal_if_the_device_fails
    def result(self, ticket: CudaTicket) -> StepResult:
        step_id = step_id_of(ticket.header)
        if ticket.end is None or ticket.result_SW is None:
            raise RuntimeError(f"step {step_id} has not been sampled")
        waited = not ticket.end.query()
        ticket.end.synchronize()
        self._read(ticket)
        start_s, end_s = self._clock.times_of(ticket.begin, ticket.end, time.monotonic(), waited)
        tokens, finite, logprobs = self._machine.sampler.unpack(ticket.result_SW)
        counts, num_offered = np.ones_like(finite), NO_IDS
        num_found, found_by, drafts = NO_IDS, NO_IDS, NO_DRAFTS
        if self._spec.max_drafts and len(tokens):
            counts, num_offered, num_found, found_by = unpack_drafts(ticket.result_SW)
            if self._spec.num_stages > 1:
                drafts = said_drafts(ticket.result_SW, self._spec.max_drafts)
        scores: dict[int, RowScores] = {}
        if ticket.scored is not None:
            scores = self._machine.scorer.take(ticket.scored)
        embeddings: dict[int, Float32Array] = {}
        if ticket.pooled is not None and self._machine.pooler is not None:
            embeddings = self._machine.pooler.take(ticket.pooled)
        return StepResult(
            step_id=step_id,
            tokens=tokens[:, None],
            n_valid=(finite & counts).astype(np.int32),
            nonfinite=~finite & counts,
            logprobs=logprobs,
            device_start_s=start_s,
            device_end_s=end_s,
            scores=scores,
            embeddings=embeddings,
            num_offered=num_offered,
            num_found=num_found,
            found_by=found_by,
            drafts=drafts,
        )

    def ready(self, ticket: CudaTicket) -> bool:
        return self._is_past(ticket)

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def transfer(self, direction: Direction, pages: PagePairs) -> Mark:
        drafter = self._machine.drafter
        own = None if drafter is None else drafter.sides(direction)
        if own is not None:  # in the order of their stream, so that one end is the end of both
            self._copies.copy_pages(*own, pages)
        return self._copies.copy_pages(*self._cache.sides(direction), pages)

    @fatal_if_the_device_fails
    def transferred(self, ticket: Mark) -> bool:
        return ticket.query()

    def expert_counters(self) -> ExpertCounters | None:
        return self._counters

    def close(self) -> None:
        self._copies.synchronize()
        self._stream.synchronize()
        self._handover.close()

    @staticmethod
    def _is_past(ticket: CudaTicket) -> bool:
        return ticket.end is not None and ticket.end.query()

    def _read(self, ticket: CudaTicket) -> None:
        """Nothing of its uploads is read any more."""
        self._steps.done(ticket.upload)
        self._entries.done(ticket.entries_upload)
        self._masks.done(ticket.mask_upload)
