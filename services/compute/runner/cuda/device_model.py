"""A model on the device: its decoder with the products that suit it, and attention by the kind of
step."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple, TypeAlias

import torch
from torch import Tensor

from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.kernels.attention.decode_plan import EXTRA_PROGRAMS, DecodeWork, rows_together
from services.compute.kernels.attention.prefill_plan import PrefillWork
from services.compute.kernels.choices import Choices
from services.compute.kernels.drafts.draft_tokens import DraftRule
from services.compute.kernels.hopper import HOPPER
from services.compute.kernels.linear.hopper_int4_config import Int4Work
from services.compute.kernels.linear.hopper_matmul_config import HopperTiling
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.skinny_matmul_config import fits_device as skinny_fits
from services.compute.kernels.mla.latent_expansion import StepKeys
from services.compute.kernels.mla.latent_tiling import head_tiles, programs_at_once
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.layers.kernel_attention import (
    OVER_KEYS_AND_VALUES,
    OVER_LATENTS,
    AttentionTables,
    ChunksOverLatents,
    DecodeAttention,
    ExpandedChunks,
    KernelAttention,
    MixedAttention,
    PrefillAttention,
)
from services.compute.layers.kernel_context import ONE_CONTEXT, KernelContext
from services.compute.layers.kernel_experts import ExpertProduct
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import CacheLayout
from services.compute.layers.parts import LatentAttention
from services.compute.layers.products import (
    InvariantProduct,
    Product,
    ProductByRows,
    Products,
    SummedProduct,
)
from services.compute.layers.quantized_product import (
    PackedWork,
    QuantizedProduct,
    RowOfNumbers,
    takes_int4,
)
from services.compute.layers.weighted_layers import (
    AnyLinear,
    Linear,
    QuantizedLinear,
    SummedLinear,
)
from services.compute.models.decoder import Decoder
from services.compute.models.kernel_decoder import DeviceProducts, KernelDecoder

Kind: TypeAlias = Literal["decode", "mixed"]

SMALL_WEIGHT_BYTES = 1 << 26
"""Up to here weights that the pass of one token asks for early (dependent launch) are not in the
way: a step of the 1B model took 0.824 ms with it and 0.850 without, one of the 8B model 4.14 and
3.95; in FP8 the products of an 8B layer 62.8 and 64.4 µs, of a 70B layer 224 and 210."""

MAX_KEY_BYTES = 1 << 29
"""Of keys and values that are made of latents, for all that lies before a step's chunks: with 16
heads of 128 there is room for 65,536 positions. What does not fit is attended to as latents."""

DEPENDENT_LAUNCH = True
SKINNY_PRODUCTS = True
"""Turned off by benchmarks alone, to see what they are worth."""


@dataclass(frozen=True, slots=True)
class MachineSizes:
    max_tokens: int
    max_rows: int
    max_positions: int
    page_tokens: int
    layout: CacheLayout
    num_buffers: int  # on the host: for each step in flight, one being written, one being read
    drafts: DraftRule | None = None
    more_rows: int = 0  # of steps of which ranks share the tokens
    token_bytes: int = 0  # of a token's cache entries in one layer


class StepTables(NamedTuple):
    """What a model's passes read: a step's rows, where pages of its first cache group are, and what
    ranks have stored that share the tokens."""

    inputs: StepInputs
    page_table_NL: Tensor
    context: KernelContext = ONE_CONTEXT


class DeviceModel:
    """The weights of a model, and the launches of its passes over the rows in its inputs."""

    def __init__(
        self,
        decoder: Decoder[AnyLinear],
        tables: StepTables,
        sizes: MachineSizes,
        choices: Choices,
        batch_invariant: bool,
        ranks: Ranks = ALONE,
    ) -> None:
        self._inputs, self._page_table_NL, context = tables
        self._sizes = sizes
        self.rows_together = 1  # of a slot, that read its context once
        device = decoder.device
        capability = torch.cuda.get_device_capability(device) if device.type == "cuda" else None
        pdl = DEPENDENT_LAUNCH and capability is not None and capability >= (9, 0)
        products = _products(decoder, choices, batch_invariant, capability, ranks)
        plain = products[Linear]
        experts = ExpertProduct(
            *(plain, choices, self._inputs.counts),
            invariant=batch_invariant,
            pdl=pdl,
            num_segments=NUM_SEGMENTS // ranks.size,
        )
        multiply = DeviceProducts(products, experts, pdl)
        self.decoder = KernelDecoder(
            decoder, self._inputs, multiply, sizes.max_positions, ranks, context
        )
        attention = self._attentions(decoder, batch_invariant, pdl)
        self._attention = {**attention, "mixed": context.shared(attention["mixed"])}

    def forward(self, kind: Kind, num_tokens: int, caches: Sequence[LayerCache]) -> None:
        """Launch the pass over rows of this kind, which leaves hidden states in the decoder."""
        self.decoder.forward(num_tokens, caches, self._attention[kind])

    @torch.inference_mode()
    def logits(self, num_samples: int, *, is_part: bool = False) -> Tensor:
        """Float32 logits [S, V] of the rows that are sampled."""
        index_S = self._inputs.sample_token_S[:num_samples]
        return self.decoder.logits_at(index_S, is_part=is_part)

    def _attentions(
        self, decoder: Decoder[AnyLinear], batch_invariant: bool, pdl: bool
    ) -> dict[Kind, KernelAttention]:
        shape, sizes, device = decoder.shape, self._sizes, decoder.device
        num_heads, num_kv_heads = decoder.mixers[0].num_heads, decoder.mixers[0].num_kv_heads
        kernels, tiles, width = OVER_KEYS_AND_VALUES, num_kv_heads, shape.head_dim
        programs = EXTRA_PROGRAMS
        if shape.latent is not None:
            kernels, width = OVER_LATENTS, shape.latent.latent_dim
            tiles, programs = head_tiles(num_heads), programs_at_once(num_heads)
        group = num_heads // tiles
        if sizes.drafts is not None and shape.latent is None and not batch_invariant:
            self.rows_together = rows_together(group, sizes.drafts.num_drafts)
        decode = DecodeWork.make(
            *(len(self._inputs.row_slot_R), tiles, group, width),
            device=device,
            extra_programs=programs,
            one_wave=shape.latent is not None,
            rows_together=self.rows_together,
        )
        tables = AttentionTables(
            inputs=self._inputs,
            decode={span: decode.for_span(span) for span in dict.fromkeys(sizes.layout.spans)},
            prefill=PrefillWork.make(sizes.max_tokens, len(self._inputs.row_slot_R), group, device),
            page_tokens=sizes.page_tokens,
            pdl=pdl,
            kernels=kernels,
        )
        if batch_invariant:  # one arithmetic for every row, whether it is decoded or recomputed
            uniform = PrefillAttention(tables, all_rows=True)
            return {"decode": uniform, "mixed": uniform}
        rows = DecodeAttention(tables)
        if shape.latent is None:
            chunks = PrefillAttention(tables, all_rows=False)
            return {"decode": rows, "mixed": MixedAttention((rows, chunks))}
        expanded = self._expanded(decoder)
        over_latents = ChunksOverLatents(tables, expanded, self._page_table_NL)
        return {"decode": rows, "mixed": MixedAttention((rows, over_latents), expanded)}

    def _expanded(self, decoder: Decoder[AnyLinear]) -> ExpandedChunks:
        mixer, sizes, device = decoder.mixers[0], self._sizes, decoder.device
        assert isinstance(mixer, LatentAttention)
        room = MAX_KEY_BYTES // (mixer.up_HXR[:, :, 0].numel() * decoder.dtype.itemsize)
        num_contexts = min(room, sizes.max_rows * sizes.max_positions)
        keys = StepKeys.make(self._inputs, num_contexts, mixer.up_HXR, mixer.rope.head_dim)
        work = PrefillWork.make(sizes.max_tokens, len(self._inputs.row_slot_R), 1, device)
        return ExpandedChunks(self._inputs, keys, work)


def _products(
    decoder: Decoder[AnyLinear],
    choices: Choices,
    batch_invariant: bool,
    capability: tuple[int, int] | None,
    ranks: Ranks,
) -> Products:
    shape = decoder.shape
    pdl = DEPENDENT_LAUNCH and capability is not None and capability >= (9, 0)
    num_inner = shape.hidden_size * shape.intermediate_size // ranks.size
    hopper = HopperTiling.of(decoder.device) if capability == HOPPER else None
    plain: Product[Linear] = InvariantProduct(ranks.size, hopper)
    row: RowOfNumbers | None = None
    work = SkinnyWork.make(_widest_output(decoder), decoder.device)
    if not batch_invariant:
        suits = SKINNY_PRODUCTS and (capability is None or skinny_fits(capability))
        row_pdl = pdl and 2 * num_inner <= SMALL_WEIGHT_BYTES
        plain = ProductByRows(work if suits else None, pdl, row_pdl, choices, hopper)
        row = RowOfNumbers(pdl=pdl and num_inner <= SMALL_WEIGHT_BYTES)
    can_int4 = capability == HOPPER and decoder.dtype.itemsize == 2 and not batch_invariant
    has_int4 = can_int4 and any(takes_int4(linear) for linear in decoder.linears)
    int4 = Int4Work.make(decoder.device) if has_int4 else None
    packed = PackedWork(work, _unpacking_room(decoder), int4)
    quantized = QuantizedProduct(plain, packed, row, pdl=pdl, choices=choices)
    return {
        Linear: plain,
        SummedLinear: SummedProduct(work),
        QuantizedLinear: quantized,
    }


def _widest_output(decoder: Decoder[AnyLinear]) -> int:
    return max(linear.num_out for linear in decoder.linears)


def _unpacking_room(decoder: Decoder[AnyLinear]) -> Tensor:
    """Memory for the largest of the weights that are there in fewer bits only."""
    sizes = (
        num_out * num_in
        for linear in decoder.linears
        if isinstance(linear, QuantizedLinear) and linear.dense_OI is None
        for num_out, num_in in [linear.weight.shape]
    )
    return torch.empty(max(sizes, default=0), dtype=decoder.dtype, device=decoder.device)
