"""What a runner decides from settings, model and machine before it loads anything."""

from __future__ import annotations

import ctypes
import os
from collections.abc import Callable
from dataclasses import dataclass

import torch

from common.errors import ConfigError
from common.host import available_memory, is_fast_at_bf16
from services.compute.config import ComputeSettings
from services.compute.models.config import DecoderConfig

CPU_MEMORY_SHARE = 0.25
"""Of the memory that is available: the weights, the other services and the system want theirs."""

BYTES_PER_THREAD = 16 << 20
"""Weights that make a thread worth its barriers: a model of 10 MB took 2.2 ms a step with one
thread and 2.5 with three on idle cores, and 200 times as long on busy ones, where a barrier waits
for whichever thread has no core."""

M_TRIM_THRESHOLD, M_MMAP_THRESHOLD = -1, -3  # of glibc's malloc.h


@dataclass(frozen=True, slots=True)
class Limits:
    """How long, how many and how much."""

    max_model_len: int
    num_pages: int
    num_host_pages: int
    max_prefill_tokens: int


def choose_dtype(settings: ComputeSettings, device: torch.device) -> torch.dtype:
    """The dtype of the settings; auto is bfloat16 where the device is fast at it, else float32."""
    named = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
    if settings.dtype != "auto":
        return named[settings.dtype]
    fast = device.type == "cuda" or is_fast_at_bf16()
    return torch.bfloat16 if fast else torch.float32


def longest_model_len(settings: ComputeSettings, config: DecoderConfig) -> int:
    """The length of the settings, or the model's; ConfigError for more than the model has."""
    longest = config.max_position_embeddings
    if settings.max_model_len > longest:
        raise ConfigError(
            f"compute.max_model_len is {settings.max_model_len}, and the model's positions end at "
            f"{longest} (max_position_embeddings in its config.json); lower it."
        )
    return settings.max_model_len or longest


def prefill_tokens(settings: ComputeSettings, device: torch.device) -> int:
    return settings.max_prefill_tokens or (512 if device.type == "cpu" else 8192)


def choose_limits(
    settings: ComputeSettings,
    config: DecoderConfig,
    dtype: torch.dtype,
    device: torch.device,
    room_bytes: Callable[[], int],
) -> Limits:
    """Lengths and page counts; raises ConfigError where settings contradict one another.

    `room_bytes` says how much memory the pages may take; it is asked only if the settings do not
    say.
    """
    max_model_len = longest_model_len(settings, config)
    page_bytes = bytes_of_page(settings.page_tokens, config, dtype)
    num_pages = _device_pages(settings, max_model_len, page_bytes, room_bytes)
    capacity = num_pages * settings.page_tokens
    if capacity < max_model_len:
        if settings.max_model_len:
            raise ConfigError(
                f"compute.max_model_len is {max_model_len}, and the KV cache holds {capacity} "
                "tokens; lower it, or raise compute.max_batched_token_mem (or, where that is not "
                "set and the cache is a GPU's, compute.gpu_memory_utilization)."
            )
        max_model_len = capacity
    return Limits(
        max_model_len=max_model_len,
        num_pages=num_pages,
        num_host_pages=int(settings.swap_space * 2**30) // page_bytes,
        max_prefill_tokens=prefill_tokens(settings, device),
    )


def cpu_room_bytes() -> int:
    return int(available_memory() * CPU_MEMORY_SHARE)


def bytes_of_page(page_tokens: int, config: DecoderConfig, dtype: torch.dtype) -> int:
    return config.cache_bytes(page_tokens, dtype.itemsize)


def choose_threads(settings: ComputeSettings, config: DecoderConfig, dtype: torch.dtype) -> int:
    """Torch's threads: those of the settings, else as many as the weights keep busy.

    At most `max_threads`, or all cores but one, which is for the loop of this process and for the
    other services.
    """
    if settings.num_threads:
        return settings.num_threads
    if hasattr(os, "sched_getaffinity"):
        cores = len(os.sched_getaffinity(0))
    else:
        cores = os.cpu_count() or 1
    weight_bytes = config.num_step_weights * dtype.itemsize
    most = min(cores - 1, settings.max_threads or cores)
    return max(1, min(most, weight_bytes // BYTES_PER_THREAD))


def prepare_cpu(num_threads: int) -> None:
    """Set torch's threads, and keep freed memory in the process.

    glibc returns large blocks to the system when they are freed and gets them back page by
    page: an RMS norm over 512 tokens took 1.27 ms so and 0.14 ms with memory that stayed.
    """
    torch.set_num_threads(num_threads)
    mallopt = getattr(ctypes.CDLL(None), "mallopt", None)
    if mallopt is not None:
        mallopt(M_MMAP_THRESHOLD, 1 << 30)
        mallopt(M_TRIM_THRESHOLD, (1 << 31) - 1)


def _device_pages(
    settings: ComputeSettings, max_model_len: int, page_bytes: int, room_bytes: Callable[[], int]
) -> int:
    if settings.max_batched_token_mem:
        return -(-settings.max_batched_token_mem // settings.page_tokens)
    enough = settings.max_num_seqs * -(-max_model_len // settings.page_tokens)
    room = room_bytes()
    if room < page_bytes:
        raise ConfigError(
            "No memory is left for the KV cache; free some, choose a smaller model, raise "
            "compute.gpu_memory_utilization if it is a GPU's, or set "
            "compute.max_batched_token_mem to the number of tokens it shall hold."
        )
    return min(enough, room // page_bytes)
