"""The model's states that a head sees, in pages: one of each position.

Shape legend: T tokens, E hidden width, Y pages, P positions of a page.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

import torch
from torch import Tensor

from services.compute.kernels.drafts.head_passes import keep_states
from services.compute.runner.cuda.drafter import MachineParts, lent_group


class Seeing(Protocol):
    """A head, as far as it sees states."""

    @property
    def layers(self) -> tuple[int, ...]: ...

    def kept(self, states: Sequence[Tensor]) -> Tensor: ...


class StatePages:
    def __init__(self, head: Seeing, machine: MachineParts) -> None:
        sizes, self._decoder, self._kept = machine.sizes, machine.decoder, head.kept
        self._page_tokens = sizes.page_tokens
        self._kv_slots_T = machine.inputs.kv_slots_GT[lent_group(machine)]
        stream_TE = self._decoder.hidden_TE
        # What comes into layers and what the last makes, or that behind its norm.
        num_layers = len(sizes.layout.places)
        self._shown: list[Tensor] = []
        self._made_TE: Tensor | None = None
        if head.layers == (num_layers,):
            self._normed_TE = torch.zeros_like(stream_TE)
            num_tokens = len(stream_TE)
            self._tokens_T = torch.arange(num_tokens, dtype=torch.int32, device=stream_TE.device)
        else:
            self._shown = self._decoder.show(head.layers)
            if num_layers in head.layers:
                self._made_TE = self._shown[head.layers.index(num_layers)]
        self.states_YPE = stream_TE.new_empty(0, self._page_tokens, self._decoder.hidden_size)

    @property
    def page_bytes(self) -> int:
        return self._page_tokens * self._decoder.hidden_size * self._decoder.dtype.itemsize

    def attach(self, pages: Tensor) -> None:
        """Lay them in these parts of pages, uint8 [Y, bytes]."""
        self.states_YPE = self.within(pages)

    def within(self, pages: Tensor) -> Tensor:
        """Such parts as states [Y, P, E]."""
        sizes = len(pages), self._page_tokens, self._decoder.hidden_size
        return pages.view(self._decoder.dtype).view(sizes)

    def keep(self, num_tokens: int) -> None:
        """Those of the pass before, over up to so many tokens."""
        if self._made_TE is not None:
            self._decoder.made(self._made_TE[:num_tokens])
        if self._shown:
            x_TE = self._kept([x_TE[:num_tokens] for x_TE in self._shown])
        else:
            x_TE = self._normed_TE[:num_tokens]
            self._decoder.normed_at(self._tokens_T[:num_tokens], x_TE)
        keep_states(x_TE, self._kv_slots_T, self.states_YPE)
