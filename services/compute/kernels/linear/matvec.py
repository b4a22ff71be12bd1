"""Products of one row with a weight: every weight is read once, at the memory's speed.

A program holds the whole input in registers and takes blocks of output rows, mostly one; a norm of
the input is computed by every program, from the L2 cache.

Under programmatic dependent launch (`pdl`) a program starts while the kernel before it still runs.
Nothing that another kernel writes may be read, and nothing at all written, above `gdc_wait`; every
program passes it. Weights are asked for before. Where a norm follows they go to registers (or, in a
loop over blocks, the compiler's pipeline asks for the first blocks ahead of the first turn). A
product alone has as long an input as its rows, and would wait for weights and input one after the
other: there they are only brought into the L2 cache.

Codes of FP8 stay bytes in registers until the input is there: as numbers they would take four times
as many. A row's scale multiplies its sum. On Hopper wide ones are for `fp8_matvec`.

Shape legend: T rows, which is 1, I inputs, O outputs, E hidden width, F inner width of the MLP.
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import triton
import triton.language as tl
from torch import Tensor

from services.compute.kernels.launch import dependent_launch, prefetch_rows
from services.compute.kernels.linear.fp8_matvec import fp8_matvec, suits
from services.compute.kernels.linear.matmul import linear_reference
from services.compute.kernels.linear.matvec_config import (
    MatvecConfig,
    gate_up_config,
    matvec_config,
    max_registers,
    padded,
    prefetch_lines,
)
from services.compute.kernels.linear.packed_codes import decode, kernel_kind
from services.compute.kernels.rows.activations import act_mul_reference, act_mul_rounded
from services.compute.kernels.rows.add_norm import (
    NormedInput,
    add_delta,
    add_reference,
    apply_weight,
    norm_form,
    norm_reference,
    normalize,
)
from services.compute.quantization.packed import Packed, Weight

if TYPE_CHECKING:
    from services.compute.layers.parts import Activation


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
    norm_bias_ptr,
    post_ptr,
    sum_ptr,
    eps,
    post_eps,
    scale,
    NUM_IN: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SUM: tl.constexpr,
    NORM: tl.constexpr,
    POST: tl.constexpr,
):
    """The input: as it is, or the norm of x + scale * post(delta), which one program writes."""
    cols = tl.arange(0, BLOCK_IN)
    x = _load_row(x_ptr, cols, NUM_IN)
    if NORM is not None:
        dtype = x_ptr.dtype.element_ty
        inside = cols < NUM_IN
        if HAS_DELTA:
            delta = _load_row(delta_ptr, cols, NUM_IN)
            post = None
            if post_ptr is not None:
                post = _load_row(post_ptr, cols, NUM_IN)
            x = add_delta(
                x.to(tl.float32), delta.to(tl.float32), inside, post, post_eps, scale,
                NUM_IN, POST, dtype,
            )  # fmt: skip
        if HAS_SUM:
            tl.store(sum_ptr + cols, x, mask=inside & (tl.program_id(0) == 0))
        normal = normalize(x.to(tl.float32), inside, eps, NUM_IN, NORM)
        weight = _load_row(norm_ptr, cols, NUM_IN)
        bias = None
        if norm_bias_ptr is not None:
            bias = _load_row(norm_bias_ptr, cols, NUM_IN)
        x = apply_weight(normal, weight, bias, NORM, dtype)
    return x


@triton.jit
def _load_weights(
    w_ptr, rows, cols, NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, BLOCK_IN: tl.constexpr,
    KIND: tl.constexpr,
):  # fmt: skip
    """Weights [rows, cols] in float32, or their codes; rows beyond the last repeat it, columns
    beyond are 0."""
    safe = tl.minimum(rows, NUM_OUT - 1).to(tl.int64)
    pointers = w_ptr + safe[:, None] * NUM_IN + cols[None, :]
    if NUM_IN == BLOCK_IN:
        w = tl.load(pointers, eviction_policy="evict_first")
    else:
        inside = cols[None, :] < NUM_IN
        w = tl.load(pointers, mask=inside, other=0.0, eviction_policy="evict_first")
    if KIND is None:
        w = w.to(tl.float32)
    return w


@triton.jit
def _load_scales(scale_ptr, rows, NUM_OUT: tl.constexpr):
    scales = None
    if scale_ptr is not None:
        scales = tl.load(scale_ptr + tl.minimum(rows, NUM_OUT - 1)).to(tl.float32)
    return scales


@triton.jit
def _sums(w, scales, wide, KIND: tl.constexpr):
    if KIND is not None:
        w, _ = decode(w, False, KIND, tl.float32)
    sums = tl.sum(w * wide, axis=1)
    if scales is not None:
        sums *= scales
    return sums


@triton.jit
def _product(w, scales, up_w, up_scales, x, KIND: tl.constexpr, ACTIVATION: tl.constexpr):
    """The product, or act(gate) * up, rounded where the separate kernels round."""
    wide = x.to(tl.float32)[None, :]
    y = _sums(w, scales, wide, KIND)
    if ACTIVATION is not None:
        y = act_mul_rounded(y, _sums(up_w, up_scales, wide, KIND), ACTIVATION, x.dtype)
    return y


@triton.jit
def _matvec_kernel(
    x_ptr,
    delta_ptr,
    norm_ptr,
    w_ptr,
    bias_ptr,
    out_ptr,
    sum_ptr,
    w_scale_ptr,
    norm_bias_ptr,
    post_ptr,
    eps,
    post_eps,
    scale,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_IN: tl.constexpr,
    PROGRAMS: tl.constexpr,
    STAGES: tl.constexpr,
    KIND: tl.constexpr,
    ACTIVATION: tl.constexpr,
    HAS_DELTA: tl.constexpr,
    HAS_SUM: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    NORM: tl.constexpr,
    POST: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    PDL: tl.constexpr,
):
    """Blocks program, program + PROGRAMS, … of ROWS outputs: of gates, with an activation.

    KIND is how codes are decoded; None: weights are numbers.
    """
    program = tl.program_id(0)
    cols = tl.arange(0, BLOCK_IN)
    x = tl.zeros([BLOCK_IN], x_ptr.dtype.element_ty)
    if PREFETCH_LINES > 0:
        rows = program * ROWS + tl.arange(0, ROWS)
        safe = tl.minimum(rows, NUM_OUT - 1).to(tl.int64)
        prefetch_rows(w_ptr, safe * NUM_IN, 0, NUM_IN, PREFETCH_LINES)
        if w_scale_ptr is not None:
            prefetch_rows(w_scale_ptr, safe, 0, 1, 1)
        if ACTIVATION is not None:
            prefetch_rows(w_ptr, (safe + NUM_OUT) * NUM_IN, 0, NUM_IN, PREFETCH_LINES)
            if w_scale_ptr is not None:
                prefetch_rows(w_scale_ptr, safe + NUM_OUT, 0, 1, 1)
        _wait_for_inputs(PDL)
    for block in tl.range(program, (NUM_OUT + ROWS - 1) // ROWS, PROGRAMS, num_stages=STAGES):
        rows = block * ROWS + tl.arange(0, ROWS)
        w = _load_weights(w_ptr, rows, cols, NUM_OUT, NUM_IN, BLOCK_IN, KIND)
        scales = _load_scales(w_scale_ptr, rows, NUM_OUT)
        up = w
        up_scales = scales
        if ACTIVATION is not None:
            up_ptr = w_ptr + NUM_OUT * NUM_IN
            up = _load_weights(up_ptr, rows, cols, NUM_OUT, NUM_IN, BLOCK_IN, KIND)
            if w_scale_ptr is not None:
                up_scales = _load_scales(w_scale_ptr + NUM_OUT, rows, NUM_OUT)
        if block == program:
            if PREFETCH_LINES == 0:
                _wait_for_inputs(PDL)
            x = _input_row(
                x_ptr, delta_ptr, norm_ptr, norm_bias_ptr, post_ptr, sum_ptr, eps, post_eps, scale,
                NUM_IN, BLOCK_IN, HAS_DELTA, HAS_SUM, NORM, POST,
            )  # fmt: skip
        y = _product(w, scales, up, up_scales, x, KIND, ACTIVATION)
        inside = rows < NUM_OUT
        if HAS_BIAS:
            y += tl.load(bias_ptr + rows, mask=inside, other=0.0).to(tl.float32)
        tl.store(out_ptr + rows, y.to(out_ptr.dtype.element_ty), mask=inside)


def matvec(
    x_TI: Tensor,
    weight_OI: Weight,
    bias_O: Tensor | None,
    out_TO: Tensor,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """x W^T + b for one row; sums in float32 are rounded once, to `out_TO`'s dtype."""
    plain = NormedInput(x_TI, None, None, None)
    _launch(plain, weight_OI, bias_O, out_TO, config, pdl)


