"""Refuses what cannot work before anything is started: device, lengths, memory.

The services know more and check again; what cannot be judged here passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Literal, get_args

from common.decoder_shape import DecoderShape, read_shape
from common.errors import ConfigError, ModelError
from common.model_folder import read_json, sampling_defaults
from services.launcher.machine import Machine
from services.launcher.model import num_weights
from services.launcher.plan import SETTINGS, Plan

GIB = 1 << 30
DEVICES = get_args(SETTINGS["compute"].model_fields["device"].annotation)
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}


@dataclass(frozen=True, slots=True)
class Need:
    """The least that one compute process takes, in bytes."""

    weights: int
    cache: int
    cache_tokens: int
    swap: int
    dtype: str

    def text(self) -> str:
        return (
            f"its weights take {gib(self.weights)} as {self.dtype} and a cache of "
            f"{self.cache_tokens:,} tokens {gib(self.cache)}"
        )


def device_of(plan: Plan, machine: Machine) -> Literal["cpu", "cuda", "sim"]:
    """Return the device that compute takes; ConfigError if it is not there."""
    name = plan.value("compute", "device")
    if name not in DEVICES:
        raise ConfigError(f"[compute] device: there is no {name}; there are {', '.join(DEVICES)}")
    if name == "cuda" and machine.why_no_gpu:
        raise ConfigError(f"--device cuda: {machine.why_no_gpu}; --device cpu works without")
    if name == "sim":
        return "sim"
    return "cuda" if name == "cuda" or (name == "auto" and not machine.why_no_gpu) else "cpu"


def check(plan: Plan, folder: Path, machine: Machine) -> None:
    """Raise ModelError or ConfigError, in one sentence, if this model cannot be served."""
    device = device_of(plan, machine)
    if device == "sim":
        return
    try:
        sampling_defaults(folder)
        shape = read_shape(read_json(folder, "config.json", required=True))
    except ModelError as error:
        raise ModelError(f"{folder}: {error}".replace(f"{folder}: {folder}", str(folder))) from None
    longest = shape.max_position_embeddings
    max_model_len = _whole(plan, "max_model_len")
    if max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {max_model_len}: the model's positions end at {longest} "
            "(max_position_embeddings in its config.json); lower it"
        )
    dtype = plan.value("compute", "dtype")
    if dtype not in ITEM_BYTES:
        dtype = "bfloat16" if device == "cuda" or machine.fast_bf16 else "float32"
    need = _need(plan, folder, shape, dtype)
    if device == "cuda":
        _check_gpus(plan, machine, need)
        _check_host(plan, machine, Need(0, 0, 0, need.swap, dtype))
    else:
        _check_host(plan, machine, need)


def _need(plan: Plan, folder: Path, shape: DecoderShape, dtype: str) -> Need:
    """Sum up the weights, from the files if they are here, and the smallest cache that works."""
    count = shape.num_weights
    if plan.value("compute", "load_format") != "dummy" and any(folder.glob("*.safetensors")):
        count = num_weights(folder)
    tokens = _whole(plan, "max_batched_token_mem") or _whole(plan, "max_model_len")
    tokens = tokens or min(_whole(plan, "page_tokens"), shape.max_position_embeddings)
    positions = _whole(plan, "max_model_len") or shape.max_position_embeddings
    item_bytes = ITEM_BYTES[dtype]
    return Need(
        weights=count * item_bytes,
        cache=shape.cache_bytes(tokens, item_bytes) + shape.position_bytes(positions),
        cache_tokens=tokens,
        swap=int(_number(plan, "swap_space") * GIB),
        dtype=dtype,
    )


def _check_gpus(plan: Plan, machine: Machine, need: Need) -> None:
    share = _number(plan, "gpu_memory_utilization")
    for number, gpu in enumerate(machine.gpus[: plan.counts.compute]):
        room = int(gpu.total_bytes * share) - gpu.used_bytes
        if need.weights + need.cache > room:
            raise ConfigError(
                f"the model does not fit on GPU {number}: {need.text()}, and of its "
                f"{gib(gpu.total_bytes)} there are {gib(max(0, room))} to use "
                f"({share:.0%} of all, less {gib(gpu.used_bytes)} in use); {_advice(need)}"
            )


def _check_host(plan: Plan, machine: Machine, need: Need) -> None:
    count = plan.counts.compute
    total = count * (need.weights + need.cache + need.swap)
    if total <= machine.host_bytes:
        return
    free = gib(machine.host_bytes)
    if count * (need.weights + need.cache) <= machine.host_bytes:
        raise ConfigError(
            f"--swap-space {need.swap / GIB:g}: {free} of memory are free on this machine"
        )
    times = f" in each of {count} processes" if count > 1 else ""
    raise ConfigError(
        f"the model does not fit into this machine's memory: {need.text()}{times}, and {free} "
        f"are free; {_advice(need)}"
    )


def _advice(need: Need) -> str:
    if need.cache > need.weights:
        return "lower --max-model-len or --max-batched-token-mem"
    smaller = "choose a smaller model"
    return f"{smaller}, or --dtype bfloat16" if need.dtype == "float32" else smaller


def gib(size: int) -> str:
    """Write a size in GiB, a small one in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"


def _whole(plan: Plan, field: str) -> int:
    return int(_number(plan, field))


def _number(plan: Plan, field: str) -> float:
    """Return one of compute's numbers; 0 for a value that compute is going to refuse."""
    try:
        value = float(plan.value("compute", field))
    except ValueError:
        return 0.0
    return value if 0 < value < 1e18 else 0.0
