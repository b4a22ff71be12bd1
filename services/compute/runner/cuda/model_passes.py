"""Passes of a small model that drafts. Pages of several groups of its layers lie side by side where
the large model has one page, which is a view and needs no table."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.drafts.draft_passes import (
    SmallSizes,
    plan_pass,
    plan_reading,
    take_chunks,
)
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.kv.transfer import Direction
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.layers.weighted_layers import AnyLinear
from services.compute.models.decoder import Decoder
from services.compute.runner.cuda.device_model import DeviceModel, StepTables
from services.compute.runner.cuda.drafter import MachineParts, lent_group
from services.compute.runner.cuda.pass_drafter import SlotDrafts
from services.compute.runner.cuda.unread import FirstPass


class SmallModel(NamedTuple):
    """What is loaded to draft."""

    decoder: Decoder[AnyLinear]
    layout: CacheLayout
    make_cache: Callable[[int, int], PagedCache]  # of so many pages on the device, on the host
    batch_invariant: bool


class ModelPasses:
    """A first pass has the last token of a slot and the one before, of further ones each draft."""

    first, num_forms, num_heads = FirstPass(others=1), 1, 1

    def __init__(self, small: SmallModel, machine: MachineParts) -> None:
        sizes, device = machine.sizes, machine.packed.device
        self._machine, self._small = machine, small
        self.inputs = StepInputs.make(sizes.max_tokens, sizes.max_rows, device)
        group, shape = lent_group(machine), small.decoder.shape
        self._table_NL = machine.resident.page_table[group]
        self._sizes = SmallSizes(sizes.page_tokens, shape.vocab_size, group, self.first.others)
        self._model = DeviceModel(
            small.decoder,
            StepTables(self.inputs, self._table_NL),
            replace(sizes, layout=small.layout, drafts=None),
            machine.choices,
            small.batch_invariant,
        )
        self._caches: list[LayerCache] = []
        self._cache: PagedCache | None = None
        max_samples, vocab_size = max(sizes.max_rows // 2, 1), machine.decoder.logits_SV.shape[1]
        self._wide_SV: Tensor | None = None  # logits, if the models' padding is another
        if vocab_size != shape.vocab_size:
            wide = max_samples, vocab_size
            self._wide_SV = torch.full(wide, -torch.inf, device=device)

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        num_groups = len(self._small.layout.spans)
        cache = self._small.make_cache(num_pages * num_groups, num_host_pages * num_groups)
        # A page of each group lies where the large model has one page.
        pages, layout = self._whole(cache.device_pages), cache.layout
        self._cache, self._caches = cache, []
        for place in layout.places:
            form = cache.formats[layout.spans[place.group]]
            first_byte = place.group * layout.page_bytes + place.number * form.num_bytes
            where = self._table_NL, self.inputs.kv_slots_GT[0]
            self._caches.append(LayerCache(form.pages(pages, first_byte), *where))

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        assert self._cache is not None
        source, target = self._cache.sides(direction)
        return self._whole(source), self._whole(target)

    def see(self, drafts: SlotDrafts, num_tokens: int, has_chunks: bool) -> None:
        if has_chunks:
            step = self._machine.inputs
            take_chunks(step, self.inputs, drafts.passes, num_tokens, self._sizes)
            self._model.forward("mixed", num_tokens, self._caches)

    def read(self, drafts: SlotDrafts, num_tokens: int) -> None:
        passes, (ids_NL, _) = drafts
        about = self.inputs, self._machine.resident, passes, ids_NL
        plan_reading(*about, num_tokens, self._sizes)
        self._model.forward("mixed", num_tokens, self._caches)

    def compute(self, drafts: SlotDrafts, form: int, num_rows: int) -> None:
        passes, (ids_NL, _) = drafts
        plan_pass(self.inputs, self._machine.resident, passes, ids_NL, self._sizes)
        self._model.forward("decode", num_rows, self._caches)

    def logits(self, head: int, num_samples: int) -> Tensor:
        logits_SV = self._model.logits(num_samples)
        if self._wide_SV is None:
            return logits_SV
        width = min(self._wide_SV.shape[1], logits_SV.shape[1])
        wide_SV = self._wide_SV[:num_samples]
        wide_SV[:, :width].copy_(logits_SV[:, :width])
        return wide_SV

    def ask(self, num_tokens: int, num_samples: int) -> None:
        self._model.forward("decode", num_tokens, self._caches)
        if num_samples:
            self._model.logits(num_samples)

    def _whole(self, pages: Tensor) -> Tensor:
        """Its pages side by side where the large model has one."""
        return pages.view(-1, len(self._small.layout.spans) * self._small.layout.page_bytes)
