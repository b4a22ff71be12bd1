"""Staging: host memory that the device copies a step's upload from while the next is written."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

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
    """

    __slots__ = (
        "_arrays",
        "_device_buffer",
        "_host_buffers",
        "_num_done",
        "_num_started",
        "_views",
        "_wait",
    )

    def __init__(self, device_buffer: Tensor, num_buffers: int, wait: Callable[[], None]) -> None:
        """`wait` returns when every copy started so far is done (a stream's `synchronize`)."""
        size, on_cuda = len(device_buffer), device_buffer.is_cuda
        self._device_buffer = device_buffer
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
            views = self._device_buffer[:end], self._host_buffers[turn][:end]
            self._views[turn][end] = views
        views[0].copy_(views[1], non_blocking=True)
        self._num_started += 1
        return self._num_started

    def done(self, upload: int) -> None:
        """The device is past this upload: past whatever was launched right after it."""
        if upload > self._num_done:
            self._num_done = upload
