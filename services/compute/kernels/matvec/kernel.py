"""Products of 1, 2 or 4 rows with a weight: every weight is read once, at the memory's speed.

Two shapes of program. `_rows_kernel` holds the whole input in registers and walks over blocks of
output rows, so that a norm of the input is computed once a program, from the L2 cache.
`_columns_kernel` owns one block of output rows and walks over the input, which suits inputs too
wide for registers. Row t of the output depends on row t of the input alone, bit for bit, and not
on T: sums are taken in the same order whatever T is.

The input is prepared inside the first turn of the loop over blocks: the compiler's software
pipeline asks for the first `num_stages - 1` blocks of weights before that turn, so they are on
their way while the norm is computed and, under programmatic dependent launch (`pdl`), while the
kernel before this one still runs. Under it nothing that another kernel writes may be read, and
nothing at all written, above `gdc_wait`; every program passes it.

Shape legend: T rows, I inputs, O outputs, E hidden width, F inner width of the MLP.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.matvec.config import (
    ROW_COUNTS,
    MatvecConfig,
    gate_up_config,
    matvec_config,
    norm_matvec_config,
    padded,
    prefetch_lines,
)


@triton.jit
def _wait_for_inputs(PDL: tl.constexpr):
    """Lets the next kernel start, and goes on when the one before has ended."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


@triton.jit
def _load_row(pointer, cols, NUM_IN: tl.constexpr):
    return tl.load(pointer + cols, mask=cols < NUM_IN, other=0.0)


@triton.jit
def _input_row(
    x_ptr,
    delta_ptr,
    norm_ptr,
    sum_ptr,
    eps,
    NUM_IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SUM: tl.constexpr,
):
    """One row of the input: as it is, or the norm of x + delta, which one program writes."""
    cols = tl.arange(0, BLOCK_IN)
    x = _load_row(x_ptr, cols, NUM_IN)
    if HAS_NORM:
        dtype = x_ptr.dtype.element_ty
        if HAS_DELTA:
            delta = _load_row(delta_ptr, cols, NUM_IN)
            x = (x.to(tl.float32) + delta.to(tl.float32)).to(dtype)
        if HAS_SUM:
            tl.store(sum_ptr + cols, x, mask=(cols < NUM_IN) & (tl.program_id(0) == 0))
        wide = x.to(tl.float32)
        normed = wide * tl.rsqrt(tl.sum(wide * wide, axis=0) / NUM_IN + eps)
        scale = _load_row(norm_ptr, cols, NUM_IN).to(tl.float32)
        x = (normed.to(dtype).to(tl.float32) * scale).to(dtype)
    return x


@triton.jit
def _load_weights(
    w_ptr, rows, cols, NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, BLOCK_IN: tl.constexpr
):
    """Weights [rows, cols] in float32; rows beyond the last repeat it, columns beyond are 0."""
    safe = tl.minimum(rows, NUM_OUT - 1).to(tl.int64)
    pointers = w_ptr + safe[:, None] * NUM_IN + cols[None, :]
    if NUM_IN % BLOCK_IN == 0:
        w = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = cols[None, :] < NUM_IN
        w = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    return w.to(tl.float32)


