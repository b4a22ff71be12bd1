"""What this host offers, and what it says of processes: memory, caches, number formats, files."""

from __future__ import annotations

import os
import platform
import resource
import tempfile
from collections.abc import Mapping
from pathlib import Path

FAST_BF16_FLAGS = frozenset(("avx512_bf16", "amx_bf16", "bf16", "avx2"))
"""x86 with dot products or tiles of bf16, and Arm with its bf16 extension. With AVX2 alone compiled
products of few rows widen what they read: a step of one row takes 0.4 to 0.5 of float32's time, of
four 0.4, of 16 rows 0.5 to 1.2, and a prompt as long."""

GROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
MAX_OPEN_FILES = 65_536  # where the system sets no lower limit


def cache_folder(name: str, env: Mapping[str, str] = os.environ) -> Path:
    """Return where what can be made again is kept from one start to the next."""
    base = env.get("XDG_CACHE_HOME") or os.path.join(os.path.expanduser("~"), ".cache")
    return Path(base, "slipstream", name)


def available_memory(meminfo: Path = MEMINFO, group: Path = GROUP) -> int:
    """Return the bytes that this process may still allocate, within its container's limit."""
    try:
        for line in meminfo.read_text(encoding="ascii").splitlines():
            if line.startswith("MemAvailable:"):
                available = int(line.split()[1]) * 1024
                return min(available, _room_in(group, available))
    except OSError:
        pass
    return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2


def _room_in(group: Path, otherwise: int) -> int:
    """Return what the container may still use, or `otherwise` if it has no limit."""
    try:
        limit = (group / "memory.max").read_text(encoding="ascii").strip()
        used = int((group / "memory.current").read_text(encoding="ascii"))
        counts = (group / "memory.stat").read_text(encoding="ascii").split()
    except OSError:
        return otherwise
    if not limit.isdigit():
        return otherwise
    # Cached files count as used but give way: after a download they are as large as the model.
    values = dict(zip(counts[::2], map(int, counts[1::2]), strict=False))
    files = values.get("active_file", 0) + values.get("inactive_file", 0)
    return max(0, int(limit) - max(0, used - files))


def is_fast_at_bf16() -> bool:
    """Whether we compute in bfloat16 faster than in float32 on this processor."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return False
    lines = [line for line in text.splitlines() if line.startswith(("flags", "Features"))]
    flags = lines[0].partition(":")[2].split() if lines else []
    return bool(FAST_BF16_FLAGS & set(flags))


def processor_name() -> str:
    """Return the processor's model, or its architecture where the system does not say it."""
    try:
        text = Path("/proc/cpuinfo").read_text(encoding="ascii", errors="replace")
    except OSError:
        return platform.machine()
    names = (line for line in text.splitlines() if line.startswith("model name"))
    return next(names, platform.machine()).partition(":")[2].strip() or platform.machine()


def raise_open_files_limit() -> None:
    """Let this process open more connections than the 1,024 files that most shells permit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    allowed = MAX_OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, MAX_OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < allowed:
        resource.setrlimit(resource.RLIMIT_NOFILE, (allowed, hard))


def max_open_files() -> int:
    """Return how many files this process may have open."""
    soft, _ = resource.getrlimit(resource.RLIMIT_NOFILE)
    return MAX_OPEN_FILES if soft == resource.RLIM_INFINITY else soft


def is_stopped(pid: int) -> bool:
    """Whether a signal has stopped a process, as far as the system tells."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_bytes()
        return stat.rpartition(b")")[2].split()[0] == b"T"
    except (OSError, IndexError):
        return False


def children_of(pid: int) -> list[int]:
    """Return the processes that a process's main thread has started, as far as the system tells."""
    try:
        return list(map(int, Path(f"/proc/{pid}/task/{pid}/children").read_text().split()))
    except (OSError, ValueError):
        return []


def shared_memory(name: str, num_bytes: int) -> int:
    """Return a descriptor of memory that processes share who inherit it; it has no path."""
    if hasattr(os, "memfd_create"):
        fd = os.memfd_create(name)
    else:
        with tempfile.TemporaryFile() as file:
            fd = os.dup(file.fileno())
    os.ftruncate(fd, num_bytes)
    return fd
