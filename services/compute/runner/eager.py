"""The eager runner: step plans as plain torch operations on the CPU, done before a call returns.

It knows slots, pages and rows; requests, prefixes and queues are the scheduler's.

Shape legend: R rows, T tokens, S samples, P scored positions, N slots, E hidden width, G cache
groups, L pages of a sequence.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from common.model_folder import Pooling
from services.compute.config import ComputeSettings
from services.compute.layers.eager_attention import (
    EagerAttention,
    Geometry,
    Workspace,
    plan_attention,
)
from services.compute.layers.weighted_layers import Linear, LinearMap, PackedLinear, can_pack
from services.compute.models.builder import MakeLinear
from services.compute.models.eager_decoder import EagerDecoder
from services.compute.runner.device_errors import fatal_if_the_device_fails, place_all
from services.compute.runner.model_loader import (
    Limits,
    ModelLoader,
    choose_threads,
    cpu_room_bytes,
    prepare_cpu,
)
from services.compute.runner.pooling import embedding_of, pooled_tokens
from services.compute.runner.protocol import RunnerSpec, check_tokens
from services.compute.sampling.logprobs import score_prompt
from services.compute.sampling.sampler import Sampled, Sampler
from services.compute.step import (
    DEVICE_TOKEN,
    Float32Array,
    RowScores,
    StepPlan,
    StepResult,
    TokenMasks,
)

TOKENS_AT_ONCE = 512  # normalised for a mean


class EagerPooler:
    """Sums of hidden states by slot, until the last chunk of a prompt is added."""

    def __init__(self, pooling: Pooling, num_slots: int, hidden_size: int) -> None:
        self._pooling = pooling
        self._sum_NE = torch.zeros(num_slots, hidden_size)

    def take(
        self, plan: StepPlan, x_TE: Tensor, normed: Callable[[Tensor], Tensor]
    ) -> dict[int, Float32Array]:
        """Add a step's hidden states; returns the embeddings that are complete, by row."""
        embeddings = {}
        for part in pooled_tokens(plan, self._pooling):
            sum_E = self._sum_NE[part.slot]
            if part.begins:
                sum_E.zero_()
            end = part.first + part.num_tokens
            for first in range(part.first, end, TOKENS_AT_ONCE):
                some_TE = normed(x_TE[first : min(first + TOKENS_AT_ONCE, end)])
                sum_E += some_TE.float().sum(dim=0)
            if part.ends:
                embeddings[part.row] = embedding_of(sum_E.numpy(), part.total, self._pooling)
        return embeddings


CPU = torch.device("cpu")
STALL_AFTER_S = 60.0


@dataclass(slots=True)
class EagerTicket:
    """One step: its logits, scores and embeddings, then its samples."""

    plan: StepPlan
    start_s: float
    logits_SV: Tensor
    scores: dict[int, RowScores]
    embeddings: dict[int, Float32Array]
    sampled: Sampled | None = None
    end_s: float = 0.0