@triton.jit
def _store(out_ptr, bias_ptr, rows, value, NUM_OUT: tl.constexpr, HAS_BIAS: tl.constexpr):
    inside = rows < NUM_OUT
    if HAS_BIAS:
        value += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
    tl.store(out_ptr + rows, value.to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit
def _product(w, up_w, x, GATED: tl.constexpr):
    """One row's product, or silu(gate) * up, rounded where the separate kernels round."""
    wide = x.to(tl.float32)[None, :]
    y = tl.sum(w * wide, axis=1)
    if GATED:
        gate = y.to(x.dtype).to(tl.float32)
        up = tl.sum(up_w * wide, axis=1).to(x.dtype).to(tl.float32)
        y = (gate / (1.0 + tl.exp(-gate))).to(x.dtype).to(tl.float32) * up
    return y


@triton.jit
def _rows_kernel(
    x_ptr,
    delta_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    eps,
    X_STRIDE: tl.constexpr,
    DELTA_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    SUM_STRIDE: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    GATED: tl.constexpr,
    HAS_NORM: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks program, program + PROGRAMS, … of ROWS outputs; GATED: of gates, with their ups."""
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_IN)
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    x0 = tl.zeros([BLOCK_IN], dtype)
    if T > 1:
        x1 = tl.zeros([BLOCK_IN], dtype)
    if T > 2:
        x2 = tl.zeros([BLOCK_IN], dtype)
        x3 = tl.zeros([BLOCK_IN], dtype)
    for block in tl.range(program, (NUM_OUT + ROWS - 1) // ROWS, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)
        w = _load_weights(w_ptr, rows, cols, NUM_OUT, NUM_IN, BLOCK_IN)
        up = w
        if GATED:
            up = _load_weights(w_ptr + NUM_OUT * NUM_IN, rows, cols, NUM_OUT, NUM_IN, BLOCK_IN)
        if block == program:
            _wait_for_inputs(PDL)
            x0 = _input_row(
                x_ptr, delta_ptr, norm_ptr, sum_ptr, eps,
                NUM_IN, BLOCK_IN, HAS_NORM, HAS_DELTA, HAS_SUM,
            )  # fmt: skip
            if T > 1:
                x1 = _input_row(
                    x_ptr + X_STRIDE, delta_ptr + DELTA_STRIDE, norm_ptr, sum_ptr + SUM_STRIDE,
                    eps, NUM_IN, BLOCK_IN, HAS_NORM, HAS_DELTA, HAS_SUM,
                )  # fmt: skip
            if T > 2:
                x2 = _input_row(
                    x_ptr + 2 * X_STRIDE, delta_ptr + 2 * DELTA_STRIDE, norm_ptr,
                    sum_ptr + 2 * SUM_STRIDE, eps, NUM_IN, BLOCK_IN, HAS_NORM, HAS_DELTA, HAS_SUM,
                )  # fmt: skip
                x3 = _input_row(
                    x_ptr + 3 * X_STRIDE, delta_ptr + 3 * DELTA_STRIDE, norm_ptr,
                    sum_ptr + 3 * SUM_STRIDE, eps, NUM_IN, BLOCK_IN, HAS_NORM, HAS_DELTA, HAS_SUM,
                )  # fmt: skip
        y = _product(w, up, x0, GATED)
        _store(out_ptr, bias_ptr, rows, y, NUM_OUT, HAS_BIAS)
        if T > 1:
            y = _product(w, up, x1, GATED)
            _store(out_ptr + OUT_STRIDE, bias_ptr, rows, y, NUM_OUT, HAS_BIAS)
        if T > 2:
            y = _product(w, up, x2, GATED)
            _store(out_ptr + 2 * OUT_STRIDE, bias_ptr, rows, y, NUM_OUT, HAS_BIAS)
            y = _product(w, up, x3, GATED)
            _store(out_ptr + 3 * OUT_STRIDE, bias_ptr, rows, y, NUM_OUT, HAS_BIAS)


@triton.jit
def _prefetch_rows(w_ptr, rows, NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, LINES: tl.constexpr):
    """Ask the L2 cache for the first LINES lines of 128 bytes of these rows, and go on."""
    LINE_SIZE: tl.constexpr = 1024 // w_ptr.dtype.element_ty.primitive_bitwidth
    safe = tl.minimum(rows, NUM_OUT - 1).to(tl.int64)
    cols = tl.minimum(tl.arange(0, LINES) * LINE_SIZE, NUM_IN - 1)
    pointers = w_ptr + safe[:, None] * NUM_IN + cols[None, :]
    addresses = pointers.to(tl.int64, bitcast=True)
    asm: tl.constexpr = "prefetch.global.L2 [$1]; mov.u32 $0, 0;"
    tl.inline_asm_elementwise(asm, "=r,l", [addresses], tl.int32, is_pure=False, pack=1)


@triton.jit
def _partial(w, x_ptr, cols, NUM_IN: tl.constexpr):
    """Products summed over each group of 8 inputs, the 16 bytes that a thread loads at once."""
    products = w * _load_row(x_ptr, cols, NUM_IN).to(tl.float32)[None, :]
    return tl.sum(tl.reshape(products, [w.shape[0], w.shape[1] // 8, 8]), axis=2)


@triton.jit
def _columns_kernel(
    x_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    X_STRIDE: tl.constexpr,
    OUT_STRIDE: tl.constexpr,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    T: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    STAGES: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """ROWS outputs a program, BLOCK_IN inputs a step."""
    rows = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    if PDL:
        # the loop's pipeline asks for inputs, too, and so must stay below the wait
        _prefetch_rows(w_ptr, rows, NUM_OUT, NUM_IN, PREFETCH_LINES)
        _wait_for_inputs(PDL)
    acc0 = tl.zeros([ROWS, BLOCK_IN // 8], tl.float32)
    acc1 = acc0
    acc2 = acc0
    acc3 = acc0
    for start in tl.range(0, NUM_IN, BLOCK_IN, num_stages=STAGES):
        cols = start + tl.arange(0, BLOCK_IN)
        w = _load_weights(w_ptr, rows, cols, NUM_OUT, NUM_IN, BLOCK_IN)
        acc0 += _partial(w, x_ptr, cols, NUM_IN)
        if T > 1:
            acc1 += _partial(w, x_ptr + X_STRIDE, cols, NUM_IN)
        if T > 2:
            acc2 += _partial(w, x_ptr + 2 * X_STRIDE, cols, NUM_IN)
            acc3 += _partial(w, x_ptr + 3 * X_STRIDE, cols, NUM_IN)
    _store(out_ptr, bias_ptr, rows, tl.sum(acc0, axis=1), NUM_OUT, HAS_BIAS)
    if T > 1:
        _store(out_ptr + OUT_STRIDE, bias_ptr, rows, tl.sum(acc1, axis=1), NUM_OUT, HAS_BIAS)
    if T > 2:
        _store(out_ptr + 2 * OUT_STRIDE, bias_ptr, rows, tl.sum(acc2, axis=1), NUM_OUT, HAS_BIAS)
        _store(out_ptr + 3 * OUT_STRIDE, bias_ptr, rows, tl.sum(acc3, axis=1), NUM_OUT, HAS_BIAS)


def matvec(
    x_TI: Tensor,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """x W^T + b for T = 1, 2 or 4 rows; sums in float32 are rounded once, to `out_TO`'s dtype."""
    num_out, num_in = weight_OI.shape
    chosen = config or matvec_config(num_out, num_in, weight_OI.element_size())
    if chosen.block_in == 0:
        _launch_rows(x_TI, None, None, weight_OI, bias_O, out_TO, None, 0.0, chosen, pdl)
        return
    _check(x_TI, weight_OI, out_TO, num_out)
    _columns_kernel[(triton.cdiv(num_out, chosen.rows),)](
        x_TI,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        X_STRIDE=_row_stride(x_TI),
        OUT_STRIDE=_row_stride(out_TO),
        NUM_OUT=num_out,
        NUM_IN=num_in,
        T=x_TI.shape[0],
        ROWS=chosen.rows,
        BLOCK_IN=chosen.block_in,
        STAGES=chosen.num_stages,
        HAS_BIAS=bias_O is not None,
        PREFETCH_LINES=prefetch_lines(num_in, weight_OI.element_size()),
        PDL=pdl,
        num_warps=chosen.num_warps,
        **_launch_options(pdl),
    )


def norm_matvec(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    norm_weight_E: Tensor,
    eps: float,
    weight_OE: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    sum_TE: Tensor | None,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """The product of the RMS norm of x + delta, and x + delta itself into `sum_TE` where given.

    Rounded as by `add_rms_norm`: the sum, the normalised value, and that times the norm's weight.
    `sum_TE` shares no memory with the inputs: programs read those while one writes it.
    """
    num_out, num_in = weight_OE.shape
    config = config or norm_matvec_config(num_out, num_in, weight_OE.element_size())
    _launch_rows(x_TE, delta_TE, norm_weight_E, weight_OE, bias_O, out_TO, sum_TE, eps, config, pdl)


def norm_gate_up_silu(
    x_TE: Tensor,
    delta_TE: Tensor | None,
    norm_weight_E: Tensor,
    eps: float,
    weight_2F_E: Tensor,
    out_TF: Tensor,
    sum_TE: Tensor | None,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """silu(gate) * up for the RMS norm of x + delta, else as `norm_matvec`.

    The weight's first half are the gates. Rounded as by `silu_mul` after a product: gate and up,
    silu(gate), and the result.
    """
    num_gates = weight_2F_E.shape[0] // 2
    config = config or gate_up_config(num_gates, weight_2F_E.shape[1], weight_2F_E.element_size())
    _launch_rows(
        x_TE, delta_TE, norm_weight_E, weight_2F_E, None, out_TF, sum_TE, eps, config, pdl,
        gated=True,
    )  # fmt: skip


def _launch_rows(
    x_TI: Tensor,
    delta_TI: Tensor | None,
    norm_weight_I: Tensor | None,
    weight_OI: Tensor,
    bias_O: Tensor | None,
    out_TO: Tensor,
    sum_TI: Tensor | None,
    eps: float,
    config: MatvecConfig,
    pdl: bool,
    gated: bool = False,
) -> None:
    num_out = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    _check(x_TI, weight_OI, out_TO, num_out)
    num_programs = min(config.programs, triton.cdiv(num_out, config.rows))
    _rows_kernel[(num_programs,)](
        x_TI,
        x_TI if delta_TI is None else delta_TI,  # any address will do where none is read
        x_TI if norm_weight_I is None else norm_weight_I,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        x_TI if sum_TI is None else sum_TI,
        eps,
        X_STRIDE=_row_stride(x_TI),
        DELTA_STRIDE=_row_stride(delta_TI),
        OUT_STRIDE=_row_stride(out_TO),
        SUM_STRIDE=_row_stride(sum_TI),
        NUM_OUT=num_out,
        NUM_IN=weight_OI.shape[1],
        T=x_TI.shape[0],
        ROWS=config.rows,
        BLOCK_IN=padded(weight_OI.shape[1]),
        PROGRAMS=num_programs,
        STAGES=config.num_stages,
        GATED=gated,
        HAS_NORM=norm_weight_I is not None,
        HAS_DELTA=delta_TI is not None,
        HAS_SUM=sum_TI is not None,
        HAS_BIAS=bias_O is not None,
        PDL=pdl,
        num_warps=config.num_warps,
        # two programs' share of the registers; four rows would take more and leave one alone
        maxnreg=min(255, max(128, 128 * 8 // config.num_warps)),
        **_launch_options(pdl),
    )


def _check(x_TI: Tensor, weight_OI: Tensor, out_TO: Tensor, num_out: int) -> None:
    assert x_TI.shape[0] in ROW_COUNTS, f"{x_TI.shape[0]} rows: the kernels take {ROW_COUNTS}"
    assert x_TI.shape[1] == weight_OI.shape[1] and x_TI.stride(1) == 1
    assert out_TO.shape == (x_TI.shape[0], num_out) and out_TO.stride(1) == 1
    assert weight_OI.is_contiguous()


def _row_stride(x: Tensor | None) -> int:
    # a single row's stride means nothing, and would make another kernel
    return x.stride(0) if x is not None and x.shape[0] > 1 else 0


def _launch_options(pdl: bool) -> dict[str, bool]:
    return {"launch_pdl": True} if pdl else {}  # the interpreter does not know the option
