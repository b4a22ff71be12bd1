"""What this machine has for a model: memory, GPUs and processor cores, without loading PyTorch."""

from __future__ import annotations

import glob
import os
import shutil
import subprocess
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path

from common.host import available_memory, is_fast_at_bf16

# NVIDIA's devices on Linux, in WSL and on Jetson boards.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvmap")
QUERY = ("--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits")
QUERY_WITHIN_S = 1.2  # an idle driver takes a while to wake
MIB = 1 << 20
MIN_CPUS = 8  # with fewer, a core is worth more to the other services
MIN_COMMON_CPUS = 4  # router, tokenizer, detokenizer, and what else runs on the machine
COMMON_CPUS_PER_COMPUTE = 2


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's memory."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and devices; `gpus` are those that may be used, as far as they are known.

    `why_no_gpu` says why none can be used; it is empty if one can.
    """

    host_bytes: int
    fast_bf16: bool
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = ""


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
    """Ask nvidia-smi; none if it does not answer as expected."""
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
class Cores:
    """A CPU for each compute replica, in order, and the CPUs for everything else.

    A thread that finds its core busy when a step has ended, or its caches cold, launches the next
    step late.
    """

    own: tuple[int, ...]
    common: frozenset[int]


def place(cores: Sequence[Sequence[int]], num_computes: int, forced: bool = False) -> Cores | None:
    """Give each compute replica a whole core; None if that would leave too few for the rest.

    `cores` are the CPUs that may be used, core by core. Replicas get the last ones, since
    interrupts tend to go to the first, and only the first CPU of each: its sibling has the same
    execution units. With `forced`, one core is enough for the rest.
    """
    kept = len(cores) - num_computes
    if kept < 1:
        return None
    common = frozenset(cpu for core in cores[:kept] for cpu in core)
    enough = max(MIN_COMMON_CPUS, COMMON_CPUS_PER_COMPUTE * num_computes)
    too_few = sum(map(len, cores)) < MIN_CPUS or len(common) < enough
    if too_few and not forced:
        return None
    return Cores(tuple(core[0] for core in cores[kept:]), common)


def available_cores(
    siblings_of: Callable[[int], str] | None = None, cpus: Iterable[int] | None = None
) -> list[tuple[int, ...]]:
    """Return the CPUs that this process may use, core by core; none if the system cannot tell."""
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    allowed = set(cpus)
    siblings_of = siblings_of or _siblings_of
    cores = {tuple(sorted({cpu, *cpus_in(siblings_of(cpu))} & allowed)) for cpu in allowed}
    return sorted(cores)


def cpus_in(text: str) -> set[int]:
    """Parse a list of CPUs as Linux writes it, such as `0-3,8`."""
    cpus: set[int] = set()
    for piece in filter(None, text.strip().split(",")):
        first, _, last = piece.partition("-")
        cpus.update(range(int(first), int(last or first) + 1))
    return cpus


def _siblings_of(cpu: int) -> str:
    path = Path(f"/sys/devices/system/cpu/cpu{cpu}/topology/thread_siblings_list")
    try:
        return path.read_text()
    except OSError:
        return ""
