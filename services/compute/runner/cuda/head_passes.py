"""Passes of a head that drafts. It sees states of the model, which are laid in pages behind every
pass of that, and what it keeps of a text lies in the same pages.

Next-token layers are such heads, one behind the other: each sees the states of the one before it.
All read what is new of a text in each step that drafts for it, however few drafts that wants, so
that there is one number of how much has been read.

Shape legend: T tokens, E hidden width, Y pages, P positions of a page, S samples, V vocabulary.
"""

from __future__ import annotations

from dataclasses import replace
from typing import NamedTuple

import torch
from torch import Tensor

from services.compute.kernels.drafts.draft_passes import SmallSizes, plan_reading, take_chunks
from services.compute.kernels.drafts.head_passes import (
    HeadRows,
    find_states,
    keep_states,
    plan_head_pass,
    take_states,
)
from services.compute.kernels.kv.kv_format import LayerFormat
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.kv.transfer import Direction
from services.compute.layers.kernel_step import LayerCache
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.models.head_decoder import HeadDecoder
from services.compute.runner.cuda.device_model import DeviceModel, Kind, StepTables
from services.compute.runner.cuda.drafter import MachineParts, lent_group
from services.compute.runner.cuda.pass_drafter import SlotDrafts
from services.compute.runner.cuda.state_pages import StatePages
from services.compute.runner.cuda.unread import FirstPass


class LayerHeads(NamedTuple):
    """What is loaded to draft."""

    decoders: tuple[HeadDecoder, ...]
    form: LayerFormat  # of what a layer keeps
    batch_invariant: bool


class HeadPasses:
    """A first pass has all tokens of a slot since the one that the one before had last."""

    def __init__(self, loaded: LayerHeads, machine: MachineParts) -> None:
        sizes, device = machine.sizes, machine.packed.device
        self._machine, self._loaded = machine, loaded
        self.num_forms = self.num_heads = num_layers = len(loaded.decoders)
        self.first = FirstPass(0, most_rows=sizes.max_rows, num_layers=num_layers)
        self.inputs = StepInputs.make(sizes.max_tokens, sizes.max_rows, device)
        self._rows = HeadRows.make(sizes.max_tokens, sizes.max_rows, device)
        self._seen = StatePages(loaded.decoders[0].drafts, machine)
        self._states: list[Tensor] = []  # that each head sees, [Y, P, E]
        group, decoder = lent_group(machine), loaded.decoders[0]
        vocab_size = machine.decoder.logits_SV.shape[1]
        self._table_NL = machine.resident.page_table[group]
        self._sizes = SmallSizes(sizes.page_tokens, vocab_size, group, self.first.others)
        (span,) = {mixer.span for mixer in decoder.mixers}
        page_bytes = num_layers * (loaded.form.num_bytes + self._seen.page_bytes)
        self._layout = CacheLayout.of((span,), {span: page_bytes})
        self._models = [
            DeviceModel(
                each,
                StepTables(self.inputs, self._table_NL),
                replace(sizes, layout=self._layout, drafts=None),
                machine.choices,
                loaded.batch_invariant,
            )
            for each in loaded.decoders
        ]
        self._cache: PagedCache | None = None
        self._caches: list[LayerCache] = []  # of each head
        self._wide_SV: Tensor | None = None  # logits, if the head has fewer tokens
        self._ids_D = decoder.drafts.ending.ids_D
        self._normed_SE: Tensor | None = None  # if the model makes its logits
        if any(each.shares_head for each in loaded.decoders):
            self._normed_SE = torch.zeros_like(machine.decoder.hidden_TE[: sizes.max_rows])
        elif decoder.shape.vocab_size != vocab_size or self._ids_D is not None:
            wide = max(sizes.max_rows // 2, 1), vocab_size
            self._wide_SV = torch.full(wide, -torch.inf, device=device)

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        form = self._loaded.form
        formats, counts = dict.fromkeys(self._layout.spans, form), (num_pages, num_host_pages)
        self._cache = PagedCache(self._layout, formats, counts, self._table_NL.device)
        where = self._table_NL, self.inputs.kv_slots_GT[0]
        pages, num_layers = self._cache.device_pages, len(self._models)
        self._caches = [
            LayerCache(form.pages(pages, number * form.num_bytes), *where)
            for number in range(num_layers)
        ]
        parts = pages[:, num_layers * form.num_bytes :].chunk(num_layers, dim=1)
        self._seen.attach(parts[0])
        self._states = [self._seen.within(part) for part in parts]

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        assert self._cache is not None
        return self._cache.sides(direction)

    def see(self, drafts: SlotDrafts, num_tokens: int, has_chunks: bool) -> None:
        step, passes = self._machine.inputs, drafts.passes
        self._seen.keep(num_tokens)
        if has_chunks:
            take_chunks(step, self.inputs, passes, num_tokens, self._sizes)
            self._read_chunks(num_tokens)

    def read(self, drafts: SlotDrafts, num_tokens: int) -> None:
        passes, (ids_NL, _) = drafts
        about = self.inputs, self._machine.resident, passes, ids_NL
        plan_reading(*about, num_tokens, self._sizes)
        self._read_chunks(num_tokens)

    def compute(self, drafts: SlotDrafts, form: int, num_rows: int) -> None:
        passes, (ids_NL, _) = drafts
        about = self.inputs, self._machine.resident, passes, self._rows, ids_NL
        plan_head_pass(*about, self._sizes, num_layers=len(self._models))
        self._forward(form, "decode", num_rows)

    def logits(self, head: int, num_samples: int) -> Tensor:
        model = self._models[head]
        if self._normed_SE is not None and self._loaded.decoders[head].shares_head:
            normed_SE, index_S = self._normed_SE[:num_samples], self.inputs.sample_token_S
            model.decoder.normed_at(index_S[:num_samples], normed_SE)
            return self._machine.decoder.logits_of(normed_SE)
        logits_SD = model.logits(num_samples)
        if self._wide_SV is None:
            return logits_SD
        wide_SV = self._wide_SV[:num_samples]
        if self._ids_D is None:
            wide_SV[:, : logits_SD.shape[1]].copy_(logits_SD)
        else:
            wide_SV.index_copy_(1, self._ids_D, logits_SD)
        return wide_SV

    def ask(self, num_tokens: int, num_samples: int) -> None:
        for head, model in enumerate(self._models):
            model.forward("decode", num_tokens, self._caches[head : head + 1])
            if num_samples:
                self.logits(head, num_samples)

    def _read_chunks(self, num_tokens: int) -> None:
        """Those in the inputs."""
        page_tokens = self._machine.sizes.page_tokens
        find_states(self.inputs, self._table_NL, self._rows, num_tokens, page_tokens)
        for head in range(len(self._models)):
            self._forward(head, "mixed", num_tokens)

    def _forward(self, head: int, kind: Kind, num_tokens: int) -> None:
        """A head's pass, whose states are kept for the next one."""
        model, x_TE = self._models[head], self._loaded.decoders[head].x_TE
        own_TE = model.decoder.hidden_TE
        take_states(self._rows, self._states[head], own_TE, x_TE[:num_tokens])
        model.forward(kind, num_tokens, self._caches[head : head + 1])
        if head + 1 < len(self._models):
            keep_states(own_TE[:num_tokens], self.inputs.kv_slots_GT[0], self._states[head + 1])
