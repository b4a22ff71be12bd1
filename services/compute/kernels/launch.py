"""How kernels overlap.

Programmatic dependent launch: a kernel starts while the one before it still runs. The kernel before
says when (`gdc_launch_dependents`, or its end), and in the early one nothing passes `gdc_wait`
until the whole of that kernel has ended. So a kernel launched thus has `gdc_wait` in every program,
those with nothing to do included, above all that it writes and all that it reads of what the
kernels before it wrote: then its own end says that all before it have ended.

Kernels that fill the device let the next one start after their own wait, and after their loads: if
each did so at once, programs of several launches would lie on multiprocessors while the first still
runs, and the next ones' would share what room there is, many on some and none on others. At one
token that took a layer of gpt-oss-20B's experts on an H200 from 48 microseconds to 76.

Above the wait some kernels read what the step's first kernels wrote: its inputs, its plan, its page
table. For inputs and page table it is enough that, between the kernels that write those and the
first launch with pdl, one is launched without. A plan itself may be launched with pdl: it is read
by decode_attention, which rotate_and_store lets start when all before rotate_and_store has ended.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor


def dependent_launch(pdl: bool, tensor: Tensor) -> dict[str, bool]:
    """Options of a kernel with a constant PDL; the interpreter, on the CPU, launches in turn."""
    if pdl and tensor.is_cuda:
        return {"PDL": True, "launch_pdl": True}
    return {"PDL": False}


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
