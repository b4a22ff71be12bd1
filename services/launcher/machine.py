"""What this machine has for a model, found out without loading PyTorch."""

from __future__ import annotations

import glob
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from importlib.metadata import PackageNotFoundError, version

from common.host import available_memory, is_fast_at_bf16

# NVIDIA's devices on Linux, in WSL and on Jetson boards.
DEVICE_FILES = ("/dev/nvidia[0-9]*", "/dev/dxg", "/dev/nvmap")
ASK = ("--query-gpu=index,uuid,memory.total,memory.used", "--format=csv,noheader,nounits")
ASK_WITHIN_S = 1.2  # a driver that nobody has in use takes a while to wake
MIB = 1 << 20


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU's memory."""

    total_bytes: int
    used_bytes: int


@dataclass(frozen=True, slots=True)
class Machine:
    """Memory and devices; `gpus` are those that may be used, as far as they are known.

    `why_no_gpu` says why none can be used, and is empty where one can.
    """

    host_bytes: int
    fast_bf16: bool
    gpus: tuple[Gpu, ...] = ()
    why_no_gpu: str = ""


def look(env: Mapping[str, str]) -> Machine:
    """Look at this machine."""
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
    """Ask the driver's own program; nothing where it does not answer as expected."""
    try:
        answer = subprocess.run(
            ("nvidia-smi", *ASK), capture_output=True, text=True, timeout=ASK_WITHIN_S, check=True
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