class EagerRunner:
    """Runs step plans one after the other in the order given."""

    def __init__(self, loader: ModelLoader, model: EagerDecoder, limits: Limits) -> None:
        settings, shape, pooling = loader.settings, loader.config.shape, loader.pooling
        self._model = model
        self._cache = loader.cache(limits.num_pages, limits.num_host_pages)
        self._workspace = Workspace(loader.dtype)
        self._geometry = Geometry(
            shape.num_kv_heads,
            self._cache.page_heads,
            settings.page_tokens,
            shape.layer_cache_bytes(settings.page_tokens, loader.dtype.itemsize),
        )
        self._windows = loader.layout.windows
        self._sampler = Sampler(settings.max_num_seqs, shape.vocab_size)
        self._pools: EagerPooler | None = None
        if pooling is not None:
            self._pools = EagerPooler(pooling, settings.max_num_seqs, shape.hidden_size)
        pages_per_slot = -(-limits.max_model_len // settings.page_tokens)
        tables = len(self._windows), settings.max_num_seqs, pages_per_slot
        self._tables_GNL = np.zeros(tables, dtype=np.int64)
        self._last_token = torch.zeros(settings.max_num_seqs, dtype=torch.int64)
        self._spec = loader.spec(limits, model.has_head, STALL_AFTER_S, overlaps=False)

    @staticmethod
    @torch.inference_mode()
    def load(path: Path, settings: ComputeSettings) -> EagerRunner:
        loader = ModelLoader.read(path, settings, CPU)
        prepare_cpu(choose_threads(settings, loader.config.shape, loader.dtype))
        make_linear: MakeLinear[LinearMap] = PackedLinear if can_pack(loader.dtype, CPU) else Linear
        model = EagerDecoder(loader.decoder(make_linear), loader.max_positions)
        runner = EagerRunner(loader, model, loader.limits(cpu_room_bytes))
        if settings.warmup:
            runner.warm_up()
        return runner

    def spec(self) -> RunnerSpec:
        return self._spec

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def forward(self, plan: StepPlan) -> EagerTicket:
        """Apply transfers and deltas, and compute the logits of the plan's samples.

        Raises ValueError for a token id outside the vocabulary, once the deltas are applied.
        """
        start_s = time.monotonic()
        place_all(self._sampler.place, plan.slots)
        self._cache.swap_out(plan.swap_out)
        self._cache.swap_in(plan.swap_in)
        groups = plan.page_group if len(plan.page_group) else 0
        self._tables_GNL[groups, plan.page_slot, plan.page_index] = plan.page_id
        tokens_T = self._tokens(plan)
        q_len = plan.q_len.astype(np.int64)
        q_start = plan.q_start.astype(np.int64)
        num_pages = -(-int((q_start + q_len).max(initial=0)) // self._geometry.page_tokens)
        tables_GRL = self._tables_GNL[:, :, :num_pages][:, plan.row_slot]
        works = tuple(
            plan_attention(q_start, q_len, tables, plan.num_decode_rows, self._geometry, window)
            for tables, window in zip(tables_GRL, self._windows, strict=True)
        )
        attention = EagerAttention(self._cache, works, self._workspace)
        x_TE = self._model.forward(tokens_T, attention)
        scores = self._score(plan, x_TE) if plan.scores else {}
        embeddings: dict[int, Float32Array] = {}
        if plan.pools and self._pools is not None:
            embeddings = self._pools.take(plan, x_TE, self._model.normed)
        last = np.cumsum(q_len)[plan.sample_row] - 1
        if not np.array_equal(last, np.arange(plan.num_tokens)):
            x_TE = x_TE.index_select(0, torch.from_numpy(last))
        return EagerTicket(plan, start_s, self._model.logits(x_TE), scores, embeddings)

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def sample(self, ticket: EagerTicket, masks: TokenMasks | None = None) -> EagerTicket:
        plan = ticket.plan
        slots = plan.row_slot[plan.sample_row].astype(np.int64)
        sampled = self._sampler.sample(
            ticket.logits_SV, slots, plan.sample_index.astype(np.int64), masks
        )
        self._last_token.index_copy_(0, torch.from_numpy(slots), sampled.tokens_S)
        ticket.sampled = sampled
        ticket.end_s = time.monotonic()
        return ticket

    @fatal_if_the_device_fails
    def result(self, ticket: EagerTicket) -> StepResult:
        sampled = ticket.sampled
        if sampled is None:
            raise RuntimeError(f"step {ticket.plan.step_id} has not been sampled")
        finite = sampled.finite_S.numpy()
        return StepResult(
            step_id=ticket.plan.step_id,
            tokens=sampled.tokens_S.numpy().astype(np.int32)[:, None],
            n_valid=finite.astype(np.int32),
            nonfinite=~finite,
            logprobs=sampled.logprobs,
            device_start_s=ticket.start_s,
            device_end_s=ticket.end_s,
            scores=ticket.scores,
            embeddings=ticket.embeddings,
        )

    def ready(self, ticket: EagerTicket) -> bool:
        return ticket.sampled is not None

    def close(self) -> None:
        pass

    def warm_up(self) -> None:
        """Run a prefill and a decode of one sequence, so that no request pays for first calls."""
        num_tokens = min(64, self._spec.max_model_len - 1)
        for step in _warm_up_plans(num_tokens) if num_tokens > 0 else ():
            self.result(self.sample(self.forward(step)))

    def _score(self, plan: StepPlan, x_TE: Tensor) -> dict[int, RowScores]:
        """Scores by row: of each row's first positions, as many as it has targets."""
        first_R = np.cumsum(plan.q_len) - plan.q_len
        scores = {}
        for score in plan.scores:
            first = int(first_R[score.row])
            x_PE = x_TE[first : first + len(score.targets)]
            scores[score.row] = score_prompt(x_PE, score.targets, score.num_top, self._model.logits)
        return scores

    def _tokens(self, plan: StepPlan) -> Tensor:
        """Input ids [T]: the plan's, or the slot's last sampled token where it leaves that open."""
        check_tokens(plan, self._spec.vocab_size)
        ids = plan.tokens.astype(np.int64)
        from_device = np.nonzero(ids == DEVICE_TOKEN)[0]
        ids[from_device] = 0
        tokens_T = torch.from_numpy(ids)
        if len(from_device):
            row_of_token = np.repeat(np.arange(plan.num_rows), plan.q_len)
            slots = plan.row_slot[row_of_token[from_device]].astype(np.int64)
            last = self._last_token.index_select(0, torch.from_numpy(slots))
            if len(from_device) == len(ids):
                return last
            tokens_T.index_copy_(0, torch.from_numpy(from_device), last)
        return tokens_T


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
