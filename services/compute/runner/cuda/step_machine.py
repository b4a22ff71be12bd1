"""The device's side of all steps: buffers, work lists and the launches that turn an upload into
a result.

Two launches a step: the forward pass by kind and number of tokens, sampling by variant and number
of samples; and before them those of a drafter that computes. Each is recorded for some sizes
(buckets), and a step runs in the smallest that holds it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from common.model_folder import Pooling
from services.compute.distributed.ranks import NO_GROUPS, RankGroups
from services.compute.kernels.choices import MAX_ROWS, MIN_ROWS, Asked, Choices
from services.compute.kernels.sampling.slot_entries import packed_size as entries_size
from services.compute.kernels.step.slot_words import NUM_WORDS
from services.compute.kernels.step.step_buffers import Resident, StepInputs
from services.compute.kernels.step.step_deltas import apply_deltas
from services.compute.kernels.step.step_input import unpack_step
from services.compute.layers.kernel_context import ContextSizes, kernel_context
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.quantized_product import ROW_LIMITS
from services.compute.layers.weighted_layers import AnyLinear
from services.compute.models.decoder import Decoder
from services.compute.runner.cuda.buckets import bucket_of, row_buckets, token_buckets
from services.compute.runner.cuda.device_model import DeviceModel, Kind, MachineSizes, StepTables
from services.compute.runner.cuda.drafter import DeviceDrafter, DrafterMaker, Launch, MachineParts
from services.compute.runner.cuda.pooler import Pooler
from services.compute.runner.cuda.prompt_scorer import PromptScorer
from services.compute.runner.cuda.stream import DeviceStream
from services.compute.runner.cuda.text_drafter import TextDrafter
from services.compute.runner.uploads import MAX_PAGE_ENTRIES, packed_size
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.sampling.slots import Variant

APPLY = ("apply",)
ENTER = ("enter",)
PASSES = ("mixed", "decode", "read", "draft")
"""Launches of a model's layers, by size."""


class Uses(NamedTuple):
    """What a model's passes are for, besides samples and scores."""

    pooling: Pooling | None = None
    make_drafter: DrafterMaker = TextDrafter


ANSWERS = Uses()


class StepMachine:
    """Made once; KV pages come later, when it is known how much memory the rest takes."""

    def __init__(
        self,
        decoder: Decoder[AnyLinear],
        sizes: MachineSizes,
        stream: DeviceStream,
        batch_invariant: bool,
        uses: Uses = ANSWERS,
        groups: RankGroups = NO_GROUPS,
    ) -> None:
        shape, device = decoder.shape, decoder.device
        self.sizes = sizes
        self.choices = Choices()
        self._stream = stream
        self._row_buckets = row_buckets(sizes.max_rows)
        self._token_buckets = token_buckets(sizes.max_tokens)
        max_pages = -(-sizes.max_positions // sizes.page_tokens)
        num_groups = len(sizes.layout.spans)
        self.inputs = StepInputs.make(
            sizes.max_tokens, sizes.max_rows, device, num_groups, sizes.more_rows
        )
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
        samples = sizes.max_rows, shape.hidden_size, decoder.dtype
        shared = ContextSizes(sizes.max_tokens, sizes.token_bytes, *samples)
        context = kernel_context(groups.context, shared, self.packed)
        self._model = DeviceModel(
            decoder,
            StepTables(self.inputs, self.resident.page_table[0], context),
            sizes,
            self.choices,
            batch_invariant,
            groups.split,
        )
        self._decoder = self._model.decoder
        self.drafter: DeviceDrafter | None = None
        draft_words = 0
        if sizes.drafts is not None and decoder.is_last:
            draft_words = sizes.drafts.result_words
            about = self.packed, self.inputs, self.resident, sizes, sizes.drafts, self.choices
            self.drafter = uses.make_drafter(MachineParts(*about, stream, self._decoder))
        tables = self.resident, self.inputs
        self.sampler = DeviceSampler(shape.vocab_size, *tables, self.drafter, draft_words)
        self.scorer = PromptScorer(self._decoder, sizes.num_buffers, stream)
        self.pooler: Pooler | None = None
        if uses.pooling is not None and decoder.is_last:
            self.pooler = Pooler(self._decoder, uses.pooling, sizes.num_buffers, stream)

    @property
    def rows_together(self) -> int:
        return self._model.rows_together

    @property
    def num_launches(self) -> int:
        num_passes = len(self._row_buckets) + len(self._token_buckets)
        if not self._decoder.is_last:
            return 2 + num_passes
        by_size = num_passes + len(self._row_buckets) * len(Variant)
        return by_size + 3 + (self.pooler is not None) + len(list(self._drafts()))

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

    def launches(self, cache: PagedCache) -> list[Callable[[], None]]:
        """All of them, largest first."""
        return [launch for _, launch in self._launches(cache)]

    def asked(self, cache: PagedCache) -> list[Asked[Any]]:
        """What products of several rows would be launched with that nothing is chosen for, fewest
        rows first. Runs all else of the passes, on whatever is in memory."""
        caches, num_tokens = self._layer_caches(cache), MIN_ROWS
        with self.choices.asking() as asked:
            while num_tokens <= min(MAX_ROWS, self.sizes.max_tokens):
                kind: Kind = "decode" if num_tokens <= self.sizes.max_rows else "mixed"
                self._forward(kind, num_tokens, caches)
                if self._decoder.is_last:
                    self._model.logits(min(num_tokens, self.sizes.max_rows))
                if self.drafter is not None:
                    self.drafter.ask(num_tokens)
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
        yield from self._drafts()

    def _drafts(self) -> Iterator[Launch]:
        if self.drafter is not None:
            yield from self.drafter.launches(self.sampler)

    def _largest(self, cache: PagedCache) -> Iterator[Launch]:
        seen = set()
        for name, launch in self._launches(cache):
            form = _form(name)
            if form not in seen:
                seen.add(form)
                yield name, launch

    @torch.inference_mode()
    def _forward(self, kind: Kind, num_tokens: int, caches: Sequence[LayerCache]) -> None:
        apply_deltas(self.packed, self.resident)
        unpack_step(self.packed, self.resident, self.inputs, num_tokens, self.sizes.page_tokens)
        self._model.forward(kind, num_tokens, caches)
        if self.drafter is not None:
            self.drafter.see(num_tokens, has_chunks=kind == "mixed")

    @torch.inference_mode()
    def _sample(self, variant: Variant, num_samples: int) -> None:
        can_part = variant is Variant.PLAIN
        part = self._decoder.vocabulary_part(num_samples) if can_part else None
        logits_SV = self._model.logits(num_samples, is_part=part is not None)
        self.sampler.launch(variant, logits_SV, num_samples, part)


def _form(name: tuple[object, ...]) -> tuple[object, ...]:
    """What launches of several sizes have in common."""
    form, size = name[:-1], name[-1]
    if name[0] in PASSES and isinstance(size, int):
        return (*form, *(size <= limit for limit in ROW_LIMITS))
    return form
