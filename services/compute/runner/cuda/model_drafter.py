"""Drafts of a small model on the GPU: passes of its own before the step that has rows for them.

It has weights, inputs and pages of its own; these go by the large model's numbers, as on the CPU
(`runner.draft_model`), and are found by the page table of its layers that see everything. Chunks of
prompts it reads in the launch that the large model does. What was drawn it reads when drafts are
wanted, so a step without drafts costs nothing; how much that is the device knows, and the host an
upper bound (`unread`), which is all that a launch needs.

How many passes there are the plan says, before anything of the step before is known to the host:
so they are launched behind it like everything else, and none is in vain.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.draft_passes import (
    DraftPasses,
    SmallSizes,
    begin_drafts,
    keep_guesses,
    plan_pass,
    plan_reading,
    take_chunks,
)
from services.compute.kernels.draft_tokens import SlotTexts, draft_tokens, remember_tokens
from services.compute.kernels.slot_words import SampleRows
from services.compute.kernels.step_buffers import StepInputs
from services.compute.kernels.step_deltas import apply_deltas
from services.compute.kernels.step_input import unpack_step
from services.compute.kv.transfer import Direction
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.weighted_layers import AnyLinear
from services.compute.models.decoder import Decoder
from services.compute.runner.cuda.buckets import bucket_of, row_buckets
from services.compute.runner.cuda.device_model import DeviceModel, StepTables
from services.compute.runner.cuda.drafter import Launch, MachineParts
from services.compute.runner.cuda.unread import Unread
from services.compute.runner.uploads import VARIANT, StepUpload
from services.compute.sampling.device_sampler import DeviceSampler
from services.compute.sampling.slots import Variant
from services.compute.step import Int32Array

BEGIN = ("drafts",)

READ_SIZES = (16, 64, 256, 1024, 2048)
"""Tokens of launches that read what is behind. One stream's hundred tokens are little beside the
weights, which are read once. Slots behind the largest launch are read with later steps, and have no
drafts until then: else one step would take as long as several."""

GUESSES = (Variant.PLAIN, Variant.CUTS, Variant.ADJUSTED)


class SmallModel(NamedTuple):
    """What is loaded to draft."""

    decoder: Decoder[AnyLinear]
    layout: CacheLayout
    make_cache: Callable[[int, int], PagedCache]  # of so many pages on the device, on the host
    batch_invariant: bool


class ModelDrafter:
    """Drafts with a model."""

    def __init__(self, small: SmallModel, machine: MachineParts) -> None:
        sizes, device = machine.sizes, machine.packed.device
        self._machine, self._small = machine, small
        self._inputs = StepInputs.make(sizes.max_tokens, sizes.max_rows, device)
        self._passes = DraftPasses.make(sizes.max_rows, sizes.max_rows, device)
        self._texts = SlotTexts.make(sizes.max_rows, sizes.max_positions, device)
        group = next(n for n, span in enumerate(sizes.layout.spans) if span.is_full)
        shape, table_NL = small.decoder.shape, machine.resident.page_table[group]
        self._sizes = SmallSizes(sizes.page_tokens, shape.vocab_size, group)
        self._model = DeviceModel(
            small.decoder,
            StepTables(self._inputs, table_NL),
            replace(sizes, layout=small.layout),
            machine.choices,
            small.batch_invariant,
        )
        self._caches: list[LayerCache] = []
        self._cache: PagedCache | None = None
        self._row_buckets = row_buckets(sizes.max_rows)
        self._guess_buckets = row_buckets(max(sizes.max_rows // 2, 1))
        fitting = [size for size in READ_SIZES if size < sizes.max_tokens]
        self._read_sizes = tuple(fitting) or (sizes.max_tokens,)
        self._unread = Unread(sizes.max_rows, self._read_size)
        vocab_size = machine.decoder.logits_SV.shape[1]
        self._wide_SV: Tensor | None = None  # logits, if the models' padding is another
        if vocab_size != shape.vocab_size:
            wide = (self._guess_buckets[-1], vocab_size)
            self._wide_SV = torch.full(wide, -torch.inf, device=device)

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        num_groups = len(self._small.layout.spans)
        cache = self._small.make_cache(num_pages * num_groups, num_host_pages * num_groups)
        # A page of each group lies where the large model has one page.
        pages, layout = self._whole(cache.device_pages), cache.layout
        table_NL, kv_slots_T = self._machine.resident.page_table[self._sizes.group], self._kv_slots
        self._cache, self._caches = cache, []
        for place in layout.places:
            form = cache.formats[layout.spans[place.group]]
            first_byte = place.group * layout.page_bytes + place.number * form.num_bytes
            self._caches.append(LayerCache(form.pages(pages, first_byte), table_NL, kv_slots_T))

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        assert self._cache is not None
        source, target = self._cache.sides(direction)
        return self._whole(source), self._whole(target)

    def enter(self, packed: Tensor) -> None:
        remember_tokens(packed, self._texts, self._passes.read_N)

    def see(self, num_tokens: int, has_chunks: bool) -> None:
        if has_chunks:
            step, passes = self._machine.inputs, self._passes
            take_chunks(step, self._inputs, passes, num_tokens, self._sizes)
            self._model.forward("mixed", num_tokens, self._caches)

    def follow(self, rows: SampleRows, said_NV: Tensor, result_SW: Tensor) -> None:
        machine = self._machine
        about = rows, machine.inputs, machine.resident, self._texts, said_NV, machine.rule
        draft_tokens(*about, result_SW, self._passes.read_N)

    def launches(self, sampler: DeviceSampler) -> Iterator[Launch]:
        yield BEGIN, self._begin
        for size in reversed(self._read_sizes):
            yield ("read", size), partial(self._read, size)
        for size in reversed(self._row_buckets):
            yield ("draft", size), partial(self._pass, size)
        for variant in GUESSES:
            for size in reversed(self._guess_buckets):
                yield ("guess", variant, size), partial(self._guess, sampler, variant, size)

    def ask(self, num_tokens: int) -> None:
        if num_tokens <= self._row_buckets[-1]:
            self._model.forward("decode", num_tokens, self._caches)
        if num_tokens <= self._guess_buckets[-1]:
            self._model.logits(num_tokens)

    def draft(self, ints: Int32Array, header: list[int]) -> None:
        num_read, num_slots = self._unread.follow(StepUpload.read(ints))
        if not num_slots:
            return
        replay = self._machine.stream.replay
        variant = min(Variant(header[VARIANT]), Variant.ADJUSTED)
        replay(BEGIN)
        if num_read:
            replay(("read", num_read))
        for number, count in enumerate(num_slots):
            num_rows = count if number else 2 * count
            replay(("draft", bucket_of(num_rows, self._row_buckets)))
            replay(("guess", variant, bucket_of(count, self._guess_buckets)))

    @property
    def _kv_slots(self) -> Tensor:
        return self._inputs.kv_slots_GT[0]

    def _whole(self, pages: Tensor) -> Tensor:
        """Its pages side by side where the large model has one."""
        return pages.view(-1, len(self._small.layout.spans) * self._small.layout.page_bytes)

    def _read_size(self, num_tokens: int) -> int:
        return bucket_of(min(num_tokens, self._read_sizes[-1]), self._read_sizes)

    @torch.inference_mode()
    def _begin(self) -> None:
        """The rows of the step are unpacked here and, with their drafts, once more."""
        packed, inputs, resident, sizes, *_ = self._machine
        apply_deltas(packed, resident)
        unpack_step(packed, resident, inputs, sizes.max_rows, sizes.page_tokens)
        begin_drafts(inputs, resident, self._passes)

    @torch.inference_mode()
    def _read(self, num_tokens: int) -> None:
        about = self._inputs, self._machine.resident, self._passes, self._texts.ids_NL
        plan_reading(*about, num_tokens, self._sizes)
        self._model.forward("mixed", num_tokens, self._caches)

    @torch.inference_mode()
    def _pass(self, num_rows: int) -> None:
        about = self._inputs, self._machine.resident, self._passes, self._texts.ids_NL
        plan_pass(*about, self._sizes)
        self._model.forward("decode", num_rows, self._caches)

    @torch.inference_mode()
    def _guess(self, sampler: DeviceSampler, variant: Variant, num_samples: int) -> None:
        logits_SV = self._model.logits(num_samples)
        if self._wide_SV is not None:
            width = min(self._wide_SV.shape[1], logits_SV.shape[1])
            wide_SV = self._wide_SV[:num_samples]
            wide_SV[:, :width].copy_(logits_SV[:, :width])
            logits_SV = wide_SV
        result_SW = sampler.guess(variant, logits_SV, self._inputs)
        keep_guesses(self._inputs, self._machine.resident, self._passes, result_SW)
