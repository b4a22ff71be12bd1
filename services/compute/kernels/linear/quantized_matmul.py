"""Products of quantized rows with packed weights, on tensor cores of 8 bits.

FP8 codes are multiplied as they are. Integers are multiplied exactly, those of 4 bits as 16 times
their numbers in 8; the two planes of inputs of 16 bits are rows of their own. Hopper's tensor cores
add up FP8 products with 14 bits: after 256 inputs at most, sums go on in float32.

Weights and rows are copied by the multiprocessor's own engine (TMA), many steps ahead. With copies
that threads ask for (cp.async) gate/up of an 8B model took 40 us where it takes 33 so, and o 14
instead of 8 (64 rows of FP8, H200). Few tiles are split over their inputs as in skinny_matmul. A
row's result follows from the row and from the launch's constants.

Shape legend: T rows, P planes, R = T * P, I inputs of a step, O outputs, B bytes of its codes.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.compute.kernels.launch import dependent_launch, prefetch_rows
from services.compute.kernels.linear.packed_codes import complete
from services.compute.kernels.linear.quantized_matmul_config import QuantizedConfig, row_form
from services.compute.kernels.linear.skinny_matmul_config import SkinnyWork
from services.compute.kernels.linear.split_tiles import merged_at_once
from services.compute.kernels.rows.quantized_rows import QuantizedRows
from services.compute.quantization.packed import Packed

PREFETCH_BYTES = 32 << 10
"""Of a program's weights, before it waits for the kernel before it."""

LINE_BYTES = 128
# Codes of 4 bits, less 8 and times 16, are bytes: the lower halves' and the upper ones'.
_SIXTEENFOLD = tl.constexpr("""
{
.reg .b32 low;
shl.b32 low, $2, 4;
lop3.b32 $0, low, 0xf0f0f0f0, 0x80808080, 0x6a;
lop3.b32 $1, $2, 0xf0f0f0f0, 0x80808080, 0x6a;
}
""")


@triton.jit
def _integers(codes, HALVES: tl.constexpr, ASM: tl.constexpr):
    """Codes as integers of 8 bits; those of 4, less 8 and times 16, of lower and upper halves."""
    if HALVES:
        if ASM:
            low, high = tl.inline_asm_elementwise(
                _SIXTEENFOLD, "=r,=r,r", [codes], dtype=(tl.int8, tl.int8), is_pure=True, pack=4
            )
        else:
            low = (((codes & 15) << 4) ^ 0x80).to(tl.int8, bitcast=True)
            high = ((codes & 0xF0) ^ 0x80).to(tl.int8, bitcast=True)
    else:
        low = codes
        high = codes
    return low, high


@triton.jit
def _dot(w_OI, x_RI, sums, WIDEN: tl.constexpr):
    """sums + W x^T."""
    if WIDEN:  # the interpreter
        wide = tl.dot(w_OI.to(tl.float32), tl.trans(x_RI.to(tl.float32)), input_precision="ieee")
        sums += wide.to(sums.dtype)
    elif sums.dtype == tl.int32:
        sums = tl.dot(w_OI, tl.trans(x_RI), sums, out_dtype=tl.int32)
    else:
        sums = tl.dot(w_OI, tl.trans(x_RI), sums)
    return sums


@triton.jit
def _joined_planes(
    sums, BLOCK_O: tl.constexpr, BLOCK_T: tl.constexpr, PLANES: tl.constexpr, FITS: tl.constexpr
):
    """Exact sums [O, R] as float32 sums [O, T]; FITS: they do so in 32 bits."""
    if PLANES == 2:
        upper, lower = tl.split(tl.reshape(sums, (BLOCK_O, BLOCK_T, 2)))
        if FITS:
            joined = (upper * 256 + lower).to(tl.float32)
        else:
            joined = upper.to(tl.float32) * 256 + lower.to(tl.float32)
    else:
        joined = sums.to(tl.float32)
    return joined


