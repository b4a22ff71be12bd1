"""Kernels share torch's threads.

Those wait awake for the next product: threads of another pool would have their cores in the
meantime, or wait for them.
"""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import numba
import numpy as np
import numpy.typing as npt
import torch
from llvmlite import ir
from numba import types
from numba.extending import intrinsic

from services.compute.kernels.cpu.language import ARITHMETIC, KEPT, compiled, pointer

MAPPED = Path("/proc/self/maps")
OPENMP = ("libgomp", "libomp", "libiomp")
INT = np.int64(0)
PARALLEL, NUMBER, BARRIER, COUNT = range(4)

worker: Callable[..., Any] = numba.cfunc(
    types.void(types.int64), cache=KEPT, fastmath=ARITHMETIC, error_model="numpy"
)
"""What every thread of a team is to call, with the address of what there is to do."""

ordered_worker: Callable[..., Any] = numba.cfunc(
    types.void(types.int64), cache=KEPT, error_model="numpy"
)
"""One that makes calls of others, which then compute what they compute by themselves: how sums may
be made goes from who calls to who is called, too."""


class OpenMP(NamedTuple):
    """Addresses of functions."""

    parallel: int
    number: int
    barrier: int


@cache
def _openmp() -> OpenMP | None:
    """Of the library that torch has: its own, or the only one that there is; else None."""
    try:
        paths = {Path(line.split()[-1]) for line in MAPPED.read_text().splitlines() if "/" in line}
        loaded = [path for path in paths if path.name.startswith(OPENMP)]
        folder = Path(torch.__file__).resolve().parent
        own = [path for path in loaded if path.is_relative_to(folder)]
        (path,) = own or loaded
        library = ctypes.CDLL(str(path))
        functions = library.GOMP_parallel, library.omp_get_thread_num, library.GOMP_barrier
    except (OSError, ValueError, AttributeError):
        return None
    return OpenMP(*(ctypes.cast(function, ctypes.c_void_p).value or 0 for function in functions))


def num_threads() -> int:
    """As many as torch has, or one where its threads cannot be had."""
    return 1 if _openmp() is None else torch.get_num_threads()


@cache
def team_of(count: int) -> npt.NDArray[np.int64]:
    """What kernels have to know of so many threads; it stays where it is."""
    return np.array((*(_openmp() or (0, 0, 0)), count), dtype=np.int64)


@intrinsic
def _call(typing_context, function, work):
    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [ir.IntType(64)])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [args[1]])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64), emit


@intrinsic
def _call_parallel(typing_context, parallel, function, work, count):
    def emit(context, builder, signature, args):
        word, flags = ir.IntType(64), ir.IntType(32)
        kind = ir.FunctionType(ir.VoidType(), [word, word, flags, flags])
        target = builder.inttoptr(args[0], kind.as_pointer())
        builder.call(target, [args[1], args[2], builder.trunc(args[3], flags), flags(0)])
        return context.get_dummy_value()

    return types.void(types.int64, types.int64, types.int64, types.int64), emit


@intrinsic
def _call_number(typing_context, function):
    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.IntType(32), [])
        number = builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return builder.zext(number, ir.IntType(64))

    return types.int64(types.int64), emit


@intrinsic
def _call_barrier(typing_context, function):
    def emit(context, builder, signature, args):
        kind = ir.FunctionType(ir.VoidType(), [])
        builder.call(builder.inttoptr(args[0], kind.as_pointer()), [])
        return context.get_dummy_value()

    return types.void(types.int64), emit


@compiled
def in_team(team_ptr, function, work_ptr):
    """Have each thread of the team call a worker."""
    team = pointer(team_ptr, 0, INT)
    if team[COUNT] == 1:
        _call(function, work_ptr)
    else:
        _call_parallel(team[PARALLEL], function, work_ptr, team[COUNT])


@compiled
def call(function, work_ptr):
    """Call a worker as the member of a team that one is already."""
    _call(function, work_ptr)


@compiled
def meet(team_ptr):
    """Wait until all of a team are here: what they have written is there for all."""
    team = pointer(team_ptr, 0, INT)
    if team[COUNT] > 1:
        _call_barrier(team[BARRIER])


@compiled
def own_part(team_ptr, size):
    """What is this thread's of so many things that are to be done."""
    team = pointer(team_ptr, 0, INT)
    count = team[COUNT]
    number = _call_number(team[NUMBER]) if count > 1 else 0
    return size * number // count, size * (number + 1) // count
