"""The stream that orders everything on the device, the graphs recorded for it, and its clock.

A protocol, so that the runner's own logic is tested where there is no GPU.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager
from typing import Any, Protocol

import structlog
import torch
from torch import Tensor

from services.compute.kv.transfer import PagePairs
from services.compute.layers.paged_cache import copy_pages
from services.compute.runner.cuda.batch_copy import BatchCopy


class Mark(Protocol):
    """A point in the stream."""

    def query(self) -> bool:
        """Whether the device has passed it."""
        ...

    def synchronize(self) -> None:
        """Wait until it has."""
        ...

    def elapsed_time(self, other: Any, /) -> float:
        """Milliseconds from this mark to a later one, both passed."""
        ...


class DeviceStream(Protocol):
    """Launches by name: recorded once, replayed at every step."""

    def rehearse(self, launch: Callable[[], None]) -> None:
        """Run it for nothing, on whatever is in memory, so that what it needs is there."""
        ...

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        """Make `launch` replayable."""
        ...

    def replay(self, name: Hashable) -> None:
        """Launch again, without waiting."""
        ...

    def mark(self) -> Mark:
        """Mark the end of all that has been launched."""
        ...

    def synchronize(self) -> None:
        """Wait for all of it."""
        ...

    def beside(self) -> CopyStream:
        """Make a stream of copies that runs beside this one."""
        ...


class CopyStream(Protocol):
    """Copies of pages, one transfer after the other, beside the stream that computes."""

    def copy_pages(self, source: Tensor, target: Tensor, pages: PagePairs) -> Mark:
        """Start the copies, which begin behind what the other stream has been given so far.

        Returns the mark of their end. The other stream does not wait for it.
        """
        ...

    def synchronize(self) -> None:
        """Wait for all of them."""
        ...


@contextmanager
def _no_garbage_collection() -> Iterator[None]:
    """Nothing that holds a graph or an event may be destroyed now: that would break the capture."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if was_enabled:
            gc.enable()


class GraphStream:
    """A CUDA stream of its own, and the graphs captured on it, which share one memory pool.

    A graph launches a step's hundreds of kernels at once, in about ten microseconds.

    They may share it because they run one after the other and nothing lives in it from one graph
    to the next: what does is in buffers made before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        torch.cuda.set_stream(self._stream)

    def rehearse(self, launch: Callable[[], None]) -> None:
        launch()
        self._stream.synchronize()

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        graph = torch.cuda.CUDAGraph()
        # Relaxed, as kernels of this size alone may have to be loaded on the way.
        with (
            _no_garbage_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="relaxed"
            ),
        ):
            launch()
        self._graphs[name] = graph

    def replay(self, name: Hashable) -> None:
        self._graphs[name].replay()

    def mark(self) -> Mark:
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def forget(self) -> None:
        self._graphs.clear()

    def synchronize(self) -> None:
        self._stream.synchronize()

    def beside(self) -> SideStream:
        return SideStream(self._device, self._stream)


class SideStream:
    """A CUDA stream of the lowest priority, on which the copy engines move pages.

    A transfer is one call of the driver, or where it is too old (below CUDA 12.8) one call for each
    run of consecutive pages.
    """

    def __init__(self, device: torch.device, compute: torch.cuda.Stream) -> None:
        self._compute = compute
        self._stream = torch.cuda.Stream(device, priority=0)  # type: ignore[no-untyped-call]
        self._batch = BatchCopy.find()

    def copy_pages(self, source: Tensor, target: Tensor, pages: PagePairs) -> Mark:
        # Behind the steps that wrote what leaves, or that still read what pages held before.
        self._stream.wait_stream(self._compute)
        if self._batch is None or not self._copied_at_once(self._batch, source, target, pages):
            with torch.cuda.stream(self._stream):
                copy_pages(source, target, pages)
        event = torch.cuda.Event()  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def _copied_at_once(
        self, batch: BatchCopy, source: Tensor, target: Tensor, pages: PagePairs
    ) -> bool:
        error = batch.copy_pages(source, target, pages, self._stream.cuda_stream)
        if error:  # whatever it has started is copied again, in the same order
            structlog.get_logger().warning("copies are not batched", error=error)
            self._batch = None
        return not error

    def synchronize(self) -> None:
        self._stream.synchronize()


SLACK_S = 0.001
"""How far the chain may stand behind what the host saw: waking it takes a part of this."""


class DeviceClock:
    """When steps began and ended on the device, told in the host's monotonic time.

    CUDA events know the time between two of them to half a microsecond, not the time of day. Each
    step, taken in its order, is measured from the end of the one before; that chain is tied to the
    host's clock wherever the host sees a step end.
    """

    def __init__(self) -> None:
        self._last_end: Mark | None = None
        self._last_end_s = 0.0

    def times_of(self, begin: Mark, end: Mark, now_s: float, waited: bool) -> tuple[float, float]:
        """Start and end of a step that has ended by now; right now, if the host waited for it."""
        duration_s = begin.elapsed_time(end) / 1e3
        if self._last_end is None:
            start_s = now_s - duration_s
        else:
            start_s = self._last_end_s + self._last_end.elapsed_time(begin) / 1e3
        end_s = min(start_s + duration_s, now_s)
        if waited and end_s < now_s - SLACK_S:
            end_s = now_s
        self._last_end, self._last_end_s = end, end_s
        return start_s, end_s
