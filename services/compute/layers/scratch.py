"""Memory for what a sublayer's launches leave one another."""

from __future__ import annotations

import torch
from torch import Tensor

ALIGNMENT = 256
"""Of a result, in bytes: what allocators of GPUs give."""


class Scratch:
    """Memory for the results of a sublayer's launches, one behind the other.

    The first and largest step makes it, piece by piece, before anything is captured. What a
    captured graph has seen is never freed.
    """

    def __init__(self, dtype: torch.dtype, device: torch.device) -> None:
        self._pieces: list[Tensor] = []
        self._piece = self._used = 0  # where the next result may lie
        self._like = torch.empty(0, dtype=dtype, device=device)

    def rewind(self) -> None:
        self._piece = self._used = 0

    def take(self, num_rows: int, width: int) -> Tensor:
        """[num_rows, width], with whatever was there."""
        return self.take_as(self._like.dtype, num_rows, width)

    def take_as(self, dtype: torch.dtype, num_rows: int, width: int) -> Tensor:
        """The same in another dtype."""
        num_bytes = num_rows * width * dtype.itemsize
        return self.take_bytes(num_bytes).view(dtype).view(num_rows, width)

    def take_bytes(self, num_bytes: int) -> Tensor:
        while self._piece < len(self._pieces):
            piece, begin = self._pieces[self._piece], self._used
            if begin + num_bytes <= len(piece):
                self._used = -(-(begin + num_bytes) // ALIGNMENT) * ALIGNMENT
                return piece[begin : begin + num_bytes]
            self._piece, self._used = self._piece + 1, 0
        if self._like.is_cuda and torch.cuda.is_current_stream_capturing():
            raise RuntimeError("scratch memory must not grow while a graph is captured")
        self._pieces.append(self._like.new_zeros(num_bytes, dtype=torch.uint8))
        return self.take_bytes(num_bytes)
