"""Medusa's heads on the GPU: each draft of a row is made of the model's state before its last
token, by a head of its own. They keep nothing of a text but these states.

Shape legend: E hidden width, S samples, V vocabulary.
"""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.kernels.drafts.draft_passes import SmallSizes
from services.compute.kernels.drafts.head_passes import HeadRows, plan_head_pass, take_states
from services.compute.kernels.step.span import FULL
from services.compute.kernels.step.step_buffers import StepInputs
from services.compute.kv.transfer import Direction
from services.compute.layers.paged_cache import CacheLayout, PagedCache
from services.compute.models.medusa import MedusaHeads
from services.compute.runner.cuda.drafter import MachineParts, lent_group
from services.compute.runner.cuda.pass_drafter import SlotDrafts
from services.compute.runner.cuda.state_pages import StatePages
from services.compute.runner.cuda.unread import FirstPass


class MedusaPasses:
    """A pass for each head, of a row for each slot."""

    first, num_heads = FirstPass(others=0, reads=False), 1  # all leave logits in one place

    def __init__(self, heads: MedusaHeads, num_drafts: int, machine: MachineParts) -> None:
        max_rows, device = machine.sizes.max_rows, machine.packed.device
        self._machine, self._heads, self.num_forms = machine, heads, num_drafts
        self.inputs = StepInputs.make(max_rows, max_rows, device)
        self._rows = HeadRows.make(max_rows, max_rows, device)
        self._seen = StatePages(heads, machine)
        vocab_size = machine.decoder.logits_SV.shape[1]
        about = machine.sizes.page_tokens, vocab_size, lent_group(machine)
        self._sizes = SmallSizes(*about)
        self._x_SE = torch.zeros_like(machine.decoder.hidden_TE[:max_rows])
        self._logits_SV = torch.zeros(max_rows, vocab_size, device=device)
        self._cache: PagedCache | None = None

    def attach(self, num_pages: int, num_host_pages: int) -> None:
        layout = CacheLayout.of((FULL,), {FULL: self._seen.page_bytes})
        counts = num_pages, num_host_pages
        self._cache = PagedCache(layout, {}, counts, self._x_SE.device)
        self._seen.attach(self._cache.device_pages)

    def sides(self, direction: Direction) -> tuple[Tensor, Tensor] | None:
        assert self._cache is not None
        return self._cache.sides(direction)

    def see(self, drafts: SlotDrafts, num_tokens: int, has_chunks: bool) -> None:
        self._seen.keep(num_tokens)

    def read(self, drafts: SlotDrafts, num_tokens: int) -> None:
        raise RuntimeError("what they see is kept, and nothing has to be read")

    def compute(self, drafts: SlotDrafts, form: int, num_rows: int) -> None:
        passes, (ids_NL, _) = drafts
        about = self.inputs, self._machine.resident, passes, self._rows, ids_NL
        plan_head_pass(*about, self._sizes, reads=False)
        x_SE = self._x_SE[:num_rows]
        take_states(self._rows, self._seen.states_YPE, self._x_SE, x_SE)
        self._logits_SV[:num_rows].copy_(self._heads.logits(x_SE, form))

    def logits(self, head: int, num_samples: int) -> Tensor:
        return self._logits_SV[:num_samples]

    def ask(self, num_tokens: int, num_samples: int) -> None:
        pass
