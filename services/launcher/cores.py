"""Which processor core each thread that drives a GPU gets for itself, and which all others share.

A thread that finds its core taken when a step's result is there, or comes back to one whose caches
are cold, hands the GPU its next step late.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

MIN_CPUS = 8  # with fewer, a core is worth more to the other services
MIN_COMMON_CPUS = 4  # router, tokenizer, detokenizer, and what else runs on the machine
COMMON_CPUS_PER_COMPUTE = 2


@dataclass(frozen=True, slots=True)
class Cores:
    """A CPU for each compute replica, in order, and those for everything else."""

    own: tuple[int, ...]
    common: frozenset[int]


def place(cores: Sequence[Sequence[int]], num_computes: int, forced: bool = False) -> Cores | None:
    """Give each compute replica a whole core; None where that would leave too few for the rest.

    `cores` are the CPUs that may be used, core by core. The last ones are given away, since
    interrupts tend to go to the first, and of each only its first CPU is used: the one beside it
    has the same execution units. `forced` is content with one core for the rest.
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
    """Return the CPUs that this process may use, core by core; none where the system cannot say."""
    if cpus is None:
        cpus = os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else ()
    allowed = set(cpus)
    siblings_of = siblings_of or _siblings_of
    cores = {tuple(sorted({cpu, *cpus_in(siblings_of(cpu))} & allowed)) for cpu in allowed}
    return sorted(cores)


def cpus_in(text: str) -> set[int]:
    """Read a list of CPUs as Linux writes it, such as `0-3,8`."""
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
