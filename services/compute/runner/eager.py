"""The eager executor: uploads as plain torch operations on the CPU, done before a call returns.

It knows slots, pages and rows; requests, prefixes and queues are the scheduler's.

Shape legend: R rows, T tokens, S samples, P scored positions, N slots, E hidden width, G cache
groups, L pages of a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Generator
from dataclasses import dataclass, field
from math import inf
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from services.compute.config import ComputeSettings
from services.compute.distributed.context import ALL_HERE, DealtTokens
from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.distributed.stages import ONE_STAGE, Stages
from services.compute.expert_counters import ExpertCounters, HostCounters
from services.compute.kernels.sampling.slot_entries import packed_size as entries_size
from services.compute.kernels.step.step_buffers import (
    GROUP_SHIFT,
    NUM_DECODE_ROWS,
    NUM_OWN,
    NUM_ROWS,
)
from services.compute.kv.transfer import Direction, PagePairs
from services.compute.layers.cpu_operations import EAGER, CpuOperations, operations_for
from services.compute.layers.eager_attention import Geometry
from services.compute.layers.paged_cache import copy_pages
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.runner.device_errors import fatal_if_the_device_fails
from services.compute.runner.eager_drafters import DrafterMaker, Host, load_drafter
from services.compute.runner.eager_drafting import NOT_LOOKED, EagerDrafting, Found
from services.compute.runner.eager_pooler import EagerPooler
from services.compute.runner.executor import Executor, UploadKind
from services.compute.runner.model_loader import (
    Limits,
    ModelLoader,
    choose_threads,
    cpu_room_bytes,
    has_room_for_dense,
    keep_freed_memory,
)
from services.compute.runner.packing_runner import PackingRunner
from services.compute.runner.protocol import RunnerSpec
from services.compute.runner.slot_states import NO_ROWS, Rows, SlotStates
from services.compute.runner.stage_states import StageStates
from services.compute.runner.uploads import (
    MAX_PAGE_ENTRIES,
    NUM_POOLS,
    NUM_SCORES,
    StepUpload,
    masks_size,
    packed_size,
    read_masks,
)
from services.compute.sampling.logprobs import score_prompt
from services.compute.sampling.sampler import DraftRows, Sampled, Sampler
from services.compute.step import (
    NO_IDS,
    BoolArray,
    Float32Array,
    Int32Array,
    RowScores,
    ScoreRow,
    StepPlan,
    StepResult,
    mask_words,
)

CPU = torch.device("cpu")
STALL_AFTER_S = 20.0  # between two pauses of a step, unless it has taken more for a tenth of that
SLICE_S = 0.05  # of computing without a pause, or one layer if that takes longer


@dataclass(slots=True)
class EagerTicket:
    """One step: what is left to compute, its logits, scores and embeddings, then its samples."""

    step_id: int
    start_s: float
    rows: Rows
    logits_SV: Tensor
    work: Generator[bool, None, None] | None = None
    scores: dict[int, RowScores] = field(default_factory=dict)
    embeddings: dict[int, Float32Array] = field(default_factory=dict)
    sampled: Sampled | None = None
    accepted_S: BoolArray | None = None  # of a step with drafts
    found: Found = NOT_LOOKED
    end_s: float = 0.0
    computed_s: float = 0.0  # by this thread's own clock


class EagerExecutor:
    """Executes uploads one after the other in the order given."""

    def __init__(
        self,
        loader: ModelLoader,
        model: EagerDecoder,
        limits: Limits,
        make_drafter: DrafterMaker | None = None,
        operations: CpuOperations = EAGER,
    ) -> None:
        settings, shape, pooling = loader.settings, loader.config.shape, loader.pooling
        self._model = model
        self._ranks, self._stages, self._shard = loader.ranks, loader.stages, loader.shard
        self._context = loader.context
        self._cache = loader.cache(limits.num_pages, limits.num_host_pages)
        self._geometry = Geometry(
            settings.page_tokens,
            shape.layer_cache_bytes(settings.page_tokens, loader.dtype.itemsize)
            * len(loader.heads.kv)
            // shape.num_kv_heads,
        )
        self._attentions = operations.make_attentions(self._cache, self._geometry)
        seen = loader.head.seen_layers(shape.num_layers) if loader.head else ()
        own = loader.shard.layers(shape.num_layers)
        about = own, seen, shape.hidden_size, loader.dtype
        self._between = StageStates(loader.stages, *about)
        self._spans = loader.layout.spans
        rejects = loader.drafts is not None and loader.drafts.rejects
        self._sampler = Sampler(settings.max_num_seqs, shape.vocab_size, rejects)
        self._pools: EagerPooler | None = None
        if pooling is not None:
            self._pools = EagerPooler(pooling, settings.max_num_seqs, shape.hidden_size)
        pages_per_slot = -(-limits.max_model_len // settings.page_tokens)
        tables = len(self._spans), settings.max_num_seqs, pages_per_slot
        self._tables_GNL = np.zeros(tables, dtype=np.int64)
        counts = {layer: tokens_X.numpy() for layer, tokens_X in model.expert_tokens.items()}
        self._counters = HostCounters(counts) if counts else None
        self._spec = spec = loader.spec(limits, model.has_head, STALL_AFTER_S, overlaps=False)
        self._states = SlotStates(settings.max_num_seqs, spec.max_drafts)
        self._drafting: EagerDrafting | None = None
        if loader.drafts is not None and make_drafter is not None:
            host = Host(spec, self._sampler, self._tables_GNL, self._spans)
            # of either kind of ranks each has a drafter
            ranks = loader.ranks if loader.context.size == 1 else loader.context
            more = spec.num_stages, ranks, host.room
            self._drafting = EagerDrafting(loader.drafts, make_drafter(host), *more)
        rows = spec.max_num_seqs
        sizes = {
            UploadKind.ENTRIES: entries_size(loader.max_positions),
            UploadKind.STEP: packed_size(rows, spec.max_step_tokens, MAX_PAGE_ENTRIES, rows),
            UploadKind.MASKS: masks_size(rows, mask_words(shape.vocab_size)),
        }
        self._buffers = {kind: np.zeros(size, dtype=np.int32) for kind, size in sizes.items()}

    def spec(self) -> RunnerSpec:
        return self._spec

    def buffer(self, kind: UploadKind) -> Int32Array:
        return self._buffers[kind]

    def enter(self, num_ints: int) -> None:
        packed = self._buffers[UploadKind.ENTRIES][:num_ints]
        self._sampler.enter(packed)
        if self._drafting is not None:
            self._drafting.enter(packed)

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def forward(self, num_ints: int) -> EagerTicket:
        start_s = time.monotonic()
        step = StepUpload.read(self._buffers[UploadKind.STEP][:num_ints])
        self._apply(step)
        no_logits = torch.zeros(0, self._spec.vocab_size)
        if not step.header[NUM_ROWS]:
            return EagerTicket(step.step_id, start_s, NO_ROWS, no_logits)
        rows = self._states.unpack(step)
        ticket = EagerTicket(step.step_id, start_s, rows, no_logits)
        ticket.work = self._compute(ticket, step)
        return ticket

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def go_on(self, ticket: EagerTicket) -> bool:
        began_s = time.thread_time()
        is_done = self._go_on(ticket, time.monotonic() + SLICE_S)
        ticket.computed_s += time.thread_time() - began_s
        return is_done

    def _go_on(self, ticket: EagerTicket, until_s: float) -> bool:
        for computes in ticket.work or ():
            if not computes or time.monotonic() >= until_s:
                return False
        ticket.work = None
        return True

    def _compute(self, ticket: EagerTicket, step: StepUpload) -> Generator[bool, None, None]:
        """The forward pass; pauses where the loop may turn, which takes a layer at most, and says
        whether there is anything to compute yet."""
        rows, num_decodes = ticket.rows, step.header[NUM_DECODE_ROWS]
        num_own = step.header[NUM_OWN]
        tokens = DealtTokens(self._context, num_own) if num_own else ALL_HERE
        if self._drafting is not None:
            rows = yield from self._drafting.complete(self._states, rows, num_decodes, tokens)
            ticket.rows = rows
        q_start, q_len = rows.q_start_R, rows.q_len_R
        num_pages = -(-int((q_start + q_len).max()) // self._geometry.page_tokens)
        tables_GRL = self._tables_GNL[:, :, :num_pages][:, rows.slots_R]
        attention = self._attentions(q_start, q_len, tables_GRL, num_decodes, tokens)
        tokens_T, seen, before_TE = torch.from_numpy(rows.tokens_T), self._between.watch(), None
        if not self._shard.is_first:
            before_TE = yield from self._between.received(len(tokens_T), seen)
        x_TE = yield from self._model.forward(tokens_T, attention, before_TE, seen)
        if not self._shard.is_last:
            self._between.send(x_TE, seen)
            return
        if step.header[NUM_SCORES]:
            for score in step.scores():
                ticket.scores[score.row] = self._score(step, x_TE, score)
                yield True
        if step.header[NUM_POOLS] and self._pools is not None:
            ticket.embeddings = self._pools.take(step, x_TE, self._model.normed)
        last = np.cumsum(q_len)[rows.sample_row_S] - 1
        if not np.array_equal(last, np.arange(len(rows.tokens_T))):
            x_TE = x_TE.index_select(0, torch.from_numpy(last))
        ticket.logits_SV = self._model.logits(x_TE)
        if self._drafting is not None and seen is not None:
            yield from self._drafting.observe(rows, num_decodes, seen)

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def sample(self, ticket: EagerTicket, num_ints: int) -> EagerTicket:
        slots, masks, began_s = ticket.rows.slot_S, None, time.thread_time()
        while not self._go_on(ticket, inf):
            pass
        if num_ints:
            spec, packed = self._spec, self._buffers[UploadKind.MASKS][:num_ints]
            masks = read_masks(packed, spec.max_num_seqs, mask_words(spec.vocab_size))
        rows = ticket.rows
        drafts = DraftRows(rows.number_S, rows.draft_S) if rows.has_drafts else None
        sampled = self._sampler.sample(ticket.logits_SV, slots, rows.index_S, masks, drafts)
        tokens = sampled.tokens_S.numpy()
        counts = np.ones(len(slots), dtype=np.bool_)
        if self._drafting is not None and rows.has_drafts:
            ticket.accepted_S = self._drafting.accepted(rows, tokens)
            counts = ticket.accepted_S.copy()
        if masks is not None:
            counts[list(masks.skipped)] = False
        self._states.advance(slots[counts], tokens[counts])
        if drafts is not None:
            self._sampler.count(slots[counts], tokens[counts])
        if self._drafting is not None:
            ticket.found = self._drafting.draft(self._states, slots, tokens, counts)
        ticket.sampled = sampled
        ticket.end_s = time.monotonic()
        ticket.computed_s += time.thread_time() - began_s
        return ticket

    @fatal_if_the_device_fails
    def result(self, ticket: EagerTicket) -> StepResult:
        sampled = ticket.sampled
        if sampled is None:
            raise RuntimeError(f"step {ticket.step_id} has not been sampled")
        finite = sampled.finite_S.numpy()
        counts, num_offered = np.ones_like(finite), NO_IDS
        if ticket.accepted_S is not None:
            counts, num_offered = ticket.accepted_S, ticket.rows.num_offered_S
        return StepResult(
            step_id=ticket.step_id,
            tokens=sampled.tokens_S.numpy().astype(np.int32)[:, None],
            n_valid=(finite & counts).astype(np.int32),
            nonfinite=~finite & counts,
            logprobs=sampled.logprobs,
            device_start_s=ticket.start_s,
            device_end_s=ticket.end_s,
            computed_s=ticket.computed_s,
            scores=ticket.scores,
            embeddings=ticket.embeddings,
            num_offered=num_offered,
            num_found=ticket.found.num_S,
            found_by=ticket.found.by_S,
            drafts=ticket.found.drafts_SK,
        )

    def ready(self, ticket: EagerTicket) -> bool:
        return ticket.sampled is not None

    @torch.inference_mode()
    def transfer(self, direction: Direction, pages: PagePairs) -> None:
        """Copy at once: the ticket is ready when this returns."""
        copy_pages(*self._cache.sides(direction), pages)
        if self._drafting is not None:
            self._drafting.transfer(direction, pages)

    def transferred(self, ticket: None) -> bool:
        return True

    def expert_counters(self) -> ExpertCounters | None:
        return self._counters

    def close(self) -> None:
        self._ranks.close()
        self._context.close()
        self._stages.close()

    def _apply(self, step: StepUpload) -> None:
        """Change slots and tables as the step says."""
        self._sampler.take(step.slot_rows())
        if self._drafting is not None:
            self._drafting.follow(step)
        page_slot = step.section("page_slot")
        groups, slots = page_slot >> GROUP_SHIFT, page_slot & ((1 << GROUP_SHIFT) - 1)
        self._tables_GNL[groups, slots, step.section("page_index")] = step.section("page_id")

    def _score(self, step: StepUpload, x_TE: Tensor, score: ScoreRow) -> RowScores:
        """Scores of a row's first positions, as many as it has targets."""
        first = step.chunk(score.row).first
        x_PE = x_TE[first : first + len(score.targets)]
        return score_prompt(x_PE, score.targets, score.num_top, self._model.logits)