def norm_matvec(
    normed: NormedInput,
    weight_OE: Weight,
    bias_O: Tensor | None,
    out_TO: Tensor,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """The product with a normed input, else as `matvec`."""
    _launch(normed, weight_OE, bias_O, out_TO, config, pdl)


def gate_up(
    x_TE: Tensor,
    weight_2F_E: Weight,
    out_TF: Tensor,
    activation: Activation,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """As `norm_gate_up`, for an input that is normed already."""
    plain = NormedInput(x_TE, None, None, None)
    _launch(plain, weight_2F_E, None, out_TF, config, pdl, activation)


def norm_gate_up(
    normed: NormedInput,
    weight_2F_E: Weight,
    out_TF: Tensor,
    activation: Activation,
    *,
    config: MatvecConfig | None = None,
    pdl: bool = False,
) -> None:
    """act(gate) * up for a normed input; the weight's first half are the gates.

    Rounded as by `act_mul` after a product: gate and up, act(gate), and the result.
    """
    _launch(normed, weight_2F_E, None, out_TF, config, pdl, activation)


def _launch(
    normed: NormedInput,
    weight: Weight,
    bias_O: Tensor | None,
    out_TO: Tensor,
    config: MatvecConfig | None,
    pdl: bool,
    activation: Activation | None = None,
) -> None:
    gated = activation is not None
    x_TI, delta_TI, norm, sum_TI, post, _ = normed
    weight_OI, scales_O, kind = _operands(weight)
    num_in, itemsize = weight_OI.shape[1], weight_OI.element_size()
    num_out = weight_OI.shape[0] // 2 if gated else weight_OI.shape[0]
    assert x_TI.shape == (1, num_in) and x_TI.stride(1) == 1
    assert out_TO.shape == (1, num_out) and out_TO.stride(1) == 1
    assert weight_OI.is_contiguous()
    if config is None and suits(weight_OI, normed, out_TO, gated=gated, pdl=pdl):
        assert scales_O is not None
        fp8_matvec(normed, weight_OI, scales_O, bias_O, out_TO, activation, pdl=pdl)
        return
    if config is None and gated:
        config = gate_up_config(num_out, num_in, itemsize)
    elif config is None:
        config = matvec_config(num_out, num_in, itemsize, normed=norm is not None)
    num_programs = min(config.programs, triton.cdiv(num_out, config.rows))
    prefetches = pdl and norm is None and config.num_stages == 1
    _matvec_kernel[(num_programs,)](
        x_TI,
        x_TI if delta_TI is None else delta_TI,  # any address will do where none is read
        x_TI if norm is None else norm.weight_E,
        weight_OI,
        x_TI if bias_O is None else bias_O,
        out_TO,
        x_TI if sum_TI is None else sum_TI,
        scales_O,
        *normed.rare_operands,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        ROWS=config.rows,
        BLOCK_IN=padded(num_in),
        PROGRAMS=num_programs,
        STAGES=config.num_stages,
        KIND=kind,
        ACTIVATION=activation,
        HAS_DELTA=delta_TI is not None,
        HAS_SUM=sum_TI is not None,
        HAS_BIAS=bias_O is not None,
        NORM=norm_form(norm),
        POST=norm_form(post),
        PREFETCH_LINES=prefetch_lines(num_in, itemsize) if prefetches else 0,
        num_warps=config.num_warps,
        maxnreg=max_registers(config, num_in, 2 if gated else 1, kind),
        **dependent_launch(pdl, out_TO),
    )


def _operands(weight: Weight) -> tuple[Tensor, Tensor | None, str | None]:
    """Numbers or codes [O, I], the scales of the rows of codes, and how codes are decoded."""
    if not isinstance(weight, Packed):
        return weight, None, None
    assert has_scale_a_row(weight)
    scales_O = weight.scales_OG[:, 0]
    assert scales_O.is_contiguous()
    return weight.loadable_OB, scales_O, kernel_kind(weight)


def has_scale_a_row(weight: Packed) -> bool:
    """Whether it is FP8 that these products read: groups and orders of inputs they do not."""
    return weight.kind == "fp8" and weight.scales_OG.shape[1] == 1 and weight.order_I is None


def norm_matvec_reference(
    normed: NormedInput, weight_OE: Tensor, bias_O: Tensor | None, out_TO: Tensor
) -> None:
    x_TE, delta_TE, norm, sum_TE, post, scale = normed
    x_TE = x_TE if delta_TE is None else add_reference(x_TE, delta_TE, post, scale)
    if sum_TE is not None:
        sum_TE.copy_(x_TE)
    assert norm is not None
    linear_reference(norm_reference(x_TE, norm), weight_OE, bias_O, out_TO)


def norm_gate_up_reference(
    normed: NormedInput, weight_2F_E: Tensor, out_TF: Tensor, activation: Activation
) -> None:
    gate_up_TF2 = normed.x_TE.new_empty(len(normed.x_TE), len(weight_2F_E))
    norm_matvec_reference(normed, weight_2F_E, None, gate_up_TF2)
    act_mul_reference(gate_up_TF2, out_TF, activation)
