"""Kernels compiled by several threads before the first of them is launched.

Launches compile what they lack one after the other: 21 s of an 8B model's first start on a machine
of 16 cores. Here passes are gone through without launching anything, and what they would launch is
compiled meanwhile, most of which is work of LLVM, ptxas and the C compiler.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Iterator
from concurrent.futures import Executor, Future, ThreadPoolExecutor
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import triton
from triton.runtime.jit import KernelInterface

MAX_THREADS = 16


class Loading(Executor):
    """Compiles, and makes what is compiled ready to be launched: the launcher of a kernel is
    compiled by the C compiler when it is first asked for."""

    def __init__(self, device: torch.device) -> None:
        num_threads = min(MAX_THREADS, os.cpu_count() or 1)
        enter = partial(torch.cuda.set_device, device)
        self._pool = ThreadPoolExecutor(num_threads, initializer=enter)

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        return self._pool.submit(_loaded, fn)

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        self._pool.shutdown(wait, cancel_futures=cancel_futures)


def _loaded(compiled: Callable[[], Any]) -> Any:
    kernel = compiled()
    assert kernel.run is not None  # asked for: that loads it
    return kernel


def compile_ahead(launches: Iterable[Callable[[], None]], device: torch.device) -> None:
    """Compile what these launch; all else that they do is done, on whatever is in memory.

    What cannot be compiled is left to who launches it.
    """
    compiling = triton.AsyncCompileMode(pool := Loading(device), ignore_errors=True)
    with pool, compiling, _nothing_launched():
        for launch in launches:
            launch()


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Triton compiles where it would launch."""
    launched = KernelInterface.__getitem__

    def compiled(kernel: Any, grid: Any) -> Any:
        return partial(kernel.run, grid=grid, warmup=True)

    KernelInterface.__getitem__ = compiled
    try:
        yield
    finally:
        KernelInterface.__getitem__ = launched
