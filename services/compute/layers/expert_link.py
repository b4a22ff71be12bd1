"""How an expert goes from one rank's memory to another's while a model serves."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from services.compute.distributed.ranks import Ranks
from services.compute.distributed.symmetric import ALIGNMENT, SymmetricBlock, default_group
from services.compute.kernels.ranks.rank_rows import meet_ranks
from services.compute.layers.parts import Experts
from services.compute.layers.weighted_layers import AnyLinear, QuantizedLinear
from services.compute.quantization.packed import Packed


class ExpertLink(Protocol):
    """A collective operation, in the order of the stream."""

    def hand_on(self, pieces: Sequence[Tensor], source: int, target: int) -> None:
        """Copy what tensors hold on one rank to such tensors of another; the rest have none."""
        ...


class SymmetricLink:
    """Through memory of the source that the target reads."""

    def __init__(self, num_bytes: int, device: torch.device, ranks: Ranks) -> None:
        """For so many bytes at once; all ranks make it at the same time."""
        piece = (num_bytes,), torch.uint8
        self._block = SymmetricBlock(SymmetricBlock.num_bytes(piece), device, default_group(ranks))
        self._handed = self._block.take(*piece)
        self._num_ranks = ranks.size
        meet_ranks(self._block.memory, ranks.size)  # compiled from here on

    def hand_on(self, pieces: Sequence[Tensor], source: int, target: int) -> None:
        """Nobody writes there again before the target has read it."""
        memory = self._block.memory
        if memory.rank == source:
            for piece, handed in zip(pieces, _like(pieces, self._handed.own), strict=True):
                handed.copy_(piece)
        meet_ranks(memory, self._num_ranks)
        if memory.rank == target:
            theirs = self._block.of_rank(source, self._handed)
            for piece, handed in zip(pieces, _like(pieces, theirs), strict=True):
                piece.copy_(handed)
        meet_ranks(memory, self._num_ranks)


def handed_bytes(pieces: Sequence[Tensor]) -> int:
    """That a link needs for such tensors."""
    return sum(-(-piece.nbytes // ALIGNMENT) * ALIGNMENT for piece in pieces)


def _like(pieces: Sequence[Tensor], memory: Tensor) -> Iterator[Tensor]:
    """Tensors of these shapes in memory, one behind the other."""
    begin = 0
    for piece in pieces:
        yield memory[begin : begin + piece.nbytes].view(piece.dtype).view(piece.shape)
        begin += handed_bytes([piece])


def expert_pieces(experts: Experts[AnyLinear], slot: int) -> list[Tensor]:
    """What the maps of the expert in a slot are made of: views of all."""
    pieces: list[Tensor] = []
    for linear in (*experts.gate_up, *experts.down):
        weight: Any = linear.weight if isinstance(linear, QuantizedLinear) else linear.weight_OI
        parts = [weight]
        if isinstance(weight, Packed):
            parts = [weight.codes_OB, weight.scales_OG, weight.zeros_OG]
        for part in (*parts, linear.bias_O):
            if part is not None:
                num_rows = len(part) // experts.num_held
                pieces.append(part[slot * num_rows : (slot + 1) * num_rows])
    return pieces