@torch.inference_mode()
def load_eager(
    path: Path, settings: ComputeSettings, ranks: Ranks = ALONE, stages: Stages = ONE_STAGE
) -> EagerExecutor:
    """Load a model onto the CPU, or a rank's or a stage's part of it, and run it once, if the
    settings say so.

    Every rank and every stage does the same.
    """
    settings.check_exchange(on_gpus=False)
    loader = ModelLoader.read(path, settings, CPU, ranks, stages)
    shape, num_processes = loader.config.shape, ranks.size * stages.num_here
    split, context = loader.ranks, loader.context
    torch.set_num_threads(choose_threads(settings, shape, loader.dtype, num_processes))
    keep_freed_memory(False)
    operations = operations_for(loader.dtype)
    make_linear = operations.make_linears(loader.dtype, has_room_for_dense(shape))
    decoder = loader.decoder(make_linear)
    model = EagerDecoder(decoder, loader.max_positions, split, context, operations.make_steps())
    make_drafter = load_drafter(loader, model.ends)
    keep_freed_memory(True)
    limits = loader.limits(lambda: cpu_room_bytes(num_processes))
    executor = EagerExecutor(loader, model, limits, make_drafter, operations)
    if settings.warmup:
        warm_up(executor, samples=loader.shard.is_last)
    return executor


