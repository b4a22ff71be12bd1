"""From a model folder to a CUDA runner: weights, kernels, measured KV memory, recorded graphs."""

from __future__ import annotations

import time
from pathlib import Path

import structlog
import torch

from common.errors import ConfigError
from common.model_folder import eos_token_ids, read_json
from services.compute.config import ComputeSettings
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.weighted_layers import Linear
from services.compute.models.config import DecoderConfig
from services.compute.models.decoder import Decoder, load_decoder
from services.compute.models.registry import describe_model
from services.compute.models.weights import DummyWeights, SafetensorsWeights, WeightSource
from services.compute.runner.cuda.runner import CudaRunner
from services.compute.runner.cuda.step_machine import MachineSizes, StepMachine
from services.compute.runner.cuda.stream import DeviceStream, GraphStream
from services.compute.runner.limits import (
    Limits,
    bytes_of_page,
    choose_dtype,
    choose_limits,
    longest_model_len,
    prefill_tokens,
)
from services.compute.runner.pooling import model_pooling
from services.compute.runner.protocol import KVGroup, RunnerSpec

STALL_AFTER_S = 10.0
GRAPH_MARGIN_BYTES = 512 << 20
"""For what the rehearsal cannot see: fragmentation, and libraries that take memory later."""

GIB = 1 << 30


class StartLog:
    """Says what each part of the start took, in seconds and in memory."""

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
def load_cuda(path: Path, settings: ComputeSettings) -> CudaRunner:
    """Load a Hugging Face folder; raises ModelError or ConfigError, which say what to do."""
    device = torch.device("cuda", torch.cuda.current_device())
    return load_on(path, settings, device, GraphStream(device))


def load_on(
    path: Path, settings: ComputeSettings, device: torch.device, stream: DeviceStream
) -> CudaRunner:
    try:
        return _load(path, settings, device, stream)
    except torch.OutOfMemoryError as error:  # trying again would not help
        reason = str(error).splitlines()[0]
        raise ConfigError(
            "The GPU has too little memory for the model and its largest step; choose a smaller "
            "model, or lower compute.max_num_seqs, compute.max_prefill_tokens or, where it is set, "
            f"compute.max_batched_token_mem. ({reason})"
        ) from error


def _load(
    path: Path, settings: ComputeSettings, device: torch.device, stream: DeviceStream
) -> CudaRunner:
    log = StartLog(device)
    raw = read_json(path, "config.json", required=True)
    config, variations = describe_model(raw)
    pooling = model_pooling(path, raw)
    dtype = choose_dtype(settings, device)
    max_positions = longest_model_len(settings, config)
    weights: WeightSource
    if settings.load_format == "dummy":
        weights = DummyWeights(dtype, device)
    else:
        weights = SafetensorsWeights(path, dtype, device)
    decoder = load_decoder(config, variations, weights, Linear, pooling is None)
    log.say("weights loaded", dtype=str(dtype).removeprefix("torch."))
    sizes = MachineSizes(
        max_tokens=prefill_tokens(settings, device) + settings.max_num_seqs,
        max_rows=settings.max_num_seqs,
        max_positions=max_positions,
        page_tokens=settings.page_tokens,
    )
    machine = StepMachine(decoder, sizes, stream, settings.batch_invariant, pooling is not None)
    limits = _measure(decoder, machine, settings, stream, log)
    cache = _cache(config, settings.page_tokens, limits, dtype, device)
    for number in machine.record(cache.device_pages):
        if number == machine.num_launches or number % 32 == 0:
            log.say("graphs recorded", done=number, of=machine.num_launches)
    page_bytes = bytes_of_page(settings.page_tokens, config, dtype)
    spec = RunnerSpec(
        vocab_size=config.vocab_size,
        max_model_len=limits.max_model_len,
        eos_token_ids=eos_token_ids(path),
        kv_groups=(KVGroup("full", config.num_layers, settings.page_tokens, page_bytes),),
        num_pages=limits.num_pages,
        num_host_pages=limits.num_host_pages,
        max_num_seqs=settings.max_num_seqs,
        max_step_tokens=sizes.max_tokens,
        stall_after_s=STALL_AFTER_S,
        overlaps=True,
        pooling="" if pooling is None else pooling.kind,
        generates=decoder.has_head,
    )
    return CudaRunner(machine, cache, spec, stream, settings.in_flight_steps, pooling)


def _measure(
    decoder: Decoder[Linear],
    machine: StepMachine,
    settings: ComputeSettings,
    stream: DeviceStream,
    log: StartLog,
) -> Limits:
    """Rehearse the largest launches on a few pages, and give the pages what memory is left."""
    config, dtype, device = decoder.config, decoder.dtype, decoder.device
    free_before = _free_bytes(device)
    few = Limits(machine.sizes.max_positions, 1, 0, 0)
    rehearsal = _cache(config, settings.page_tokens, few, dtype, device)
    machine.record_largest(rehearsal.device_pages)
    taken = free_before - _free_bytes(device)
    log.say("kernels compiled")

    def room_bytes() -> int:
        free, total = torch.cuda.mem_get_info(device)
        allowed = int(total * settings.gpu_memory_utilization)
        # what the rehearsal took stays taken, and the other graphs add a fraction of it each
        return allowed - (total - free) - taken - GRAPH_MARGIN_BYTES

    limits = choose_limits(settings, config, dtype, device, room_bytes)
    log.say(
        "KV memory sized",
        pages=limits.num_pages,
        kv_tokens=limits.num_pages * settings.page_tokens,
        max_model_len=limits.max_model_len,
    )
    return limits


def _cache(
    config: DecoderConfig,
    page_tokens: int,
    limits: Limits,
    dtype: torch.dtype,
    device: torch.device,
) -> PagedCache:
    shape = (config.num_layers, config.num_kv_heads, page_tokens, config.head_dim)
    return PagedCache(shape, limits.num_pages, limits.num_host_pages, dtype, device)


def _free_bytes(device: torch.device) -> int:
    return torch.cuda.mem_get_info(device)[0] if device.type == "cuda" else 0
