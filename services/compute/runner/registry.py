"""Which runner serves which device, and what the CUDA runner needs besides a GPU."""

from __future__ import annotations

import importlib.util
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING

from common.config import LinkSettings
from common.errors import ConfigError
from common.host import processor_name
from common.speculative import NO_DRAFTER, DraftPlace, check_place, read_speculative
from services.compute.config import ComputeSettings
from services.compute.runner.executor import Executor
from services.compute.runner.protocol import Runner

if TYPE_CHECKING:  # they need torch
    from services.compute.distributed.ranks import Ranks
    from services.compute.distributed.stages import Stages
    from services.compute.runner.stage_place import StagePlace

NO_LINKS = LinkSettings.model_validate({})

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


TENSOR, CONTEXT = "tensor_parallel_size", "prefill_context_parallel_size"


def load_runner(folder: Path, settings: ComputeSettings, links: LinkSettings = NO_LINKS) -> Runner:
    """Load the model in a folder onto the device that the settings name; `links` are those to its
    stages on other hosts.

    Raises ModelError or ConfigError when the folder or the device does not allow it.
    """
    # each is imported only when it is chosen: sim needs no torch, the CPU no triton
    if settings.device == "sim":
        from services.compute.runner import sim

        if settings.record_dir:
            raise ConfigError(
                "compute.record_dir: the device sim has nothing to record; leave it out."
            )
        if settings.speculative_config not in NO_DRAFTER:
            raise ConfigError(
                "compute.speculative_config: the device sim has no text to guess from; leave "
                "it out."
            )
        for name in (TENSOR, "pipeline_parallel_size", CONTEXT):
            if getattr(settings, name) > 1:
                raise ConfigError(
                    f"compute.{name}: the device sim has no model to split; leave it out."
                )
        return sim.load(folder, settings)
    executor = load_whole(folder, settings, links)
    from services.compute.runner.packing_runner import PackingRunner

    return PackingRunner(executor)


def load_whole(folder: Path, settings: ComputeSettings, links: LinkSettings = NO_LINKS) -> Executor:
    """Load a model as what executes uploads, and records them if the settings say so: here, or here
    and in a process for each other rank or stage."""
    set_environment()
    check_drafter(settings)
    if settings.pipeline_parallel_size > 1:
        return _load_stages(folder, settings, links)
    if settings.num_ranks > 1:
        check_ranks(settings)
        return _recorded(_load_ranks(folder, settings), folder, settings)
    return _recorded(load_executor(folder, settings), folder, settings)


def _recorded(executor: Executor, folder: Path, settings: ComputeSettings) -> Executor:
    from services.compute.runner.recording import RecordingExecutor

    if not settings.record_dir:
        return executor
    return RecordingExecutor.begin(executor, folder, settings)


def set_environment() -> None:
    """What is read when torch is imported."""
    for name, value in (KERNELS_KEPT | HUGE_PAGES | NO_MULTICAST).items():
        os.environ.setdefault(name, value)


def _load_ranks(
    folder: Path,
    settings: ComputeSettings,
    stages: Stages | None = None,
    place: StagePlace | None = None,
) -> Executor:
    from services.compute.runner.group import FollowerGroup
    from services.compute.runner.leader import LeaderExecutor

    group = FollowerGroup(folder, settings, place=place)  # first: all ranks load at the same time
    try:
        ranks = join(settings, 0, group.store, place)
        executor = load_executor(folder, settings, ranks, stages)
        group.wait_until_ready(executor.spec())
    except BaseException as error:
        group.close_after(error)
        raise
    return LeaderExecutor(executor, group)


def _load_stages(folder: Path, settings: ComputeSettings, links: LinkSettings) -> Executor:
    from services.compute.runner.pipeline import PipelineExecutor
    from services.compute.runner.stage_group import StageGroup

    check_stages(settings)
    device = "cuda" if _takes_cuda(settings) else "cpu"  # what one has, all have
    settings = settings.model_copy(update={"device": device})
    group = StageGroup(folder, settings, links)  # first: all stages load at the same time
    try:
        executor = load_stage(folder, settings, group.stages, group.place)
        group.wait_until_ready(executor.spec())
        # a step at a time, and not as steps are planned: so it can be replayed
        executor = _recorded(executor, folder, settings)
    except BaseException:
        group.close()
        raise
    return PipelineExecutor(executor, group)


def check_ranks(settings: ComputeSettings) -> None:
    """Raise ConfigError for what ranks cannot be had together with."""
    if settings.tensor_parallel_size > 1 and settings.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"compute.{CONTEXT}: ranks that share the tokens of prompts cannot have parts of the "
            f"model as well yet; leave compute.{TENSOR} out."
        )


