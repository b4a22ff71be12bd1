"""Host memory that steps' results are copied into, in turn."""

from __future__ import annotations

import torch
from torch import Tensor

from services.compute.step import Int32Array


class Results:
    """Rotating pinned buffers: one for each step in flight, one being written, one being read.

    Shape legend: S samples, W words of a result.
    """

    __slots__ = ("_buffers", "_num_started", "_views")

    def __init__(self, num_buffers: int, num_ints: int, pinned: bool) -> None:
        self._buffers = [
            torch.zeros(num_ints, dtype=torch.int32, pin_memory=pinned) for _ in range(num_buffers)
        ]
        # views are kept: making a slice, a shape and an array costs the host 3 us a step
        self._views: list[dict[torch.Size, tuple[Tensor, Int32Array]]] = [
            {} for _ in range(num_buffers)
        ]
        self._num_started = 0

    def copy(self, result_SW: Tensor) -> Int32Array:
        """Start the copy of a result to the host; the array holds it once the device is past."""
        turn = self._num_started % len(self._buffers)
        self._num_started += 1
        view = self._views[turn].get(result_SW.shape)
        if view is None:
            host_SW = self._buffers[turn][: result_SW.numel()].view(result_SW.shape)
            view = self._views[turn][result_SW.shape] = host_SW, host_SW.numpy()
        view[0].copy_(result_SW, non_blocking=True)
        return view[1]
