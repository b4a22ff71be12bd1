"""Which runner serves which device, and what the CUDA runner needs besides a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.errors import ConfigError
from services.compute.config import ComputeSettings
from services.compute.runner.executor import Executor
from services.compute.runner.protocol import Runner

if TYPE_CHECKING:  # it needs torch
    from services.compute.distributed.ranks import Ranks

COMPILERS = ("cc", "gcc", "clang")

KERNELS_KEPT = {"ONEDNN_PRIMITIVE_CACHE_CAPACITY": "128", "LRU_CACHE_CAPACITY": "128"}
"""For oneDNN and for torch's layer above it, which keep 1,024 each by default, of every shape of a
product: on the CPU the demo model's process grew from 290 MB to over 1,000 with prompts of
all lengths. With 128 it stays below 500."""

HUGE_PAGES = {"THP_MEM_ALLOC_ENABLE": "1"}
"""Torch asks for huge pages for what takes 2 MiB and more: weights are read once a step, and with
pages of 4 KiB most of their addresses are looked up in memory. With two threads, a head of 32,000
rows in 8 bits takes 1.25 ms so and 1.6 without."""


NO_MULTICAST = {"TORCH_SYMM_MEM_DISABLE_MULTICAST": "1"}
"""Ranks write to one another; not every host whose GPUs are linked allows one write to all."""


def load_runner(folder: Path, settings: ComputeSettings) -> Runner:
    """Load the model in a folder onto the device that the settings name.

    Raises ModelError or ConfigError when the folder or the device does not allow it.
    """
    # each is imported only when it is chosen: sim needs no torch, the CPU no triton
    if settings.device == "sim":
        from services.compute.runner import sim

        if settings.record_dir:
            raise ConfigError(
                "compute.record_dir: the device sim has nothing to record; leave it out."
            )
        if settings.tensor_parallel_size > 1:
            raise ConfigError(
                "compute.tensor_parallel_size: the device sim has no model to split; leave it out."
            )
        return sim.load(folder, settings)
    executor = load_all_ranks(folder, settings)
    from services.compute.runner.packing_runner import PackingRunner
    from services.compute.runner.recording import RecordingExecutor

    if settings.record_dir:
        executor = RecordingExecutor.begin(executor, folder, settings)
    return PackingRunner(executor)


def load_all_ranks(folder: Path, settings: ComputeSettings) -> Executor:
    """Load a model as what executes uploads: here, or here and in a process for each other rank."""
    for name, value in (KERNELS_KEPT | HUGE_PAGES | NO_MULTICAST).items():
        os.environ.setdefault(name, value)  # read when torch is imported
    if settings.tensor_parallel_size == 1:
        return load_executor(folder, settings)
    from services.compute.runner.group import FollowerGroup
    from services.compute.runner.leader import LeaderExecutor

    group = FollowerGroup(folder, settings)  # first: all ranks load at the same time
    try:
        executor = load_executor(folder, settings, join(settings, 0, group.store))
        group.wait_until_ready(executor.spec())
    except BaseException as error:
        group.close_after(error)
        raise
    return LeaderExecutor(executor, group)


def join(settings: ComputeSettings, rank: int, store: str) -> Ranks:
    """Meet the other ranks through a file that all of them can open."""
    from services.compute.distributed.gloo import GlooRanks

    size = settings.tensor_parallel_size
    if _takes_cuda(settings):
        import torch

        if (num_devices := torch.cuda.device_count()) < size:
            raise ConfigError(
                f"compute.tensor_parallel_size is {size}, and torch finds {num_devices} CUDA "
                "devices; lower it."
            )
        if size & (size - 1):  # ranks that meet are a block of a kernel
            raise ConfigError(
                f"compute.tensor_parallel_size is {size}; on GPUs it has to be a power of two."
            )
        torch.cuda.set_device(rank)
    return GlooRanks(rank, size, store)


def load_executor(folder: Path, settings: ComputeSettings, ranks: Ranks | None = None) -> Executor:
    """Load the model, or a rank's part of it, onto the CPU or a GPU."""
    from services.compute.distributed.ranks import ALONE

    if _takes_cuda(settings):
        check_toolchain()  # before minutes go into loading
        from services.compute.runner.cuda.load import load_cuda

        return load_cuda(folder, settings, ranks or ALONE)
    from services.compute.runner.eager import load_eager

    return load_eager(folder, settings, ranks or ALONE)


def _takes_cuda(settings: ComputeSettings) -> bool:
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "compute.device is cuda, and torch finds no CUDA device; use auto or cpu."
        )
    return settings.device != "cpu" and torch.cuda.is_available()


def check_toolchain(
    has_module: Callable[[str], bool] = lambda name: importlib.util.find_spec(name) is not None,
    find_program: Callable[[str], str | None] = shutil.which,
) -> None:
    """Raise ConfigError, which says what to install, where Triton could not compile."""
    if not has_module("triton"):
        raise ConfigError(
            "compute.device is cuda, and Triton is not installed; "
            "install it with `pip install triton`, or use cpu."
        )
    if not os.environ.get("CC") and not any(map(find_program, COMPILERS)):
        raise ConfigError(
            "compute.device is cuda, and Triton finds no C compiler for the launchers of its "
            "kernels; install gcc with Python's headers (Debian and Ubuntu: apt install gcc "
            "python3-dev), name one in CC, or use cpu."
        )
