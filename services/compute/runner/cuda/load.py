"""From a model folder to a CUDA executor: weights, kernels, measured KV memory, recorded graphs."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import structlog
import torch

from common.errors import ConfigError
from common.host import cache_folder
from common.telemetry.log import Progress
from services.compute.config import ComputeSettings
from services.compute.distributed.context import MORE_ROWS
from services.compute.distributed.expert_balance import layout_of
from services.compute.distributed.ranks import ALONE, RankGroups, Ranks
from services.compute.distributed.stages import ONE_STAGE, Stages
from services.compute.kernels.choice_files import (
    SHIPPED,
    Found,
    file_in,
    keep,
    read,
    read_own,
)
from services.compute.kernels.drafts.draft_tokens import DraftRule
from services.compute.kernels.ranks.tree_sum import NUM_SEGMENTS
from services.compute.layers.expert_link import (
    ExpertLink,
    SymmetricLink,
    expert_pieces,
    handed_bytes,
)
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.weighted_layers import (
    AnyLinear,
    KernelLinears,
    Linear,
    check_segments,
)
from services.compute.models.decoder import Decoder
from services.compute.runner.cuda.choosing import Measuring, Meter, chosen_by_first
from services.compute.runner.cuda.compiling import Kernels, begin_hashing
from services.compute.runner.cuda.device_counters import DeviceCounters
from services.compute.runner.cuda.device_model import MachineSizes
from services.compute.runner.cuda.executor import CudaExecutor, ServedExperts
from services.compute.runner.cuda.expert_moves import ExpertMoves
from services.compute.runner.cuda.handover import NO_HANDOVER, Handover, StageHandover
from services.compute.runner.cuda.load_drafter import check_drafter, load_drafter
from services.compute.runner.cuda.meter import GraphMeter
from services.compute.runner.cuda.step_machine import StepMachine, Uses
from services.compute.runner.cuda.stream import DeviceStream, GraphStream
from services.compute.runner.model_loader import Limits, ModelLoader
from services.compute.speculative.draft_counts import DRAFTERS, NGRAM

STALL_AFTER_S = 5.0  # nothing is compiled after the start, and a step takes milliseconds
GRAPH_MARGIN_BYTES = 512 << 20
"""For what the rehearsal cannot see: fragmentation, and libraries that take memory later."""

GIB = 1 << 30

REHEARSED_PAGES = 2
"""A page alone has no distance to the next one, which kernels are compiled for."""

make_link: Callable[[int, torch.device, Ranks], ExpertLink] = SymmetricLink
"""Through which experts are handed on; tests have one of threads."""

DENSE_SHARE = 0.15
"""Of the memory that may be used: 8 billion weights in 16 bits take 0.12 of an H200's."""


