"""Host memory that a step is uploaded from and read back into, while others are written and read.

Shape legend: S samples, W words of a result.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from services.compute.runner.cuda.stream import DeviceStream
from services.compute.step import Int32Array

_COPY_INTS = 1024
"""Copies are of whole multiples of this, so that their views can be kept: making two slices costs
the host more than copying 4 KB more costs the device."""


class Staging:
    """Rotating pinned buffers in front of one buffer on the device.

    A buffer may be written again once the copy out of it is done. Nothing is recorded to know
    this: the stream runs in order, so a step's result says that its upload, and each before it,
    is done, and the caller passes that on (`done`). With as many buffers as there are uploads
    between a step's launch and its result, that never waits; `wait` is for the rest, as a step
    whose page-table entries need several uploads.

    Pinned memory is allocated at the start: 0.5 MB of it for each new sequence with a penalty took
    0.1 ms, and the device waited.
    """

    def __init__(self, device_buffer: Tensor, num_buffers: int, wait: Callable[[], None]) -> None:
        """`wait` returns when every copy started so far is done (a stream's `synchronize`)."""
        size, on_cuda = len(device_buffer), device_buffer.is_cuda
        self.device_buffer = device_buffer
        self._host_buffers = [
            torch.zeros(size, dtype=torch.int32, pin_memory=on_cuda) for _ in range(num_buffers)
        ]
        self._arrays: list[Int32Array] = [buffer.numpy() for buffer in self._host_buffers]
        self._views: list[dict[int, tuple[Tensor, Tensor]]] = [{} for _ in range(num_buffers)]
        self._wait = wait
        self._num_started = 0
        self._num_done = 0

    def buffer(self) -> Int32Array:
        """The host buffer of the next upload, free to be written to."""
        num_buffers = len(self._arrays)
        if self._num_started - self._num_done >= num_buffers:
            self._wait()
            self._num_done = self._num_started
        return self._arrays[self._num_started % num_buffers]

    def upload(self, num_ints: int) -> int:
        """Start the copy of the buffer's front to the device; return the upload's number."""
        turn = self._num_started % len(self._arrays)
        end = -(-num_ints // _COPY_INTS) * _COPY_INTS
        views = self._views[turn].get(end)
        if views is None:
            views = self.device_buffer[:end], self._host_buffers[turn][:end]
            self._views[turn][end] = views
        views[0].copy_(views[1], non_blocking=True)
        self._num_started += 1
        return self._num_started

    def done(self, upload: int) -> None:
        """The device is past this upload: past whatever was launched right after it."""
        if upload > self._num_done:
            self._num_done = upload


class Results:
    """Rotating pinned buffers: one for each step in flight, one being written, one being read."""

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


class SliceStaging(Staging):
    """Uploads of a step that a launch takes slice by slice: a block of int32 for each slice."""

    def __init__(
        self, block_ints: int, max_slices: int, num_buffers: int, stream: DeviceStream, like: Tensor
    ) -> None:
        """On the device of `like`."""
        self.block = like.new_zeros(block_ints, dtype=torch.int32)
        packed = like.new_zeros(max_slices * block_ints, dtype=torch.int32)
        super().__init__(packed, num_buffers, stream.synchronize)

    def blocks(self, num_slices: int) -> Int32Array:
        """The blocks of the next upload, all zeros, to be written to."""
        blocks = self.buffer()[: num_slices * len(self.block)]
        blocks.fill(0)
        return blocks.reshape(num_slices, -1)

    def upload_blocks(self, num_slices: int) -> int:
        return self.upload(num_slices * len(self.block))

    def select(self, number: int) -> None:
        """Give the next launch the block of this slice of the upload."""
        size = len(self.block)
        self.block.copy_(self.device_buffer[number * size : (number + 1) * size])
