"""CUDA graphs: a step of hundreds of kernels as one launch of about ten microseconds."""

from __future__ import annotations

import gc
from collections.abc import Callable, Hashable, Iterator
from contextlib import contextmanager

import torch

from services.compute.runner.cuda.stream import Mark


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

    They may share it because they run one after the other and nothing lives in it from one graph
    to the next: what does is in buffers made before.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device)  # type: ignore[no-untyped-call]
        self._pool = torch.cuda.graph_pool_handle()
        self._graphs: dict[Hashable, torch.cuda.CUDAGraph] = {}
        torch.cuda.set_stream(self._stream)

    def record(self, name: Hashable, launch: Callable[[], None]) -> None:
        """Run once, so that kernels are compiled and libraries loaded, then capture."""
        launch()
        self._stream.synchronize()
        graph = torch.cuda.CUDAGraph()
        with (
            _no_garbage_collection(),
            torch.cuda.graph(
                graph, pool=self._pool, stream=self._stream, capture_error_mode="thread_local"
            ),
        ):
            launch()
        self._graphs[name] = graph

    def replay(self, name: Hashable) -> None:
        """Launch the graph."""
        self._graphs[name].replay()

    def mark(self) -> Mark:
        """An event with a time."""
        event = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record(self._stream)
        return event

    def forget(self) -> None:
        """Drop all graphs and their memory."""
        self._graphs.clear()

    def synchronize(self) -> None:
        """Wait for the stream."""
        self._stream.synchronize()