class StartLog:
    """Logs how long each part of the start took, and the memory in use after it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._log = structlog.get_logger()
        self._began_s = time.monotonic()

    def say(self, event: str, **more: object) -> None:
        now_s = time.monotonic()
        memory = {}
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            memory = {"used_gib": round((total - free) / GIB, 2)}
        self._log.info(event, seconds=round(now_s - self._began_s, 2), **memory, **more)
        self._began_s = now_s


@torch.inference_mode()
def load_cuda(
    path: Path, settings: ComputeSettings, ranks: Ranks = ALONE, stages: Stages = ONE_STAGE
) -> CudaExecutor:
    """Load a model onto a GPU: that of its rank, among those of its stage on this host."""
    stage_here = stages.number % stages.num_here
    device = torch.device("cuda", stage_here * ranks.size + ranks.rank)
    torch.cuda.set_device(device)
    return load_on(path, settings, device, GraphStream(device), ranks, stages)


def load_on(
    path: Path,
    settings: ComputeSettings,
    device: torch.device,
    stream: DeviceStream,
    ranks: Ranks = ALONE,
    stages: Stages = ONE_STAGE,
) -> CudaExecutor:
    try:
        return _load(path, settings, device, stream, ranks, stages)
    except torch.OutOfMemoryError as error:  # trying again would not help
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "The GPU has too little memory for the model and its largest step; choose a smaller "
            "model, or lower compute.max_num_seqs, compute.max_prefill_tokens or, where it is set, "
            f"compute.max_batched_token_mem. ({reason})"
        ) from error


def _load(
    path: Path,
    settings: ComputeSettings,
    device: torch.device,
    stream: DeviceStream,
    ranks: Ranks,
    stages: Stages,
) -> CudaExecutor:
    log, hashing = StartLog(device), begin_hashing(device)
    loader = ModelLoader.read(path, settings, device, ranks, stages)
    check_drafter(loader)
    sizes = machine_sizes(loader)
    make_linear = _linears_of(loader)
    decoder = loader.decoder(make_linear)
    _check_experts(loader, decoder)
    log.say("weights loaded", dtype=str(loader.dtype).removeprefix("torch."))
    moves = expert_moves(loader, decoder, stream)
    make_drafter = load_drafter(loader, decoder, make_linear)
    if loader.drafter is not None or loader.head is not None:
        log.say("weights of the drafter loaded")
    uses = Uses(loader.pooling, make_drafter)
    groups = RankGroups(loader.ranks, loader.context)
    machine = StepMachine(decoder, sizes, stream, settings.batch_invariant, uses, groups)
    if device.type == "cuda" and not settings.batch_invariant:
        take_known(machine, device)
    hashing.join()
    limits = _measure(loader, machine, log)
    cache = loader.cache(limits.num_pages, limits.num_host_pages)
    if machine.drafter is not None:
        machine.drafter.attach(limits.num_pages, limits.num_host_pages)
    if device.type == "cuda" and not settings.batch_invariant:
        choose(machine, cache, GraphMeter(stream, device), log, loader.context)
    for number in machine.record(cache):
        if number == machine.num_launches or number % 32 == 0:
            log.say("graphs recorded", done=number, of=machine.num_launches)
    spec = loader.spec(limits, decoder.has_head, STALL_AFTER_S, overlaps=True)
    spec = replace(spec, rows_together=machine.rows_together)
    tokens = decoder.expert_tokens
    counters = DeviceCounters(tokens, stream) if tokens else None
    handover: Handover = NO_HANDOVER
    if stages.count > 1:
        handover = StageHandover(stages, stream, machine.hidden_TE)
    return CudaExecutor(machine, cache, spec, stream, ServedExperts(counters, moves), handover)


def _linears_of(loader: ModelLoader) -> KernelLinears:
    return KernelLinears(loader.dtype, _keeps_dense(loader), _num_segments(loader))


def expert_moves(
    loader: ModelLoader, decoder: Decoder[AnyLinear], stream: DeviceStream
) -> ExpertMoves | None:
    """What exchanges experts while the model serves, where it is to."""
    placement, ranks, mixtures = loader.placement, loader.ranks, decoder.mixtures
    if placement is None or not placement.moves or not mixtures:  # as a dense stage
        return None
    layouts = {
        layer: layout_of(placement.holders(layer, experts.routing.num_experts), ranks.size)
        for layer, experts in mixtures.items()
    }
    num_bytes = max(handed_bytes(expert_pieces(each, 0)) for each in mixtures.values())
    link = make_link(num_bytes, loader.device, ranks)
    return ExpertMoves(mixtures, layouts, ranks.rank, link, stream)


def machine_sizes(loader: ModelLoader) -> MachineSizes:
    settings = loader.settings
    return MachineSizes(
        max_tokens=loader.max_step_tokens,
        max_rows=settings.max_num_seqs,
        max_positions=loader.max_positions,
        page_tokens=settings.page_tokens,
        layout=loader.layout,
        num_buffers=settings.in_flight_steps + 2,
        drafts=_draft_rule(loader),
        more_rows=MORE_ROWS if loader.context.size > 1 else 0,
        token_bytes=max(-(-form.num_bytes // form.page_tokens) for form in loader.formats.values()),
    )


def _draft_rule(loader: ModelLoader) -> DraftRule | None:
    drafts = loader.drafts
    if drafts is None:
        return None
    return DraftRule(
        loader.max_drafts,
        drafts.prompt_lookup_min,
        drafts.prompt_lookup_max,
        drafts.synthetic_acceptance_rate,
        DRAFTERS.index(drafts.method) if drafts.has_weights else NGRAM,
        loader.stages.count > 1,
    )


def _keeps_dense(loader: ModelLoader) -> bool:
    """Whether weights in the model's dtype fit beside those in fewer bits; experts have no such
    copies."""
    if loader.device.type != "cuda" or loader.settings.batch_invariant:
        return False
    free_bytes, total_bytes = torch.cuda.mem_get_info(loader.device)
    usable_bytes = min(free_bytes, total_bytes * loader.settings.gpu_memory_utilization)
    num_weights = loader.config.shape.num_common_weights // loader.ranks.size
    num_bytes = num_weights * loader.dtype.itemsize
    return num_bytes < usable_bytes * DENSE_SHARE


def _num_segments(loader: ModelLoader) -> int:
    """Of each sum over ranks that this one has, if such sums have the same bits with any number."""
    size = loader.ranks.size
    if not loader.settings.batch_invariant:
        return 0
    if size > NUM_SEGMENTS:
        raise ConfigError(
            f"compute.tensor_parallel_size is {size}: with compute.batch_invariant sums are made "
            f"of {NUM_SEGMENTS} segments, of which each rank has one at least; lower it."
        )
    return NUM_SEGMENTS // size


def _check_experts(loader: ModelLoader, decoder: Decoder[AnyLinear]) -> None:
    """Raise ConfigError where parts of experts that are numbers are no whole segments."""
    shape, num_segments = loader.config.shape.experts, _num_segments(loader)
    if shape is None or not num_segments or loader.placement is not None:
        return
    for experts in decoder.mixtures.values():
        (down,) = experts.down
        if isinstance(down, Linear):
            check_segments(down.num_in, shape.width, num_segments)


def _measure(loader: ModelLoader, machine: StepMachine, log: StartLog) -> Limits:
    """Rehearse the largest launches on a few pages, and give the pages what memory is left."""
    settings, device = loader.settings, loader.device
    free_before = _free_bytes(device)
    rehearsal = loader.cache(REHEARSED_PAGES)
    if machine.drafter is not None:
        machine.drafter.attach(REHEARSED_PAGES, num_host_pages=0)
    if device.type == "cuda":
        _compile(machine, rehearsal)
        log.say("kernels compiled")
    machine.record_largest(rehearsal)
    taken = free_before - _free_bytes(device)
    log.say("largest steps rehearsed")

    def room_bytes() -> int:
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * settings.gpu_memory_utilization)
        # what the rehearsal took stays taken, and the other graphs add a fraction of it each
        return allowed - (total - free) - taken - GRAPH_MARGIN_BYTES

    limits = loader.limits(room_bytes)
    log.say(
        "KV memory sized",
        pages=limits.num_pages,
        kv_tokens=limits.num_pages * settings.page_tokens,
        max_model_len=limits.max_model_len,
    )
    return limits


def _compile(machine: StepMachine, cache: PagedCache) -> None:
    """Compile all kernels at once, or load them."""
    kernels = Kernels(cache.device_pages.device)
    for launch in machine.launches(cache):
        kernels.note(launch)
    kernels.note(partial(machine.asked, cache))  # in which some launches are others
    kernels.load(done=Progress("compiling kernels", len(kernels), items="kernels").advance)


def take_known(machine: StepMachine, device: torch.device) -> None:
    """Choose what products are launched with: as shipped for this device, or as measured here at a
    start before. First of all, so that kernels are compiled with it."""
    name = torch.cuda.get_device_name(device)
    own, shipped = file_in(cache_folder("choices"), name), file_in(SHIPPED, name)
    machine.choices.add(read_own(own, name) | read(shipped, name))


def choose(
    machine: StepMachine, cache: PagedCache, meter: Meter, log: StartLog, context: Ranks = ALONE
) -> None:
    """Measure what is not known. All ranks that have the same model choose what rank 0 has."""
    device = torch.cuda.get_device_name(cache.device_pages.device)
    own = file_in(cache_folder("choices"), device)
    asked = machine.asked(cache)
    if not asked:
        return
    found: Found = {}
    is_kept = True
    for key, choice in Measuring(meter).choices(asked):
        found[key] = choice
        # at once: who waits for a start may end it
        is_kept = is_kept and keep(own, device, found)
    machine.choices.add(chosen_by_first(asked, found, context))
    log.say("products measured", products=len(found), left=len(asked) - len(found))


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
