"""What this machine has for a model, without loading PyTorch, and what cannot work on it.

Device, lengths and memory are refused before anything is started. What cannot be judged here
passes: the services know more and check again.
"""

from __future__ import annotations

import glob
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import partial
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Literal

from common.architectures import model_pooling
from common.decoder_shape import DecoderShape, check_split, read_shape
from common.errors import ConfigError, ModelError
from common.head_folder import DraftedFor, read_head
from common.host import available_memory, is_fast_at_bf16
from common.model_folder import read_model_config, read_pooling, sampling_defaults
from common.quantization import QuantizationConfig, check_at_load, read_quantization
from common.speculative import DraftPlace, check_place, check_vocabulary
from common.tokenizer_file import needed_tokenizer_file
from services.launcher.drafter import drafts_of, named_drafter, with_drafter
from services.launcher.model import has_weights, weight_bytes
from services.launcher.plan import Plan

# NVIDIA's devices on Linux, in WSL and on Jetson boards.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvmap")
QUERY = ("--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits")
QUERY_WITHIN_S = 1.2  # an idle driver takes a while to wake
MIB = 1 << 20
GIB = 1 << 30
MOST_GIB = 1e9  # of swap space, more than any machine has
ITEM_BYTES = {"float32": 4, "bfloat16": 2, "float16": 2}
CODE_BYTES = {"fp8": 1.0, "int8": 1.0, "int4": 0.5, "fp4": 0.5}


@dataclass(frozen=True, slots=True)
class Gpu:
    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    host_bytes: int
    fast_bf16: bool
    gpus: tuple[Gpu, ...] = ()  # those that may be used, as far as they are known
    why_no_gpu: str = ""  # empty if one can be used


def look(env: Mapping[str, str]) -> Machine:
    why_no_gpu = _why_no_gpu(env)
    gpus = () if why_no_gpu else _gpus(env)
    return Machine(available_memory(), is_fast_at_bf16(), gpus, why_no_gpu)


def _why_no_gpu(env: Mapping[str, str]) -> str:
    visible = env.get("CUDA_VISIBLE_DEVICES")
    if visible is not None and not visible.replace("-1", "").strip(", "):
        return f"CUDA_VISIBLE_DEVICES={visible} hides all GPUs"
    if not any(map(glob.glob, DEVICE_FILES)) and not shutil.which("nvidia-smi"):
        return "this machine shows no NVIDIA GPU"
    try:
        if (torch := version("torch")).endswith("+cpu"):
            return f"PyTorch is installed without GPU support ({torch})"
    except PackageNotFoundError:
        pass
    return ""


def _gpus(env: Mapping[str, str]) -> tuple[Gpu, ...]:
    """Read the GPUs from nvidia-smi; none if its output is not as expected."""
    try:
        answer = subprocess.run(
            ("nvidia-smi", *QUERY),
            capture_output=True,
            text=True,
            timeout=QUERY_WITHIN_S,
            check=True,
        ).stdout
        rows = [[cell.strip() for cell in line.split(",")] for line in answer.splitlines()]
        gpus = {
            name: Gpu(int(total) * MIB, int(used) * MIB)
            for index, uuid, total, used in rows
            for name in (index, uuid)
        }
        indices = [row[0] for row in rows]
    except (OSError, subprocess.SubprocessError, ValueError):
        return ()
    visible = env.get("CUDA_VISIBLE_DEVICES")
    chosen = indices if visible is None else [name.strip() for name in visible.split(",")]
    return tuple(gpus[name] for name in chosen if name in gpus)


@dataclass(frozen=True, slots=True)
class Need:
    """The least that one compute process takes, in bytes."""

    weights: int
    cache: int
    cache_tokens: int
    swap: int
    dtype: str
    drafter: int = 0  # weights and cache of what drafts

    def model(self, num_parts: int = 1) -> int:
        """Of each of so many processes that have a part of the model, and all of what drafts."""
        return (self.weights + self.cache) // num_parts + self.drafter

    def text(self) -> str:
        drafter = f", its drafter {gib(self.drafter)}" if self.drafter else ""
        return (
            f"its weights take {gib(self.weights)} as {self.dtype} and a cache of "
            f"{self.cache_tokens:,} tokens {gib(self.cache)}{drafter}"
        )


def device_of(plan: Plan, machine: Machine) -> Literal["cpu", "cuda", "sim"]:
    """Return the device that compute takes; ConfigError if it is not there."""
    name = plan.compute.device
    if name == "cuda" and machine.why_no_gpu:
        raise ConfigError(f"--device cuda: {machine.why_no_gpu}; --device cpu works without")
    if name == "sim":
        return "sim"
    return "cuda" if name == "cuda" or (name == "auto" and not machine.why_no_gpu) else "cpu"


