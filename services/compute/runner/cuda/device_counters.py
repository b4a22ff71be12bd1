"""Counters of experts in the device's memory: what the routing of every step adds to.

Shape legend: L layers that have experts, X experts of a layer.
"""

from __future__ import annotations

from collections.abc import Mapping

import torch
from torch import Tensor

from services.compute.runner.cuda.stream import DeviceStream, Mark
from services.compute.runner.device_errors import fatal_if_the_device_fails
from services.compute.step import Int64Array


class DeviceCounters:
    """`ExpertCounters` whose copy to the host is launched at one look and read at a later one.

    It goes behind the steps that have been launched, so nobody waits for it.
    """

    def __init__(self, by_layer: Mapping[int, Tensor], stream: DeviceStream) -> None:
        """Takes each layer's counts, int64 [X]."""
        self.layers = tuple(by_layer)
        self._counts = tuple(by_layer.values())
        self._stream = stream
        self._all_LX = torch.stack(self._counts)
        self._base_LX = torch.zeros_like(self._all_LX)  # of the last reset
        self._host_LX = torch.zeros(
            self._all_LX.shape, dtype=torch.int64, pin_memory=self._all_LX.is_cuda
        )
        self._read_LX: Int64Array = self._host_LX.numpy().copy()
        self._copied: Mark | None = None  # the end of the copy that is on its way

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def read(self) -> Int64Array:
        if self._copied is not None and self._copied.query():
            self._read_LX, self._copied = self._host_LX.numpy().copy(), None
        if self._copied is None:
            torch.stack(self._counts, out=self._all_LX).sub_(self._base_LX)
            self._host_LX.copy_(self._all_LX, non_blocking=True)
            self._copied = self._stream.mark()
        return self._read_LX

    @fatal_if_the_device_fails
    @torch.inference_mode()
    def reset(self) -> None:
        # what is counted stays, as all ranks of a model read the same there
        torch.stack(self._counts, out=self._base_LX)
        self._read_LX, self._copied = self._read_LX * 0, None  # a copy on its way is of before
