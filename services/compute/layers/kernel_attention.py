"""Attention of a step by the GPU's kernels: one variant for each kind of step."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, NamedTuple, Protocol

from torch import Tensor

from services.compute.kernels.attention.decode_attention import decode_attention
from services.compute.kernels.attention.decode_plan import DecodeWork, plan_decode
from services.compute.kernels.attention.hopper_prefill import chunk_attention
from services.compute.kernels.attention.prefill_plan import PrefillWork, plan_prefill
from services.compute.kernels.mla.hopper_latent_decode import latent_row_attention
from services.compute.kernels.mla.latent_chunks import latent_chunk_attention
from services.compute.kernels.mla.latent_expansion import StepKeys, place_keys
from services.compute.kernels.step.span import AttentionSpan
from services.compute.kernels.step.step_buffers import AttentionCall, StepInputs


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


OVER_KEYS_AND_VALUES = AttentionKernels(decode_attention, chunk_attention)
OVER_LATENTS = AttentionKernels(latent_row_attention, latent_chunk_attention)


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
class ExpandedChunks:
    """Keys and values that are made of latents, and the chunks that see these."""

    inputs: StepInputs
    keys: StepKeys
    work: PrefillWork  # of groups of one head


class KernelAttention(Protocol):
    """`plan` once a step, `attend` once a layer, when the layer's keys are in their pages."""

    @property
    def is_invariant(self) -> bool:
        """Whether one arithmetic serves decode rows and chunks."""
        ...

    @property
    def expanded(self) -> ExpandedChunks | None:
        """Chunks whose latents are made into keys and values; `attend` leaves them out."""
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
    expanded: ClassVar[None] = None

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
    expanded: ClassVar[None] = None

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
class ChunksOverLatents:
    """Prompt chunks for which making keys and values does not pay."""

    tables: AttentionTables
    expanded: ExpandedChunks
    page_table_NL: Tensor  # of the one cache group there is
    is_invariant: ClassVar[bool] = False

    def plan(self, num_tokens: int) -> None:
        tables, keys = self.tables, self.expanded.keys
        inputs, begin_R = tables.inputs, keys.begin_R
        place_keys(inputs, keys, self.page_table_NL, tables.page_tokens, num_tokens)
        plan_prefill(inputs, self.expanded.work, num_tokens, begin_R=begin_R)
        plan_prefill(inputs, tables.prefill, num_tokens, begin_R=begin_R, have_keys=False)

    def attend(self, call: AttentionCall) -> None:
        tables = self.tables
        tables.kernels.prefill(call, tables.inputs, tables.prefill, len(call.q_THD))


@dataclass(frozen=True, slots=True)
class MixedAttention:
    """Decode rows and prompt chunks in one step."""

    parts: tuple[KernelAttention, ...]
    expanded: ExpandedChunks | None = None
    is_invariant: ClassVar[bool] = False

    def plan(self, num_tokens: int) -> None:
        for part in self.parts:
            part.plan(num_tokens)

    def attend(self, call: AttentionCall) -> None:
        for part in self.parts:
            part.attend(call)