def check_ranks(plan: Plan, device: str, num_gpus: int) -> None:
    """Raise ConfigError, in one sentence, where a model cannot be split as the settings say.

    Of `num_gpus` 0 means that nobody knows.
    """
    count, computes = plan.num_processes, plan.most_computes
    if count == 1:  # several computes may share a GPU
        return
    option = split_option(plan)
    if device == "sim":
        raise ConfigError(f"{option}: the device sim has no model to split; leave it out")
    if plan.num_copies > 1 and count > plan.num_copies:
        split = "--tensor-parallel-size" if plan.num_ranks > 1 else "--pipeline-parallel-size"
        raise ConfigError(
            f"{option}: processes that share the tokens of prompts cannot have parts of the model "
            f"as well yet; leave {split} out"
        )
    if plan.num_stages > 1:
        _check_stages(plan, option)
    if device == "cuda" and 0 < num_gpus < count * computes:
        copies = f" --computes {computes}" if computes > 1 else ""
        raise ConfigError(
            f"{option}{copies}: that takes {count * computes} GPUs, and {num_gpus} can be used "
            "here; ask for fewer"
        )
    size = plan.num_ranks * plan.num_copies
    if device == "cuda" and size & (size - 1):  # ranks that meet are a block of a kernel
        raise ConfigError(
            f"{option}: on GPUs the number of ranks has to be a power of two, such as "
            f"{1 << size.bit_length() - 1}"
        )


def split_option(plan: Plan) -> str:
    """The option that splits a compute over processes."""
    if plan.num_copies > 1:
        return f"--prefill-context-parallel-size {plan.num_copies}"
    ranks, stages = plan.num_ranks, plan.num_stages
    sizes = {"--tensor-parallel-size": ranks, "--pipeline-parallel-size": stages}
    return " ".join(f"{name} {size}" for name, size in sizes.items() if size > 1)


def _check_stages(plan: Plan, option: str) -> None:
    if plan.compute.pipeline_stages:
        raise ConfigError(
            f"{option}: stages on other hosts meet a compute service that is started by itself, as "
            "in a container; leave [compute] pipeline_stages out"
        )


def check(plan: Plan, machine: Machine, folder: Path) -> None:
    """Raise ModelError or ConfigError, in one sentence, if this model cannot be served."""
    device = device_of(plan, machine)
    needed_tokenizer_file(folder)
    if device == "sim":
        return
    try:
        sampling_defaults(folder)
        raw = read_model_config(folder)
        shape, quantization = read_shape(raw), read_quantization(raw)
        model_pooling(folder, raw)
    except ModelError as error:
        raise ModelError(f"{folder}: {error}".replace(f"{folder}: {folder}", str(folder))) from None
    _check_place(plan, device)
    settings = plan.compute
    check_at_load(quantization, settings.quantization)
    check_split(shape, plan.num_ranks, plan.num_stages, device == "cuda")
    _check_experts(plan, device, shape)
    longest = shape.max_position_embeddings
    if settings.max_model_len > longest:
        raise ConfigError(
            f"--max-model-len {settings.max_model_len}: the model's positions end at {longest} "
            "(max_position_embeddings in its config.json); lower it"
        )
    dtype: str = settings.dtype
    if dtype == "auto":
        dtype = "bfloat16" if device == "cuda" or machine.fast_bf16 else "float32"
    is_coded = device == "cuda" or dtype == "bfloat16"
    need = _need(plan, folder, shape, quantization, dtype, is_coded)
    need = replace(need, drafter=_drafter_bytes(plan, dtype, is_coded))
    if device == "cuda":
        _check_gpus(plan, machine, need)
        _check_host(plan, machine, Need(0, 0, 0, need.swap, dtype))
    else:
        _check_host(plan, machine, need)


def inspect(plan: Plan, machine: Machine, folder: Path) -> None:
    """Check a model before its weights are downloaded, and its drafter, of which all but the
    weights is fetched: a mistake in its name or settings need not wait for them."""
    check(plan, machine, folder)
    if device_of(plan, machine) != "sim":
        checked = partial(check, machine=machine, folder=folder)
        _check_drafter(with_drafter(plan, checked, with_weights=False), machine, folder)


def _check_place(plan: Plan, device: str) -> None:
    if (drafts := drafts_of(plan)) is not None:
        sizes = plan.num_ranks, plan.num_copies, plan.num_stages
        check_place(drafts, DraftPlace(device == "cuda", *sizes))


def _check_drafter(plan: Plan, machine: Machine, folder: Path) -> None:
    """Raise ConfigError for a drafter, which is here but for its weights, of another model."""
    drafts, raw = drafts_of(plan), read_model_config(folder)
    if drafts is None or read_pooling(folder) is not None:
        return
    shape = read_shape(raw)
    read_head(drafts, DraftedFor(folder, raw, shape))
    if drafts.method == "draft_model":
        small = Path(drafts.model)
        small_raw = read_model_config(small)
        check_at_load(read_quantization(small_raw), plan.compute.quantization, small)
        sizes = shape.vocab_size, read_shape(small_raw).vocab_size
        check_vocabulary(drafts.model, (folder, small), sizes)