def check_stages(settings: ComputeSettings) -> None:
    """Raise ConfigError for what stages cannot be had together with."""
    if settings.prefill_context_parallel_size > 1:
        raise ConfigError(
            f"compute.{CONTEXT}: ranks that share the tokens of prompts cannot have stages as well "
            "yet; leave compute.pipeline_parallel_size out."
        )
    if _takes_cuda(settings) and not settings.pipeline_stages:
        _check_devices(settings, settings.pipeline_parallel_size * settings.num_ranks)


def _check_devices(settings: ComputeSettings, num_here: int) -> None:
    """Raise ConfigError where there is no device for each of so many processes."""
    import torch

    if (num_devices := torch.cuda.device_count()) < num_here:
        names = (TENSOR, CONTEXT, "pipeline_parallel_size")
        sizes = {name: getattr(settings, name) for name in names}
        asked = " and ".join(f"compute.{name} {size}" for name, size in sizes.items() if size > 1)
        raise ConfigError(
            f"{asked}: that takes {num_here} CUDA devices, and torch finds {num_devices}; lower it."
        )


def check_drafter(settings: ComputeSettings) -> None:
    """Raise ConfigError for a model or a head that is to draft where it cannot yet."""
    drafts = read_speculative(settings.speculative_config)
    if drafts is not None and drafts.has_weights:
        ranks, copies = settings.tensor_parallel_size, settings.prefill_context_parallel_size
        sizes = ranks, copies, settings.pipeline_parallel_size
        check_place(drafts, DraftPlace(_takes_cuda(settings), *sizes))


def load_stage(
    folder: Path, settings: ComputeSettings, stages: Stages, place: StagePlace | None = None
) -> Executor:
    """Load a stage's part of the model onto the device of the settings, which no stage chooses; or
    a part of that here, and the others in processes that find theirs by the stage's place."""
    if settings.num_ranks > 1:
        return _load_ranks(folder, settings, stages, place)
    return load_executor(folder, settings, stages=stages)


def join(
    settings: ComputeSettings, rank: int, store: str, place: StagePlace | None = None
) -> Ranks:
    """Meet the other ranks, of the same stage, through a file that all of them can open."""
    from services.compute.distributed.gloo import GlooRanks

    size, name = settings.num_ranks, _ranks_name(settings)
    if _takes_cuda(settings):
        import torch

        first = 0 if place is None else place.number_here * size
        _check_devices(settings, first + size)
        if size & (size - 1):  # ranks that meet are a block of a kernel
            raise ConfigError(f"compute.{name} is {size}; on GPUs it has to be a power of two.")
        torch.cuda.set_device(first + rank)
    return GlooRanks(rank, size, store)


def _ranks_name(settings: ComputeSettings) -> str:
    """The setting that says how many ranks there are."""
    return TENSOR if settings.tensor_parallel_size > 1 else CONTEXT


def load_executor(
    folder: Path,
    settings: ComputeSettings,
    ranks: Ranks | None = None,
    stages: Stages | None = None,
) -> Executor:
    """Load the model, or a rank's or a stage's part of it, onto the CPU or a GPU."""
    from services.compute.distributed.ranks import ALONE
    from services.compute.distributed.stages import ONE_STAGE

    executor = _load_onto_device(folder, settings, ranks or ALONE, stages or ONE_STAGE)
    if ranks is None or settings.prefill_context_parallel_size == 1:
        return executor
    from services.compute.runner.context_executor import ContextExecutor

    return ContextExecutor(executor, ranks.rank, ranks.size)


def _load_onto_device(
    folder: Path, settings: ComputeSettings, ranks: Ranks, stages: Stages
) -> Executor:
    if _takes_cuda(settings):
        check_toolchain()  # before minutes go into loading
        from services.compute.runner.cuda.load import load_cuda

        return load_cuda(folder, settings, ranks, stages)
    from services.compute.runner.eager import load_eager

    return load_eager(folder, settings, ranks, stages)


def _takes_cuda(settings: ComputeSettings) -> bool:
    import torch

    if settings.device == "cuda" and not torch.cuda.is_available():
        raise ConfigError(
            "compute.device is cuda, and torch finds no CUDA device; use auto or cpu."
        )
    return settings.device != "cpu" and torch.cuda.is_available()


def describe_device(settings: ComputeSettings) -> dict[str, object]:
    """What the times of a model's steps depend on beside model and settings."""
    import torch

    on_gpu = _takes_cuda(settings)
    name = torch.cuda.get_device_name() if on_gpu else processor_name()
    threads = 0 if on_gpu else torch.get_num_threads()
    return {"device": name, "threads": threads, "torch": str(torch.__version__)}


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
