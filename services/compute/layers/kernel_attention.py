"""Attention of a step by the GPU's kernels: one variant for each kind of step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

import torch
from torch import Tensor

from services.compute.kernels.decode_attention import decode_attention
from services.compute.kernels.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.latent_attention import latent_decode_attention
from services.compute.kernels.latent_chunks import (
    latent_chunk_attention,
    latent_context_attention,
    mark_contexts,
)
from services.compute.kernels.prefill_attention import prefill_attention
from services.compute.kernels.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.span import AttentionSpan
from services.compute.kernels.step_buffers import AttentionCall, StepInputs


class Decode(Protocol):
    def __call__(
        self, call: AttentionCall, work: DecodeWork, num_rows: int, *, pdl: bool
    ) -> None: ...


class Prefill(Protocol):
    def __call__(
        self, call: AttentionCall, inputs: StepInputs, work: PrefillWork, num_tokens: int, /
    ) -> None: ...


class AttentionKernels(NamedTuple):
    """Over one kind of cache entries."""

    decode: Decode
    prefill: Prefill


OVER_KEYS_AND_VALUES = AttentionKernels(decode_attention, prefill_attention)
OVER_LATENTS = AttentionKernels(latent_decode_attention, latent_chunk_attention)


@dataclass(frozen=True, slots=True)
class AttentionTables:
    """What all variants read, and the work lists that they write for themselves."""

    inputs: StepInputs
    decode: Mapping[AttentionSpan, DecodeWork]
    prefill: PrefillWork
    page_tokens: int
    pdl: bool  # dependent launch: begin while the kernel before ends
    kernels: AttentionKernels = OVER_KEYS_AND_VALUES


@dataclass(frozen=True, slots=True)
class OwnChunks:
    """What chunks see of themselves, expanded, and what it needs to become one with the rest."""

    inputs: StepInputs
    work: PrefillWork  # of groups of one head
    own_sums_TH: Tensor
    context_sums_TH: Tensor

    @staticmethod
    def make(inputs: StepInputs, max_rows: int, num_heads: int) -> OwnChunks:
        max_tokens, device = len(inputs.tokens_T), inputs.tokens_T.device
        own, context = torch.zeros(2, max_tokens, num_heads, device=device)
        work = PrefillWork.make(max_tokens, max_rows, 1, device)
        return OwnChunks(inputs, work, own, context)


class KernelAttention(Protocol):
    """`plan` once a step, `attend` once a layer, when the layer's keys are in their pages."""

    @property
    def is_invariant(self) -> bool:
        """Whether one arithmetic serves decode rows and chunks."""
        ...

    @property
    def own_chunks(self) -> OwnChunks | None:
        """What attends to latents of chunks by keys and values made of them; then `attend` does
        only the contexts before them."""
        ...

    def plan(self, num_tokens: int) -> None:
        """Divide the step's work, on the device."""
        ...

    def attend(self, call: AttentionCall) -> None:
        """Write the outputs of all rows of this kind of step."""
        ...


@dataclass(frozen=True, slots=True)
class DecodeAttention:
    """Steps of decode rows alone."""

    tables: AttentionTables
    is_invariant: ClassVar[bool] = False
    own_chunks: ClassVar[None] = None

    def plan(self, num_tokens: int) -> None:
        tables = self.tables
        num_rows = min(num_tokens, len(tables.inputs.row_slot_R))
        for work in tables.decode.values():
            plan_decode(tables.inputs, work, tables.page_tokens, num_rows, pdl=tables.pdl)

    def attend(self, call: AttentionCall) -> None:
        tables = self.tables
        num_rows = min(len(call.q_THD), len(tables.inputs.row_slot_R))
        tables.kernels.decode(call, tables.decode[call.span], num_rows, pdl=tables.pdl)


@dataclass(frozen=True, slots=True)
class PrefillAttention:
    """Prompt chunks; with `all_rows` decode rows too, so that one arithmetic serves all."""

    tables: AttentionTables
    all_rows: bool
    own_chunks: ClassVar[None] = None

    @property
    def is_invariant(self) -> bool:
        return self.all_rows

    def plan(self, num_tokens: int) -> None:
        tables = self.tables
        plan_prefill(tables.inputs, tables.prefill, num_tokens, self.all_rows)

    def attend(self, call: AttentionCall) -> None:
        tables = self.tables
        tables.kernels.prefill(call, tables.inputs, tables.prefill, len(call.q_THD))


@dataclass(frozen=True, slots=True)
class ContextAttention:
    """What lies before prompt chunks, as latents."""

    tables: AttentionTables
    own_chunks: OwnChunks
    is_invariant: ClassVar[bool] = False

    def plan(self, num_tokens: int) -> None:
        inputs, own_chunks = self.tables.inputs, self.own_chunks
        mark_contexts(inputs, own_chunks.context_sums_TH, num_tokens)
        plan_prefill(inputs, own_chunks.work, num_tokens)
        plan_prefill(inputs, self.tables.prefill, num_tokens, after_contexts=True)

    def attend(self, call: AttentionCall) -> None:
        tables, sums_TH = self.tables, self.own_chunks.context_sums_TH
        num_tokens = len(call.q_THD)
        latent_context_attention(call, tables.inputs, tables.prefill, num_tokens, sums_TH)


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decode rows and prompt chunks in one step."""

    parts: tuple[KernelAttention, ...]
    own_chunks: OwnChunks | None = None
    is_invariant: ClassVar[bool] = False

    def plan(self, num_tokens: int) -> None:
        for part in self.parts:
            part.plan(num_tokens)

    def attend(self, call: AttentionCall) -> None:
        for part in self.parts:
            part.attend(call)
