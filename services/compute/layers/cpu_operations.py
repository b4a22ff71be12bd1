"""Which operations the CPU has: plain torch's, or compiled kernels for few rows.

Kernels are compiled by numba, which is imported here alone, and only to serve on the CPU.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple, Protocol

import structlog
import torch

from services.compute.layers.cpu_linear import CpuLinears
from services.compute.layers.eager_attention import Geometry
from services.compute.layers.eager_step import EagerStep, StepMaker
from services.compute.layers.paged_cache import PagedCache
from services.compute.layers.step_attention import EagerAttentions, StepAttentions


class LinearsMaker(Protocol):
    def __call__(self, dtype: torch.dtype, keep_dense: bool) -> CpuLinears: ...


class CpuOperations(NamedTuple):
    """What a model on the CPU is made with."""

    make_linears: LinearsMaker
    make_steps: Callable[[], StepMaker]
    make_attentions: Callable[[PagedCache, Geometry], StepAttentions]


EAGER = CpuOperations(CpuLinears, lambda: EagerStep, EagerAttentions)


def operations_for(dtype: torch.dtype) -> CpuOperations:
    """Compiled ones where numba can be imported and has kernels for the dtype. What no earlier
    start has left is compiled now, which takes seconds."""
    try:
        import numba  # noqa: F401
    except ImportError as error:  # it also refuses a numpy that it does not know
        structlog.get_logger().info("plain torch computes", why=str(error))
        return EAGER
    from services.compute.kernels.cpu.language import LIKE

    if dtype not in LIKE:
        return EAGER
    from services.compute.kernels.cpu.prepare import prepare
    from services.compute.layers.compiled_linear import CompiledLinears
    from services.compute.layers.compiled_step import CompiledSteps
    from services.compute.layers.row_attention import RowAttentions

    prepare(LIKE[dtype])
    return CpuOperations(CompiledLinears, CompiledSteps, RowAttentions)