def _check_experts(plan: Plan, device: str, shape: DecoderShape) -> None:
    """Raise ConfigError for whole experts that cannot be had."""
    settings = plan.compute
    settings.check_exchange(device == "cuda")
    settings.check_experts(shape.experts, settings.tensor_parallel_size)
    if settings.expert_counts and shape.experts is not None:
        settings.counted_experts(shape.experts.num_experts)


def _need(
    plan: Plan,
    folder: Path,
    shape: DecoderShape,
    quantization: QuantizationConfig | None,
    dtype: str,
    is_coded: bool,
) -> Need:
    """Sum up the weights, from the files if they are here, and the smallest cache that works.

    Where `is_coded`, quantized weights count as codes; else as the numbers that they stand for, by
    which a CPU multiplies where the dtype is not bfloat16.
    """
    settings = plan.compute
    kind = settings.quantization if quantization is None else quantization.kind
    num_coded = shape.num_layer_weights
    if quantization is not None and quantization.of_experts:
        num_coded = shape.num_expert_weights
    item_bytes = kv_bytes = ITEM_BYTES[dtype]
    if settings.kv_cache_dtype != "auto":
        kv_bytes = 1
    weights = shape.num_weights * item_bytes
    if settings.load_format != "dummy" and has_weights(folder):
        weights = weight_bytes(folder, item_bytes)
    tokens = settings.max_batched_token_mem or settings.max_model_len
    tokens = tokens or min(settings.page_tokens, shape.max_position_embeddings)
    positions = settings.max_model_len or shape.max_position_embeddings
    if is_coded and kind in CODE_BYTES:
        weights = (shape.num_weights - num_coded) * item_bytes + int(num_coded * CODE_BYTES[kind])
        dtype = f"{kind} and {dtype}"
    return Need(
        weights=weights,
        cache=shape.cache_bytes(tokens, kv_bytes) + shape.position_bytes(positions),
        cache_tokens=tokens,
        swap=int(min(settings.swap_space, MOST_GIB) * GIB),
        dtype=dtype,
    )


def _drafter_bytes(plan: Plan, dtype: str, is_coded: bool) -> int:
    """Of a small model its weights and its part of the cache, of a head its files; 0 where nothing
    has weights, or nobody has downloaded them yet."""
    drafter = named_drafter(plan)
    if drafter is None or not (drafter.folder / "config.json").is_file():
        return 0
    if drafter.is_head:
        return weight_bytes(drafter.folder, ITEM_BYTES[dtype])
    try:
        raw = read_model_config(drafter.folder)
        about = read_shape(raw), read_quantization(raw)
    except ModelError as error:
        raise ModelError(f"--speculative-config: {drafter.folder}: {error}") from None
    need = _need(plan, drafter.folder, *about, dtype, is_coded)
    return need.weights + need.cache


def _check_gpus(plan: Plan, machine: Machine, need: Need) -> None:
    share, count = plan.compute.gpu_memory_utilization, plan.num_processes
    parts = count // plan.num_copies
    for number, gpu in enumerate(machine.gpus[: plan.most_computes * count]):
        room = int(gpu.total_bytes * share) - gpu.used_bytes
        if need.model(parts) > room:
            split = f", over {parts} GPUs" if parts > 1 else ""
            split += ", each with all of the drafter" if split and need.drafter else ""
            idle = len(machine.gpus) - plan.most_computes * count
            advice = _advice(need) + (", or raise --tensor-parallel-size" if idle > 0 else "")
            raise ConfigError(
                f"the model does not fit on GPU {number}: {need.text()}{split}, and of its "
                f"{gib(gpu.total_bytes)} there are {gib(max(0, room))} to use "
                f"({share:.0%} of all, less {gib(gpu.used_bytes)} in use); {advice}"
            )


def _check_host(plan: Plan, machine: Machine, need: Need) -> None:
    count, parts = plan.most_computes * plan.num_copies, plan.num_processes // plan.num_copies
    model = parts * need.model(parts)
    total = count * (model + need.swap)
    if total <= machine.host_bytes:
        return
    free = gib(machine.host_bytes)
    if count * model <= machine.host_bytes:
        raise ConfigError(
            f"--swap-space {need.swap / GIB:g}: {free} of memory are free on this machine"
        )
    times = f" in each of {count} processes" if count > 1 else ""
    raise ConfigError(
        f"the model does not fit into this machine's memory: {need.text()}{times}, and {free} "
        f"are free; {_advice(need)}"
    )


def _advice(need: Need) -> str:
    if need.drafter > need.weights + need.cache:
        return "choose a smaller drafter, or leave --speculative-config out"
    if need.cache > need.weights:
        return "lower --max-model-len or --max-batched-token-mem"
    options = {"float32": ", or --dtype bfloat16"}
    options |= dict.fromkeys(("bfloat16", "float16"), ", or --quantization fp8 or int4")
    return "choose a smaller model" + options.get(need.dtype, "")


def gib(size: int) -> str:
    """Write a size in GiB, a small one in MiB."""
    return f"{size / GIB:,.1f} GiB" if size >= GIB / 10 else f"{size / (1 << 20):,.1f} MiB"