@triton.jit
def _scales(
    scale_ptr, x_scale_ptr, row_O, t, t_in, num_tokens, k, STEPS: tl.constexpr, G: tl.constexpr,
    GX: tl.constexpr, SCALE_O: tl.constexpr, SCALE_G: tl.constexpr,
):  # fmt: skip
    """Scales, and those of inputs, of a step's group."""
    group = k // (STEPS // G)
    scale_O = tl.load(scale_ptr + row_O * SCALE_O + group * SCALE_G).to(tl.float32)
    x_scale_T = tl.zeros(t.shape, dtype=tl.float32)
    if GX > 1:
        x_scale_T = tl.load(x_scale_ptr + k * num_tokens + t, mask=t_in, other=0.0)
    return scale_O, x_scale_T


@triton.jit
def _less_zeros(
    total, scale_ptr, zero_ptr, x_sum_ptr, row_O, t, t_in, begin, end, STEPS: tl.constexpr,
    G: tl.constexpr, SCALE_O: tl.constexpr, SCALE_G: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The sums of these steps less what zeros take off: a product of its own, of scales times zeros
    with sums of inputs. In the loop of steps it took more registers than there are."""
    CHUNK: tl.constexpr = 16 if STEPS < 32 else 32
    PRECISION: tl.constexpr = "ieee" if WIDEN else "tf32x3"
    for first in range(begin, end, CHUNK):
        k = first + tl.arange(0, CHUNK)
        k_in = k < end
        place = row_O[:, None] * SCALE_O + (k // (STEPS // G) * SCALE_G)[None, :]
        scale = tl.load(scale_ptr + place, mask=k_in[None, :], other=0.0).to(tl.float32)
        zero = tl.load(zero_ptr + place, mask=k_in[None, :], other=0.0).to(tl.float32)
        x_places = t[None, :] * STEPS + k[:, None]
        x_sum = tl.load(x_sum_ptr + x_places, mask=k_in[:, None] & t_in[None, :], other=0.0)
        total = tl.dot(-scale * zero, x_sum, total, input_precision=PRECISION)
    return total


@triton.jit
def _store(
    total, out_ptr, bias_ptr, scale_ptr, zero_ptr, x_scale_ptr, x_sum_ptr, o, t, num_tokens,
    NUM_OUT: tl.constexpr, G: tl.constexpr, GX: tl.constexpr, SCALE_O: tl.constexpr,
    HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr,
):  # fmt: skip
    """Sums of a tile, with the scales that all of its inputs have in common, rounded."""
    o_in, t_in = o < NUM_OUT, t < num_tokens
    if G == 1:
        if HAS_ZEROS:
            zero_O = tl.load(zero_ptr + o * SCALE_O, mask=o_in, other=0.0).to(tl.float32)
            total -= zero_O[:, None] * tl.load(x_sum_ptr + t, mask=t_in, other=0.0)[None, :]
        total *= tl.load(scale_ptr + o * SCALE_O, mask=o_in, other=0.0).to(tl.float32)[:, None]
    if GX == 1:
        total *= tl.load(x_scale_ptr + t, mask=t_in, other=0.0)[None, :]
    if HAS_BIAS:
        total += tl.load(bias_ptr + o, mask=o_in, other=0.0).to(tl.float32)[:, None]
    pointers = out_ptr + t[:, None].to(tl.int64) * NUM_OUT + o[None, :]
    inside = t_in[:, None] & o_in[None, :]
    tl.store(pointers, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=["num_tokens"])
def _quantized_matmul_kernel(
    x_desc,
    code_desc,
    x_scale_ptr,
    x_sum_ptr,
    code_ptr,
    scale_ptr,
    zero_ptr,
    bias_ptr,
    out_ptr,
    partial_ptr,
    arrivals_ptr,
    num_tokens,
    NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr,
    G: tl.constexpr,
    GX: tl.constexpr,
    SCALE_O: tl.constexpr,  # strides of scales and zeros
    SCALE_G: tl.constexpr,
    IS_FLOAT: tl.constexpr,
    HALVES: tl.constexpr,
    PLANES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    SPLITS: tl.constexpr,
    GROUP: tl.constexpr,
    STAGES: tl.constexpr,
    PREFETCH_LINES: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):
    BLOCK_B: tl.constexpr = BLOCK_I // 2 if HALVES else BLOCK_I
    NUM_BYTES: tl.constexpr = NUM_IN // 2 if HALVES else NUM_IN
    ALL_STEPS: tl.constexpr = NUM_IN // BLOCK_I
    STEPS: tl.constexpr = (ALL_STEPS + SPLITS - 1) // SPLITS
    UNIT: tl.constexpr = 1.0 / 16 if HALVES else 1.0
    CARRIED: tl.constexpr = not IS_FLOAT and G == 1  # exact over all inputs
    DTYPE: tl.constexpr = tl.float32 if IS_FLOAT else tl.int32
    split, tile = tl.program_id(0), tl.program_id(2)
    begin = split * STEPS
    first_o = tile * BLOCK_O
    first_t = tl.program_id(1) * BLOCK_T
    o = first_o + tl.arange(0, BLOCK_O)
    t = first_t + tl.arange(0, BLOCK_T)
    t_in = t < num_tokens
    row_O = o
    if NUM_OUT % BLOCK_O != 0:
        row_O = tl.minimum(o, NUM_OUT - 1)  # beyond the last: again the last
    if PDL:
        row = row_O.to(tl.int64) * NUM_BYTES
        prefetch_rows(code_ptr, row, begin * BLOCK_B, NUM_BYTES, PREFETCH_LINES)
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()

    total = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
    sums = tl.zeros((BLOCK_O, BLOCK_T * PLANES), dtype=DTYPE)
    scale_O, x_scale_T = _scales(
        scale_ptr, x_scale_ptr, row_O, t, t_in, num_tokens, tl.minimum(begin, ALL_STEPS - 1),
        ALL_STEPS, G, GX, SCALE_O, SCALE_G,
    )  # fmt: skip
    end = tl.minimum(begin + STEPS, ALL_STEPS)
    for k in tl.range(begin, end, num_stages=STAGES):
        codes = code_desc.load([first_o, k * BLOCK_B])
        if not CARRIED:
            sums = tl.zeros((BLOCK_O, BLOCK_T * PLANES), dtype=DTYPE)
        if HALVES:
            low, high = _integers(codes, HALVES, not WIDEN)
            x = x_desc.load([first_t * PLANES, k * BLOCK_I])
            sums = _dot(low, x, sums, WIDEN)
            x = x_desc.load([first_t * PLANES, k * BLOCK_I + BLOCK_B])
            sums = _dot(high, x, sums, WIDEN)
            if CARRIED and not WIDEN:
                sums = complete(sums)
        else:
            x = x_desc.load([first_t * PLANES, k * BLOCK_I])
            sums = _dot(codes, x, sums, WIDEN)
        if not CARRIED:
            y = _joined_planes(sums, BLOCK_O, BLOCK_T, PLANES, True)
            if G > 1:
                y *= (scale_O * UNIT)[:, None]
                if GX > 1:
                    y *= x_scale_T[None, :]
                # Those of the next step: loads so narrow are not in the pipeline.
                scale_O, x_scale_T = _scales(
                    scale_ptr, x_scale_ptr, row_O, t, t_in, num_tokens,
                    tl.minimum(k + 1, ALL_STEPS - 1), ALL_STEPS, G, GX, SCALE_O, SCALE_G,
                )  # fmt: skip
            total += y
    if CARRIED:
        total = _joined_planes(sums, BLOCK_O, BLOCK_T, PLANES, False) * UNIT
    elif HAS_ZEROS:
        total = _less_zeros(
            total, scale_ptr, zero_ptr, x_sum_ptr, row_O, t, t_in, begin, end, ALL_STEPS, G,
            SCALE_O, SCALE_G, WIDEN,
        )  # fmt: skip
    is_last = True
    if SPLITS > 1:
        SIZE: tl.constexpr = BLOCK_O * BLOCK_T
        place_OT = tl.arange(0, BLOCK_O)[:, None] * BLOCK_T + tl.arange(0, BLOCK_T)[None, :]
        pointers = partial_ptr + tile * (SPLITS * SIZE) + place_OT
        tl.store(pointers + split * SIZE, total)
        # All threads' sums are written before the one thread that says so releases them; the
        # program that finds itself last acquires everybody's.
        tl.debug_barrier()
        is_last = tl.atomic_add(arrivals_ptr + tile, 1, sem="acq_rel", scope="gpu") == SPLITS - 1
        if is_last:
            tl.store(arrivals_ptr + tile, 0)
            total = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
            # past the first-level cache, which knows nothing of other programs' writes
            for first in range(0, SPLITS, GROUP):
                for other in tl.static_range(GROUP):
                    total += tl.load(pointers + (first + other) * SIZE, cache_modifier=".cg")
    if is_last:
        _store(
            total, out_ptr, bias_ptr, scale_ptr, zero_ptr, x_scale_ptr, x_sum_ptr, o, t,
            num_tokens, NUM_OUT, G, GX, SCALE_O, HAS_ZEROS, HAS_BIAS,
        )  # fmt: skip


def quantized_matmul(
    rows: QuantizedRows,
    weight: Packed,
    bias_O: Tensor | None,
    out_TO: Tensor,
    work: SkinnyWork,
    config: QuantizedConfig,
    *,
    pdl: bool = False,
) -> None:
    """x W^T + b of rows in the weight's `row_form`; sums are rounded once, to `out_TO`'s dtype."""
    num_out, num_groups = weight.scales_OG.shape
    num_tokens, num_in = rows.shape
    planes, block_in = rows.form.planes, config.block_in
    assert num_in == weight.num_inputs and out_TO.shape == (num_tokens, num_out)
    assert rows.form == row_form(weight, 2) and out_TO.is_contiguous()
    assert num_in % block_in == 0
    assert block_in == 128 or (num_groups == 1 and not weight.has_halves)
    tiles = triton.cdiv(num_out, config.block_out)
    token_tiles = triton.cdiv(num_tokens, config.block_tokens)
    tile_size = config.block_out * config.block_tokens
    if config.splits > 1:
        assert token_tiles == 1 and tiles <= work.arrivals.numel()
        assert tiles * config.splits * tile_size <= work.partial.numel(), "SkinnyWork is too small"
    column_bytes = block_in // 2 if weight.has_halves else block_in
    on_gpu = out_TO.is_cuda
    codes_OB, x_RI = weight.codes_OB, rows.codes_TPI.view(-1, num_in)
    _quantized_matmul_kernel[(config.splits, token_tiles, tiles)](
        TensorDescriptor.from_tensor(x_RI, [config.block_tokens * planes, column_bytes]),
        TensorDescriptor.from_tensor(codes_OB, [config.block_out, column_bytes]),
        rows.scales_TG,
        rows.sums_TN,
        weight.loadable_OB,
        weight.scales_OG,
        weight.scales_OG if weight.zeros_OG is None else weight.zeros_OG,
        rows.scales_TG if bias_O is None else bias_O,  # any address will do where none is read
        out_TO,
        work.partial,
        work.arrivals,
        num_tokens,
        NUM_OUT=num_out,
        NUM_IN=num_in,
        G=num_groups,
        GX=rows.scales_TG.shape[1],
        SCALE_O=weight.scales_OG.stride(0),
        SCALE_G=weight.scales_OG.stride(1),
        IS_FLOAT=rows.form.kind == "fp8",
        HALVES=weight.has_halves,
        PLANES=planes,
        HAS_ZEROS=weight.zeros_OG is not None,
        HAS_BIAS=bias_O is not None,
        BLOCK_T=config.block_tokens,
        BLOCK_O=config.block_out,
        BLOCK_I=block_in,
        SPLITS=config.splits,
        GROUP=merged_at_once(config.splits, tile_size),
        STAGES=config.num_stages,
        PREFETCH_LINES=max(1, PREFETCH_BYTES // (LINE_BYTES * config.block_out)),
        WIDEN=not on_gpu,  # the interpreter multiplies codes by their numbers
        num_warps=config.num_warps,
        **dependent_launch(pdl, out_TO),
    )
