"""Calls of kernels that are noted once and then made again together: a graph of one thread.

What follows each other in a pass is as fixed as on a GPU with its graphs; only what the addresses
lead to changes. Between kernels Python takes longer than most of them.
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
from services.compute.kernels.cpu.language import LIKE, compiled, pointer
from services.compute.kernels.cpu.team import INT

BFLOAT16, FLOAT, DOUBLE = LIKE[torch.bfloat16], LIKE[torch.float32], np.float64(0)
KINDS = range(11)
PRODUCT, PRODUCT_OF_CODES, ADD_BIAS, ADD_NORM, ADD_NORM_BY_FLOATS, GATED, *OTHERS = KINDS
ADD_SCALED, SCALE_ROWS, ROTATE, STORE, ATTEND = OTHERS
FLOATS: dict[int, tuple[int, ...]] = {
    ADD_SCALED: (4,),
    SCALE_ROWS: (5,),
    **dict.fromkeys((ADD_NORM, ADD_NORM_BY_FLOATS), (7, 8)),
    ATTEND: (6,),
}
"""Which arguments, counted from 1, are no integers."""

SIZE = 11
"""Numbers of a call: its kind, and its arguments."""


@compiled
def replay(calls_ptr, count):
    """Make so many calls of kernels for bfloat16."""
    for number in range(count):
        a, f = pointer(calls_ptr, SIZE * number, INT), pointer(calls_ptr, SIZE * number, DOUBLE)
        kind = a[0]
        if kind == PRODUCT:
            products.product(a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        elif kind == PRODUCT_OF_CODES:
            products.product_of_codes(a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        elif kind == ADD_BIAS:
            rows.add_bias(a[1], a[2], a[3], a[4], BFLOAT16)
        elif kind == ADD_NORM:
            rows.add_norm(a[1], a[2], a[3], a[4], a[5], a[6], f[7], f[8], BFLOAT16, BFLOAT16)
        elif kind == ADD_NORM_BY_FLOATS:
            rows.add_norm(a[1], a[2], a[3], a[4], a[5], a[6], f[7], f[8], BFLOAT16, FLOAT)
        elif kind == GATED:
            rows.gated(a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        elif kind == ADD_SCALED:
            rows.add_scaled(a[1], a[2], a[3], f[4], BFLOAT16)
        elif kind == SCALE_ROWS:
            rows.scale_rows(a[1], a[2], a[3], a[4], f[5], BFLOAT16)
        elif kind == ROTATE:
            attention.rotate(a[1], a[2], a[3], a[4], a[5], a[6], a[7], BFLOAT16)
        elif kind == STORE:
            attention.store(a[1], a[2], a[3], a[4], a[5], BFLOAT16)
        else:
            attention.attend(a[1], a[2], a[3], a[4], a[5], f[6], a[7])


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
