"""Calls of kernels that are noted once and then made again together, by all threads of a team.

What follows each other in a pass is as fixed as on a GPU with its graphs; only what the addresses
lead to changes. Between kernels Python takes longer than most of them. Each thread does its part of
each call, and all meet after it: for a call of its own a team would come together anew, and what
stands between products one thread would do alone.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any, TypeAlias

import numpy as np
import numpy.typing as npt
import torch

from services.compute.kernels.cpu import attention, products, rows
from services.compute.kernels.cpu.language import LIKE, compiled, ordered, pointer
from services.compute.kernels.cpu.team import INT, in_team, meet, ordered_worker, own_part

BFLOAT16, FLOAT, DOUBLE = LIKE[torch.bfloat16], LIKE[torch.float32], np.float64(0)
KINDS = range(12)
PRODUCT, PRODUCT_OF_CODES, PRODUCT_OF_PAIRS, ADD_BIAS, ADD_NORM, *OTHERS = KINDS
ADD_NORM_BY_FLOATS, GATED, ADD_SCALED, SCALE_ROWS, ROTATE, STORE, ATTEND = OTHERS
FLOATS: dict[int, tuple[int, ...]] = {
    ADD_SCALED: (4,),
    SCALE_ROWS: (5,),
    **dict.fromkeys((ADD_NORM, ADD_NORM_BY_FLOATS), (7, 8)),
    ATTEND: (6,),
}
"""Which arguments, counted from 1, are no integers."""

SIZE = 11
"""Numbers of a call: its kind, and its arguments."""


WORK = CALLS, COUNT, TEAM = range(3)
"""What there is to replay."""

BYTES = 2  # of a number


@compiled
def replay(work_ptr, worker):
    """Make calls of kernels for bfloat16; `worker` is the address of `replay_parts`."""
    in_team(pointer(work_ptr, TEAM, INT)[0], worker, work_ptr)


@ordered
def _part_of_rows(team_ptr, a, f):
    """A member's rows of a call, or numbers."""
    if a[0] == ADD_NORM or a[0] == ADD_NORM_BY_FLOATS:
        first, last = own_part(team_ptr, a[5])
        at = BYTES * first * a[6]
        delta_ptr = a[2] + at if a[2] else 0
        ends = a[1] + at, delta_ptr, a[3], a[4] + at, last - first, a[6], f[7], f[8], BFLOAT16
        if a[0] == ADD_NORM:
            rows.add_norm(*ends, BFLOAT16)
        else:
            rows.add_norm(*ends, FLOAT)
    elif a[0] == GATED:
        first, last = own_part(team_ptr, a[3])
        at = BYTES * first * a[4]
        rows.gated(a[1] + 2 * at, a[2] + at, last - first, a[4], a[5], BFLOAT16)
    elif a[0] == ADD_BIAS:
        first, last = own_part(team_ptr, a[3])
        rows.add_bias(a[1] + BYTES * first * a[4], a[2], last - first, a[4], BFLOAT16)
    elif a[0] == ADD_SCALED:
        first, last = own_part(team_ptr, a[3])
        at = BYTES * first
        rows.add_scaled(a[1] + at, a[2] + at, last - first, f[4], BFLOAT16)
    elif a[0] == SCALE_ROWS:
        first, last = own_part(team_ptr, a[2])
        rows.scale_rows(a[1] + BYTES * first * a[3], last - first, a[3], a[4], f[5], BFLOAT16)
    else:
        first, last = own_part(team_ptr, a[4])
        x_ptr, at = a[1] + BYTES * first * a[5], BYTES * first * a[6] * a[7]
        sizes = last - first, a[5], a[6], a[7]
        attention.rotate(x_ptr, a[2] + at, a[3] + at, *sizes, BFLOAT16)


@ordered_worker
def replay_parts(work_ptr):
    work = pointer(work_ptr, 0, INT)
    for number in range(work[COUNT]):
        if number:
            meet(work[TEAM])
        a = pointer(work[CALLS], SIZE * number, INT)
        f = pointer(work[CALLS], SIZE * number, DOUBLE)
        if a[0] == PRODUCT:
            products.part_of_product(work[TEAM], a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        elif a[0] == PRODUCT_OF_CODES:
            products.part_of_product_of_codes(work[TEAM], a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        elif a[0] == PRODUCT_OF_PAIRS:
            products.part_of_product_of_pairs(work[TEAM], a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        elif a[0] == ATTEND:
            attention.part_of_attend(work[TEAM], a[1], a[2], a[3], a[4], a[5], f[6], a[7])
        elif a[0] == STORE:
            first, last = own_part(work[TEAM], 1)
            if first < last:
                attention.store(a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        else:
            _part_of_rows(work[TEAM], a, f)


Call: TypeAlias = tuple[int, tuple[Any, ...]]
"""Its kind, and its arguments."""


class _Noted(threading.local):
    calls: list[Call] | None = None


_NOTED = _Noted()


class NotedKernel:
    """One whose calls are noted where somebody wants to make them again."""

    def __init__(self, kind: int, run: Any) -> None:
        self._kind, self._run = kind, run

    def __call__(self, *arguments: Any) -> None:
        if _NOTED.calls is not None:
            _NOTED.calls.append((self._kind, arguments))
        self._run(*arguments)


product = NotedKernel(PRODUCT, products.product)
product_of_codes = NotedKernel(PRODUCT_OF_CODES, products.product_of_codes)
product_of_pairs = NotedKernel(PRODUCT_OF_PAIRS, products.product_of_pairs)
add_bias, add_norm = NotedKernel(ADD_BIAS, rows.add_bias), NotedKernel(ADD_NORM, rows.add_norm)
add_norm_by_floats = NotedKernel(ADD_NORM_BY_FLOATS, rows.add_norm)
gated, rotate = NotedKernel(GATED, rows.gated), NotedKernel(ROTATE, attention.rotate)
add_scaled = NotedKernel(ADD_SCALED, rows.add_scaled)
scale_rows = NotedKernel(SCALE_ROWS, rows.scale_rows)
store, attend = NotedKernel(STORE, attention.store), NotedKernel(ATTEND, attention.attend)


@contextmanager
def noted() -> Iterator[list[Call]]:
    """The calls that this thread makes meanwhile."""
    calls: list[Call] = []
    _NOTED.calls = calls
    try:
        yield calls
    finally:
        _NOTED.calls = None


def packed(calls: Sequence[Call]) -> npt.NDArray[np.int64]:
    """Calls [N, SIZE] as `replay` reads them."""
    calls_NS = np.zeros((len(calls), SIZE), dtype=np.int64)
    floats_NS = calls_NS.view(np.float64)
    for number, (kind, arguments) in enumerate(calls):
        calls_NS[number, 0] = kind
        for place, argument in enumerate(arguments, 1):
            is_float = place in FLOATS.get(kind, ())
            (floats_NS if is_float else calls_NS)[number, place] = argument
    return calls_NS