def warm_up(executor: Executor, samples: bool) -> None:
    """Run a prefill and a decode of one sequence, so that no request pays for first calls."""
    runner = PackingRunner(executor)
    num_tokens = min(64, runner.spec().max_model_len - 1)
    for step in _warm_up_plans(num_tokens) if num_tokens > 0 else ():
        ticket = runner.forward(step)
        while not runner.go_on(ticket):
            pass
        if samples:
            runner.result(runner.sample(ticket))


def _warm_up_plans(num_tokens: int) -> tuple[StepPlan, StepPlan]:
    def plan(step_id: int, start: int, count: int) -> StepPlan:
        def one(value: int) -> npt.NDArray[np.int32]:
            return np.array([value], dtype=np.int32)

        none = np.zeros(0, dtype=np.int32)
        return StepPlan(
            step_id=step_id,
            num_decode_rows=1 if count == 1 else 0,
            row_slot=one(0),
            row_epoch=one(0),
            q_start=one(start),
            q_len=one(count),
            pos_upper=one(start + count),
            tokens=np.zeros(count, dtype=np.int32),
            sample_row=one(0),
            sample_index=one(0),
            page_slot=none,
            page_index=none,
            page_id=none,
        )

    return plan(0, 0, num_tokens), plan(1, num_tokens, 1)
