"""Kernels compiled by several processes before the first of them is launched.

Launches compile what they lack one after the other: 21 s of an 8B model's first start on a machine
of 16 cores. Here passes are gone through without launching anything, and what they would launch is
compiled by forks of this process, into Triton's cache on disk: threads would wait for one another
wherever the compiler is Python. What is on disk is loaded by threads.
"""

from __future__ import annotations

import hashlib
import os
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any

import torch
import triton
from triton.runtime import driver
from triton.runtime.cache import get_cache_manager, triton_key
from triton.runtime.jit import KernelInterface

from services.compute.models.alike_layers import NOTING
from services.compute.runner.cuda.forked import fork_for

MAX_WORKERS = 16

LOADING = threading.Lock()
"""On what launches a kernel: Triton 3.6 imports all of them as one module's name, so that of two
threads one may get the other's, which takes other arguments."""


def begin_hashing(device: torch.device) -> threading.Thread:
    """Hash Triton meanwhile, as the key of every kernel wants it: 0.4 s, mostly without Python's
    lock."""
    hashing = threading.Thread(target=triton_key if device.type == "cuda" else None)
    hashing.start()
    return hashing


class Kernel:
    """What a launch asks for, before it is compiled or loaded."""

    def __init__(self, key: str, compiled: Callable[[], Any]) -> None:
        self._name = hashlib.sha256(key.encode()).hexdigest()
        self._compiled = compiled
        self.keepers: list[Callable[[Any], None]] = []
        self.is_begun = False

    @property
    def is_on_disk(self) -> bool:
        return any(Path(get_cache_manager(self._name).cache_dir).glob("__grp__*"))

    def compile(self) -> None:
        """Onto the disk, and what launches it, which Triton 3.6 has the C compiler compile."""
        kernel = self._compiled()
        driver.active.launcher_cls(kernel.src, kernel.metadata)

    def load(self, may_compile: Callable[[], bool]) -> None:
        """Keep it for launches, or nothing: then a launch compiles it again, and raises."""
        kernel = None
        if self.is_on_disk or may_compile():
            self.is_begun = True
            with suppress(Exception):
                kernel = self._compiled()
                with LOADING:
                    assert kernel.run is not None  # asked for: that loads it
        for keep in self.keepers:
            keep(kernel)


class Kernels(triton.AsyncCompileMode):  # type: ignore[misc]
    """Those of some launches, which Triton hands over to be compiled some other time."""

    def __init__(self, device: torch.device) -> None:
        super().__init__(executor=None)
        self._device = device
        self._kernels: dict[str, Kernel] = {}

    def submit(
        self, key: str, compile_fn: Callable[[], Any], finalize_fn: Callable[[Any], None]
    ) -> Kernel:
        kernel = self._kernels.setdefault(key, Kernel(key, compile_fn))
        kernel.keepers.append(finalize_fn)
        finalize_fn(kernel)  # so that Triton 3.6, too, does not ask again with every launch
        return kernel

    def note(self, launch: Callable[[], object]) -> list[Kernel]:
        """Those of this launch that none before it has asked for; all else that it does is done, on
        whatever is in memory."""
        num_before = len(self._kernels)
        with self, _nothing_launched():
            launch()
        return list(self._kernels.values())[num_before:]

    @property
    def missing(self) -> list[Kernel]:
        return [kernel for kernel in self._kernels.values() if not kernel.is_on_disk]

    def __len__(self) -> int:
        return len(self._kernels)

    def load(
        self,
        may_begin: Callable[[], bool] = lambda: True,
        done: Callable[[], object] = lambda: None,
    ) -> None:
        """Compile and load all, as long as one may begin; calls `done` after each.

        What fails is left to who launches it.
        """
        missing = self.missing
        left = dict.fromkeys(self._kernels.values())
        num_workers = min(MAX_WORKERS, len(os.sched_getaffinity(0)))
        # first: a fork beside threads could wait forever for a lock that one of them held
        forks = fork_for([kernel.compile for kernel in missing], num_workers, may_begin)
        enter = partial(torch.cuda.set_device, self._device)
        with forks as compiled, ThreadPoolExecutor(num_workers, initializer=enter) as pool:

            def load(kernel: Kernel) -> None:
                del left[kernel]
                pool.submit(kernel.load, may_begin).add_done_callback(lambda _: done())

            for kernel in left.keys() - missing:
                load(kernel)
            for place in compiled:
                load(missing[place])
            for kernel in list(left):
                load(kernel)


@contextmanager
def _nothing_launched() -> Iterator[None]:
    """Triton compiles where it would launch."""
    launched = KernelInterface.__getitem__

    def compiled(kernel: Any, grid: Any) -> Any:
        return partial(kernel.run, grid=grid, warmup=True)

    KernelInterface.__getitem__ = compiled
    noting = NOTING.set(True)
    try:
        yield
    finally:
        NOTING.reset(noting)
        KernelInterface.__getitem__ = launched
