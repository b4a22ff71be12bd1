"""The device's side of all steps: buffers, work lists and the launches that turn an upload into
a result.

Two launches a step: the forward pass by kind and number of tokens, sampling by variant and number
of samples. Each is recorded for some sizes (buckets), and a step runs in the smallest that holds
it. They are finer where a step is short and padding would show: cuBLAS rounds to 64 or 128 rows
anyway.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, TypeAlias

import torch
from torch import Tensor

from common.model_folder import Pooling
from services.compute.distributed.ranks import ALONE, Ranks
from services.compute.kernels.choices import MAX_ROWS, MIN_ROWS, Asked, Choices
from services.compute.kernels.decode_plan import EXTRA_PROGRAMS, DecodeWork
from services.compute.kernels.draft_tokens import DraftRule, SlotTexts
from services.compute.kernels.latent_expansion import StepKeys
from services.compute.kernels.latent_tiling import head_tiles, programs_at_once
from services.compute.kernels.prefill_plan import PrefillWork
from services.compute.kernels.skinny_matmul_config import SkinnyWork
from services.compute.kernels.skinny_matmul_config import fits_device as skinny_fits
from services.compute.kernels.slot_entries import packed_size as entries_size
from services.compute.kernels.slot_words import NUM_WORDS
from services.compute.kernels.step_buffers import Resident, StepInputs
from services.compute.kernels.step_deltas import apply_deltas
from services.compute.kernels.step_input import unpack_step
from services.compute.kernels.tree_sum import NUM_SEGMENTS
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
from services.compute.layers.kernel_experts import ExpertProduct
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.parts import LatentAttention
from services.compute.layers.products import (
    InvariantProduct,
    Product,
    ProductByRows,
    Products,
    SummedProduct,
)
from services.compute.layers.quantized_product import ROW_LIMITS, QuantizedProduct, RowOfNumbers
from services.compute.layers.weighted_layers import (
    AnyLinear,
    Linear,
    QuantizedLinear,
    SummedLinear,
)
from services.compute.models.decoder import Decoder
from services.compute.models.kernel_decoder import DeviceProducts, KernelDecoder
from services.compute.runner.cuda.pooler import Pooler
from services.compute.runner.cuda.prompt_scorer import PromptScorer
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.runner.uploads import MAX_PAGE_ENTRIES, packed_size
from services.compute.sampling.device_sampler import DeviceDrafts, DeviceSampler
from services.compute.sampling.slots import Variant

ROW_STEPS = ((8, 0), (64, 8), (256, 16), (512, 32), (1 << 30, 64))
TOKEN_STEPS = ((128, 16), (512, 32), (1024, 64), (2048, 128), (4096, 256), (1 << 30, 512))
"""(up to this size, by this much); 0 doubles."""


def row_buckets(max_rows: int) -> tuple[int, ...]:
    """Sizes of steps of decode rows, and of sampling: 1, 2, 4, 8, 16, 24 … max_rows."""
    return _ladder(1, max_rows, ROW_STEPS)


def token_buckets(max_tokens: int) -> tuple[int, ...]:
    """Sizes of steps with prompt chunks: 16, 32, 48 … max_tokens."""
    return _ladder(16, max_tokens, TOKEN_STEPS)


def bucket_of(size: int, buckets: tuple[int, ...]) -> int:
    """The smallest bucket that holds so many; ValueError if none does."""
    index = bisect_left(buckets, size)
    if index == len(buckets):
        raise ValueError(f"{size} is more than the largest captured size, {buckets[-1]}")
    return buckets[index]


def _ladder(first: int, last: int, steps: tuple[tuple[int, int], ...]) -> tuple[int, ...]:
    sizes = []
    size = first
    while size < last:
        sizes.append(size)
        step = next(step for limit, step in steps if size < limit)
        size += step or size
    return (*sizes, last)


Kind: TypeAlias = Literal["decode", "mixed"]
Launch: TypeAlias = tuple[tuple[object, ...], Callable[[], None]]

APPLY = ("apply",)
ENTER = ("enter",)

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


class StepMachine:
    """Made once; KV pages come later, when it is known how much memory the rest takes."""

    def __init__(
        self,
        decoder: Decoder[AnyLinear],
        sizes: MachineSizes,
        stream: DeviceStream,
        batch_invariant: bool,
        pooling: Pooling | None = None,
        ranks: Ranks = ALONE,
    ) -> None:
        shape, device = decoder.shape, decoder.device
        self.sizes = sizes
        self.choices = Choices()
        self._stream = stream
        self._row_buckets = row_buckets(sizes.max_rows)
        self._token_buckets = token_buckets(sizes.max_tokens)
        max_pages = -(-sizes.max_positions // sizes.page_tokens)
        num_groups = len(sizes.layout.spans)
        self.inputs = StepInputs.make(sizes.max_tokens, sizes.max_rows, device, num_groups)
        num_drafts = 0 if sizes.drafts is None else sizes.drafts.num_drafts
        self.resident = Resident.make(
            sizes.max_rows, max_pages, NUM_WORDS, device, num_groups, num_drafts
        )
        upload_ints = packed_size(
            sizes.max_rows, sizes.max_tokens, MAX_PAGE_ENTRIES, sizes.max_rows
        )
        self.packed = torch.zeros(upload_ints, dtype=torch.int32, device=device)
        self.entries = torch.zeros(
            entries_size(sizes.max_positions), dtype=torch.int32, device=device
        )
        drafts: DeviceDrafts | None = None
        if sizes.drafts is not None:
            texts = SlotTexts.make(sizes.max_rows, sizes.max_positions, device)
            drafts = DeviceDrafts(sizes.drafts, texts)
        self.sampler = DeviceSampler(shape.vocab_size, self.resident, self.inputs, drafts)
        on_gpu = device.type == "cuda"
        capability = torch.cuda.get_device_capability(device) if on_gpu else None
        pdl = DEPENDENT_LAUNCH and capability is not None and capability >= (9, 0)
        num_inner = shape.hidden_size * shape.intermediate_size // ranks.size
        plain: Product[Linear] = InvariantProduct(ranks.size)
        row: RowOfNumbers | None = None
        work = SkinnyWork.make(_widest_output(decoder), device)
        if not batch_invariant:
            suits = SKINNY_PRODUCTS and (capability is None or skinny_fits(capability))
            row_pdl = pdl and 2 * num_inner <= SMALL_WEIGHT_BYTES
            plain = ProductByRows(work if suits else None, pdl, row_pdl, choices=self.choices)
            row = RowOfNumbers(pdl=pdl and num_inner <= SMALL_WEIGHT_BYTES)
        room = _unpacking_room(decoder)
        quantized = QuantizedProduct(plain, work, room, row, pdl=pdl, choices=self.choices)
        products: Products = {
            Linear: plain,
            SummedLinear: SummedProduct(work),
            QuantizedLinear: quantized,
        }
        experts = ExpertProduct(
            *(plain, self.choices, self.inputs.counts),
            invariant=batch_invariant,
            pdl=pdl,
            num_segments=NUM_SEGMENTS // ranks.size,
        )
        multiply = DeviceProducts(products, experts)
        self._decoder = KernelDecoder(
            decoder, self.inputs, multiply, sizes.max_positions, pdl, ranks
        )
        self.scorer = PromptScorer(self._decoder, sizes.num_buffers, stream)
        self.pooler: Pooler | None = None
        if pooling is not None and decoder.is_last:
            self.pooler = Pooler(self._decoder, pooling, sizes.num_buffers, stream)
        self._attention = self._attentions(decoder, batch_invariant, pdl)

    @property
    def num_launches(self) -> int:
        num_passes = len(self._row_buckets) + len(self._token_buckets)
        if not self._decoder.is_last:
            return 2 + num_passes
        by_size = num_passes + len(self._row_buckets) * len(Variant)
        return by_size + 3 + (self.pooler is not None)

    @property
    def hidden_TE(self) -> Tensor:
        """Where a stage finds what the one before has made of a step, and leaves its own."""
        return self._decoder.hidden_TE

    @property
    def max_result_ints(self) -> int:
        return max(self.sampler.result(variant).numel() for variant in Variant)

    def record(self, cache: PagedCache) -> Iterator[int]:
        """Record all launches, largest first, on these pages."""
        for number, (name, launch) in enumerate(self._launches(cache), 1):
            self._stream.record(name, launch)
            yield number

    def record_largest(self, cache: PagedCache) -> None:
        """Run and record one launch of each form: the most memory any needs beside its buffers.

        Passes of fewer rows may take more results, in other forms: those from which on products
        with packed weights want their rows otherwise are of forms of their own.
        """
        for name, launch in self._largest(cache):
            self._stream.rehearse(launch)
            self._stream.record(name, launch)

    def launches(self, cache: PagedCache, largest: bool) -> list[Callable[[], None]]:
        """All launches of all sizes, or the largest of each form."""
        found = self._largest(cache) if largest else self._launches(cache)
        return [launch for _, launch in found]

    def asked(self, cache: PagedCache) -> list[Asked[Any]]:
        """What products of several rows would be launched with that nothing is chosen for, fewest
        rows first. Runs all else of the passes, on whatever is in memory."""
        caches, num_tokens = self._layer_caches(cache), MIN_ROWS
        with self.choices.asking() as asked:
            while num_tokens <= min(MAX_ROWS, self.sizes.max_tokens):
                kind: Kind = "decode" if num_tokens <= self.sizes.max_rows else "mixed"
                self._forward(kind, num_tokens, caches)
                if self._decoder.is_last:
                    self._logits(min(num_tokens, self.sizes.max_rows))
                num_tokens *= 2
        self._stream.synchronize()
        return list(asked.values())

    def forward(self, num_tokens: int, only_decodes: bool) -> None:
        """Launch the forward pass of the step whose upload is in `packed`."""
        kind: Kind = "decode" if only_decodes else "mixed"
        buckets = self._row_buckets if only_decodes else self._token_buckets
        self._stream.replay((kind, bucket_of(num_tokens, buckets)))

    def apply(self) -> None:
        """Change the resident tables as `packed` says, and nothing else."""
        self._stream.replay(APPLY)

    def enter(self) -> None:
        self._stream.replay(ENTER)

    def sample(self, variant: Variant, num_samples: int) -> Tensor:
        """Launch the sampling that belongs to it; results [S, W], on the device."""
        bucket = bucket_of(num_samples, self._row_buckets)
        self._stream.replay(("sample", variant, bucket))
        return self.sampler.result(variant)[:num_samples]

    def _layer_caches(self, cache: PagedCache) -> list[LayerCache]:
        tables_GNL, kv_slots_GT = self.resident.page_table, self.inputs.kv_slots_GT
        return [
            LayerCache(cache.layer_pages(layer), tables_GNL[place.group], kv_slots_GT[place.group])
            for layer, place in enumerate(cache.layout.places)
        ]

    def _launches(self, cache: PagedCache) -> Iterator[Launch]:
        caches = self._layer_caches(cache)
        yield APPLY, partial(apply_deltas, self.packed, self.resident)
        yield ENTER, partial(self.sampler.enter, self.entries)
        if self._decoder.is_last:
            yield self.scorer.name, self.scorer.launch
        if self.pooler is not None:
            yield self.pooler.name, self.pooler.launch
        for size in reversed(self._token_buckets):
            yield ("mixed", size), partial(self._forward, "mixed", size, caches)
        for size in reversed(self._row_buckets):
            yield ("decode", size), partial(self._forward, "decode", size, caches)
        for variant in Variant if self._decoder.is_last else ():
            for size in reversed(self._row_buckets):
                yield ("sample", variant, size), partial(self._sample, variant, size)

    def _largest(self, cache: PagedCache) -> Iterator[Launch]:
        seen = set()
        for name, launch in self._launches(cache):
            form, size = name[:-1], name[-1]
            if name[0] in ("mixed", "decode") and isinstance(size, int):
                form = (*form, *(size <= limit for limit in ROW_LIMITS))
            if form not in seen:
                seen.add(form)
                yield name, launch

    @torch.inference_mode()
    def _forward(self, kind: Kind, num_tokens: int, caches: Sequence[LayerCache]) -> None:
        apply_deltas(self.packed, self.resident)
        unpack_step(self.packed, self.resident, self.inputs, num_tokens, self.sizes.page_tokens)
        self._decoder.forward(num_tokens, caches, self._attention[kind])

    @torch.inference_mode()
    def _logits(self, num_samples: int, *, is_part: bool = False) -> Tensor:
        index_S = self.inputs.sample_token_S[:num_samples]
        return self._decoder.logits_at(index_S, is_part=is_part)

    @torch.inference_mode()
    def _sample(self, variant: Variant, num_samples: int) -> None:
        can_part = variant is Variant.PLAIN
        part = self._decoder.vocabulary_part(num_samples) if can_part else None
        logits_SV = self._logits(num_samples, is_part=part is not None)
        self.sampler.launch(variant, logits_SV, num_samples, part)

    def _attentions(
        self, decoder: Decoder[AnyLinear], batch_invariant: bool, pdl: bool
    ) -> dict[Kind, KernelAttention]:
        shape, sizes, device = decoder.shape, self.sizes, decoder.device
        num_heads, num_kv_heads = decoder.mixers[0].num_heads, decoder.mixers[0].num_kv_heads
        kernels, tiles, width = OVER_KEYS_AND_VALUES, num_kv_heads, shape.head_dim
        programs = EXTRA_PROGRAMS
        if shape.latent is not None:
            kernels, width = OVER_LATENTS, shape.latent.latent_dim
            tiles, programs = head_tiles(num_heads), programs_at_once(num_heads)
        group = num_heads // tiles
        decode = DecodeWork.make(
            *(sizes.max_rows, tiles, group, width),
            device=device,
            extra_programs=programs,
            one_wave=shape.latent is not None,
        )
        tables = AttentionTables(
            inputs=self.inputs,
            decode={span: decode.for_span(span) for span in dict.fromkeys(sizes.layout.spans)},
            prefill=PrefillWork.make(sizes.max_tokens, sizes.max_rows, group, device),
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
        over_latents = ChunksOverLatents(tables, expanded, self.resident.page_table[0])
        return {"decode": rows, "mixed": MixedAttention((rows, over_latents), expanded)}

    def _expanded(self, decoder: Decoder[AnyLinear]) -> ExpandedChunks:
        mixer, sizes, device = decoder.mixers[0], self.sizes, decoder.device
        assert isinstance(mixer, LatentAttention)
        room = MAX_KEY_BYTES // (mixer.up_HXR[:, :, 0].numel() * decoder.dtype.itemsize)
        num_contexts = min(room, sizes.max_rows * sizes.max_positions)
        keys = StepKeys.make(self.inputs, num_contexts, mixer.up_HXR, mixer.rope.head_dim)
        work = PrefillWork.make(sizes.max_tokens, sizes.max_rows, 1, device)
        return ExpandedChunks(self.inputs, keys, work)


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
