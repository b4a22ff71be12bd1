"""How kernels overlap.

Programmatic dependent launch: a kernel starts while the one before it still runs. The kernel before
says when (`gdc_launch_dependents`, or its end), and in the early one nothing passes `gdc_wait`
until the whole of that kernel has ended. So a kernel launched thus has `gdc_wait` in every program,
those with nothing to do included, above all that it writes and all that it reads of what the
kernels before it wrote: then its own end says that all before it have ended.

Above the wait some kernels read what the step's first kernels wrote: its inputs, its plan, its page
table. For inputs and page table it is enough that, between the kernels that write those and the
first launch with pdl, one is launched without. A plan itself may be launched with pdl: it is read
by decode_attention, which rotate_and_store lets start when all before rotate_and_store has ended.

Between the products of a step little is read. A launch there may have some programs more, behind
those that work, that ask the L2 cache for the beginning of the weight that the next product reads,
and end. They do so above the wait: nothing writes weights. No result depends on it.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor

PREFETCH_CHUNK = tl.constexpr(1 << 16)
"""Bytes that a program asks for, by one instruction of one thread: threads that ask for parts of
their own do so one after the other. The instruction takes less than 1 MiB."""

PREFETCH_ALIGNMENT = 16
"""Of its address and its bytes."""


def dependent_launch(pdl: bool, tensor: Tensor) -> dict[str, bool]:
    """Options of a kernel with a constant PDL; the interpreter, on the CPU, launches in turn."""
    if pdl and tensor.is_cuda:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


class Prefetch(NamedTuple):
    """Bytes that a launch asks the L2 cache for, for the launch behind it."""

    address: int
    num_bytes: int

    @staticmethod
    def of(weight: Tensor, max_bytes: int) -> Prefetch | None:
        """The beginning of a weight that is never written; None where nothing can be asked for."""
        num_bytes = min(weight.nbytes, max_bytes) // PREFETCH_ALIGNMENT * PREFETCH_ALIGNMENT
        is_whole = weight.is_contiguous() and weight.data_ptr() % PREFETCH_ALIGNMENT == 0
        if num_bytes == 0 or not is_whole or not can_prefetch(weight.device):
            return None
        return Prefetch(weight.data_ptr(), num_bytes)


NO_PREFETCH = (None, None)
"""The arguments of a kernel that asks for nothing."""


def can_prefetch(device: torch.device) -> bool:
    """Whether it has the instruction, which came with Hopper."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (9, 0)


def prefetch_planes(ahead: Prefetch | None, num_rows: int) -> int:
    """How far the second axis of a grid, whose first one has `num_rows` programs, goes on behind
    the programs that work, so that each of those there has a chunk."""
    if ahead is None:
        return 0
    num_planes: int = triton.cdiv(ahead.num_bytes, PREFETCH_CHUNK.value * num_rows)
    return num_planes


@triton.jit
def prefetch_ahead(address, num_bytes, NUM_WORKING: tl.constexpr, PDL: tl.constexpr):
    """All that a program does whose second id is NUM_WORKING or above."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    program = (tl.program_id(1) - NUM_WORKING) * tl.num_programs(0) + tl.program_id(0)
    begin = program * PREFETCH_CHUNK
    size = tl.minimum(num_bytes - begin, PREFETCH_CHUNK)
    tl.inline_asm_elementwise(
        """{
        .reg .pred asks;
        .reg .b32 thread;
        mov.u32 thread, %tid.x;
        setp.eq.u32 asks, thread, 0;
        setp.gt.and.s32 asks, $2, 0, asks;
        @asks cp.async.bulk.prefetch.L2.global [$1], $2;
        mov.u32 $0, 0;
        }""",
        "=r,l,r",
        [address + begin, size],
        tl.int32,
        is_pure=False,
        pack=1,
    )
    if PDL:
        tl.extra.cuda.gdc_wait()


@triton.jit
def prefetch_rows(w_ptr, row_O, begin, NUM_IN: tl.constexpr, LINES: tl.constexpr):
    """Ask the L2 cache for LINES lines of 128 bytes of these rows from `begin` on, and go on."""
    LINE_SIZE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    cols = tl.minimum(begin + tl.arange(0, LINES) * LINE_SIZE, NUM_IN - 1)
    addresses = (w_ptr + row_O[:, None] + cols[None, :]).to(tl.int64, bitcast=True)
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; mov.u32 $0, 0;",
        "=r,l",
        [addresses],
        tl.int32,
        is_pure=False,
        pack=1,
    )
