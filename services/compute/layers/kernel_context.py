"""What ranks that have the whole model leave one another of a step on GPUs, where they share its
tokens: cache entries of each layer, and the hidden states that are drawn from.

Shape legend: E hidden width, S sampled rows, R ranks.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks
from services.compute.distributed.symmetric import SymmetricBlock, default_group
from services.compute.kernels.kv.kv_format import LayerPages
from services.compute.kernels.ranks.rank_entries import StagedEntries, exchange_entries, turn_bytes
from services.compute.kernels.ranks.rank_rows import side_by_side
from services.compute.kernels.step.step_buffers import AttentionCall
from services.compute.layers.kernel_attention import ExpandedChunks, KernelAttention


class KernelContext(Protocol):
    """What a pass does with the other ranks."""

    def shared(self, attention: KernelAttention) -> KernelAttention:
        """Attention of steps of which ranks may have tokens alone, over what all have stored."""
        ...

    def agree(self, x_SE: Tensor) -> None:
        """Replace these hidden states by rank 0's, which may have others in the last bits."""
        ...


class OneContext:
    """This process computes all tokens."""

    def shared(self, attention: KernelAttention) -> KernelAttention:
        return attention

    def agree(self, x_SE: Tensor) -> None:
        pass


ONE_CONTEXT = OneContext()


class ContextSizes(NamedTuple):
    """What ranks share memory for."""

    max_tokens: int  # of a step
    token_bytes: int  # of a token's entries in one layer, with their scales
    max_samples: int
    width: int
    dtype: torch.dtype


class Exchange(Protocol):
    def __call__(self, pages: LayerPages, kv_slots_T: Tensor) -> None:
        """Store what ranks have alone of the step in the pages of all."""
        ...


@dataclass(frozen=True, slots=True)
class SharedAttention:
    """Attention whose queries may see what another rank has computed."""

    attention: KernelAttention
    exchange: Exchange

    @property
    def is_invariant(self) -> bool:
        return self.attention.is_invariant

    @property
    def expanded(self) -> ExpandedChunks | None:
        return self.attention.expanded

    def plan(self, num_tokens: int) -> None:
        self.attention.plan(num_tokens)

    def attend(self, call: AttentionCall) -> None:
        assert call.kv_slots_T is not None
        pages = LayerPages(call.kv_pages, call.kv_scales)
        self.exchange(pages, call.kv_slots_T[: len(call.q_THD)])
        self.attention.attend(call)


class SharedContext:
    """Ranks that meet in memory which all of them read (kernels/ranks/rank_entries.py)."""

    def __init__(self, ranks: Ranks, sizes: ContextSizes, header: Tensor) -> None:
        """The step's upload on the device begins with the header."""
        max_own = -(-sizes.max_tokens // (2 * ranks.size)) * 2
        entries = 2 * turn_bytes(max_own, sizes.token_bytes)
        sampled = sizes.max_samples, sizes.width
        block = SymmetricBlock(
            SymmetricBlock.num_bytes(((entries,), torch.uint8), (sampled, sizes.dtype)),
            header.device,
            default_group(ranks),
        )
        addresses_R = block.take((entries,), torch.uint8).addresses_R
        self._staged = StagedEntries(addresses_R, block.memory, max_own, sizes.token_bytes)
        self._sampled = block.take(sampled, sizes.dtype)
        self._first_alone = (0, *[sizes.width] * ranks.size)  # where each rank's columns begin
        self._header = header

    def shared(self, attention: KernelAttention) -> KernelAttention:
        return SharedAttention(attention, self._exchange)

    def agree(self, x_SE: Tensor) -> None:
        self._sampled.own[: len(x_SE)].copy_(x_SE)
        side_by_side(self._sampled.addresses_R, self._first_alone, x_SE, self._staged.memory)

    def _exchange(self, pages: LayerPages, kv_slots_T: Tensor) -> None:
        exchange_entries(pages, kv_slots_T, self._header, self._staged)


def kernel_context(ranks: Ranks, sizes: ContextSizes, header: Tensor) -> KernelContext:
    """What a pass needs of the ranks; all of them make it at the same time."""
    return ONE_CONTEXT if ranks.size == 1 else SharedContext(ranks, sizes, header)
