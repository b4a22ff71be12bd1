"""Products of rows with the maps of their experts: a tile of rows is of one expert.

The first of an expert's two products takes rows of tokens and writes those of pairs in the order of
experts, its gating in the launch; the second writes pairs where `combine` finds a token's together.
Weights are copied by the multiprocessor's own engine (TMA) where it has one, many steps ahead.

Codes are decoded in registers. Scales of groups of 128 inputs or more are multiplied into the sums
of a step; smaller ones into the weights, which are then rounded to the inputs' dtype.

A row's sums follow from the row and from the launch's constants. Weights are the taller operand.

Shape legend: T tokens, K experts of a token, R = T * K pairs, X experts, I inputs, O outputs,
F gates, G groups of a step's inputs, B bytes of its codes.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, NamedTuple

import triton
import triton.language as tl
from torch import Tensor
from triton.tools.tensor_descriptor import TensorDescriptor

from services.compute.kernels.activations import gated_rounded
from services.compute.kernels.expert_matmul_config import ExpertConfig, ExpertStack
from services.compute.kernels.launch import dependent_launch
from services.compute.kernels.packed_codes import (
    FP4_EXPONENT,
    decode,
    decode_bf16,
    decode_scaled_fp4,
    inputs_of,
    kernel_kind,
)
from services.compute.kernels.quantized_matmul_config import fits_device
from services.compute.kernels.sort_experts import ExpertOrder
from services.compute.quantization.packed import Packed

if TYPE_CHECKING:
    from services.compute.layers.parts import Gating

HALF_GROUP = 16
"""Inputs of a group, where the two codes of a byte are of two groups."""

STEP_INPUTS = 128
"""Of packed weights."""


@triton.jit
def _load_codes(
    desc, code_ptr, first_row, num_rows, start, BLOCK_O: tl.constexpr, BLOCK_B: tl.constexpr,
    NUM_BYTES: tl.constexpr, TMA: tl.constexpr,
):  # fmt: skip
    """Weights or codes [O, B]; rows beyond the expert's are others', columns beyond are 0."""
    if TMA:
        codes = desc.load([first_row, start])
    else:
        row_O = tl.minimum(first_row + tl.arange(0, BLOCK_O), num_rows - 1)
        b = start + tl.arange(0, BLOCK_B)
        pointers = code_ptr + row_O.to(tl.int64)[:, None] * NUM_BYTES + b[None, :]
        if NUM_BYTES % BLOCK_B == 0:
            codes = tl.load(pointers, eviction_policy="evict_first")
        else:
            codes = tl.load(pointers, mask=(b < NUM_BYTES)[None, :], other=0)
    return codes


@triton.jit
def _load_groups(
    value_ptr, row_O, step, STEP_GROUPS: tl.constexpr, GROUP_STEPS: tl.constexpr, G: tl.constexpr,
    SCALE_O: tl.constexpr, SCALE_G: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [O, G] of a step's groups, in float32."""
    group = step // GROUP_STEPS * STEP_GROUPS + tl.arange(0, STEP_GROUPS)
    place = row_O.to(tl.int64)[:, None] * SCALE_O + (group * SCALE_G)[None, :]
    if G % STEP_GROUPS == 0 and GROUP_STEPS == 1:
        value_OG = tl.load(value_ptr + place)
    else:
        value_OG = tl.load(value_ptr + place, mask=(group < G)[None, :], other=0.0)
    return value_OG.to(tl.float32)


@triton.jit
def _spread(w_OB, scale_OG, zero_OG, HAS_ZEROS: tl.constexpr):
    """(w - zero) * scale, of the groups of which a step has several."""
    BLOCK_O: tl.constexpr = w_OB.shape[0]
    GROUPS: tl.constexpr = scale_OG.shape[1]
    w = tl.reshape(w_OB, (BLOCK_O, GROUPS, w_OB.shape[1] // GROUPS))
    if HAS_ZEROS:
        w -= zero_OG[:, :, None]
    return tl.reshape(w * scale_OG[:, :, None], (BLOCK_O, w_OB.shape[1]))


@triton.jit
def _halves_of(value_OG):
    """Those of the lower halves' groups and of the upper ones', which take turns."""
    BLOCK_O: tl.constexpr = value_OG.shape[0]
    return tl.split(tl.reshape(value_OG, (BLOCK_O, value_OG.shape[1] // 2, 2)))


@triton.jit
def _dot(w_OI, x_TI, sums, WIDEN: tl.constexpr):
    if WIDEN:  # the interpreter multiplies bf16 by its bits
        w_OI = w_OI.to(tl.float32)
        x_TI = x_TI.to(tl.float32)
    return tl.dot(w_OI.to(x_TI.dtype), tl.trans(x_TI), sums, input_precision="ieee")


@triton.jit
def _decoded(
    codes, scale_OG, zero_OG, dtype: tl.constexpr, KIND: tl.constexpr, HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """The weights of lower and upper halves, with their scales if a step has several of a row."""
    GROUPS: tl.constexpr = scale_OG.shape[1]
    if WAY == "scaled fp4":
        BLOCK_O: tl.constexpr = codes.shape[0]
        scale = (scale_OG * 2.0**FP4_EXPONENT).to(tl.bfloat16)[:, :, None]
        scale = tl.broadcast_to(scale, (BLOCK_O, GROUPS, codes.shape[1] // GROUPS))
        low, high = decode_scaled_fp4(codes, tl.reshape(scale, codes.shape))
    elif WAY == "bf16":
        low, high = decode_bf16(codes, KIND)
    else:
        DTYPE: tl.constexpr = tl.float32 if GROUPS > 1 or WAY == "wide" else dtype
        low, high = decode(codes, HALVES, KIND, DTYPE)
        if GROUPS > 1:
            upper_OG = scale_OG
            upper_zero_OG = zero_OG
            if HALVES and GROUPS * 16 == codes.shape[1] * 2:
                scale_OG, upper_OG = _halves_of(scale_OG)
                zero_OG, upper_zero_OG = _halves_of(zero_OG)
            low = _spread(low, scale_OG, zero_OG, HAS_ZEROS)
            if HALVES:
                high = _spread(high, upper_OG, upper_zero_OG, HAS_ZEROS)
    return low, high


@triton.jit
def _add_step(
    total, codes, x_TI, upper_TI, x_sum_T, scale_OG, zero_OG,
    KIND: tl.constexpr, HALVES: tl.constexpr, G: tl.constexpr, HAS_ZEROS: tl.constexpr,
    WAY: tl.constexpr, WIDEN: tl.constexpr,
):  # fmt: skip
    """The sums of outputs, with a step's inputs."""
    GROUPS: tl.constexpr = scale_OG.shape[1]
    BY_STEP: tl.constexpr = G > 1 and GROUPS == 1
    if KIND is None:
        total = _dot(codes, x_TI, total, WIDEN)
    else:
        low, high = _decoded(codes, scale_OG, zero_OG, x_TI.dtype, KIND, HALVES, HAS_ZEROS, WAY)
        sums = total
        if BY_STEP:
            sums = tl.zeros(total.shape, dtype=tl.float32)
        sums = _dot(low, x_TI, sums, WIDEN)
        if HALVES:
            sums = _dot(high, upper_TI, sums, WIDEN)
        if BY_STEP:
            if HAS_ZEROS:
                sums -= zero_OG * x_sum_T[None, :]
            sums = total + sums * scale_OG
        total = sums
    return total


@triton.jit
def _of_rows(
    total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, row_O, G: tl.constexpr, SCALE_O: tl.constexpr,
    KIND: tl.constexpr, HAS_ZEROS: tl.constexpr, HAS_BIAS: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Sums with the scales that all inputs of an output have in common, and with biases."""
    if WAY == "scaled fp4":
        total *= 2.0**FP4_EXPONENT
    if KIND is not None and G == 1:
        if HAS_ZEROS:
            zero_O = tl.load(zero_ptr + row_O.to(tl.int64) * SCALE_O).to(tl.float32)
            total -= zero_O[:, None] * x_sum_T[None, :]
        total *= tl.load(scale_ptr + row_O.to(tl.int64) * SCALE_O).to(tl.float32)[:, None]
    if HAS_BIAS:
        total += tl.load(bias_ptr + row_O).to(tl.float32)[:, None]
    return total


@triton.jit(do_not_specialize=["num_rows", "num_tiles"])
def _expert_kernel(
    x_ptr, code_desc, code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr, order_ptr, tile_ptr,
    num_rows, num_tiles,
    NUM_OUT: tl.constexpr,  # of an expert; of gates, with a gating
    NUM_IN: tl.constexpr,
    K: tl.constexpr,  # 0: rows are pairs in order, and go to their places
    G: tl.constexpr,
    SCALE_O: tl.constexpr,  # strides of scales and zeros
    SCALE_G: tl.constexpr,
    KIND: tl.constexpr,  # how codes are decoded; None: weights are numbers
    HALVES: tl.constexpr,
    HAS_ZEROS: tl.constexpr,
    HAS_BIAS: tl.constexpr,
    WAY: tl.constexpr,  # of decoding
    GATING: tl.constexpr,
    BLOCK_T: tl.constexpr,
    BLOCK_O: tl.constexpr,
    BLOCK_I: tl.constexpr,
    STAGES: tl.constexpr,
    TMA: tl.constexpr,
    WIDEN: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    GATED: tl.constexpr = GATING is not None
    NUM_BYTES: tl.constexpr = NUM_IN // 2 if HALVES else NUM_IN
    BLOCK_B: tl.constexpr = BLOCK_I // 2 if HALVES else BLOCK_I
    STEPS: tl.constexpr = (NUM_IN + BLOCK_I - 1) // BLOCK_I
    BY_GROUP: tl.constexpr = KIND is not None and G > 1
    STEP_GROUPS: tl.constexpr = max(1, BLOCK_I * G // NUM_IN)
    GROUP_STEPS: tl.constexpr = max(1, NUM_IN // (G * BLOCK_I))
    SUMS_X: tl.constexpr = HAS_ZEROS and STEP_GROUPS == 1
    tile = tl.program_id(1)
    expert = tl.load(tile_ptr + tile)
    if expert >= 0:
        first = tl.load(tile_ptr + num_tiles + tile)
        end = tl.load(tile_ptr + 2 * num_tiles + tile)
        r = first + tl.arange(0, BLOCK_T)
        is_row_T = r < end
        pair_T = tl.load(order_ptr + r, mask=is_row_T, other=0)
        in_row_T = r
        out_row_T = pair_T
        if K > 0:
            in_row_T = pair_T // K
            out_row_T = r
        first_o = tl.program_id(0) * BLOCK_O
        o = first_o + tl.arange(0, BLOCK_O)
        first_row = expert * NUM_OUT
        if GATED:
            first_row = expert * (2 * NUM_OUT)
        row_O = first_row + tl.minimum(o, NUM_OUT - 1)
        x_ptrs = x_ptr + in_row_T.to(tl.int64)[:, None] * NUM_IN
        i = inputs_of(tl.arange(0, BLOCK_B), HALVES)

        total = tl.zeros((BLOCK_O, BLOCK_T), dtype=tl.float32)
        up_total = total
        x_sum_T = tl.zeros((BLOCK_T,), dtype=tl.float32)
        scale_OG = tl.zeros((BLOCK_O, STEP_GROUPS), dtype=tl.float32)
        zero_OG = scale_OG
        up_scale_OG = scale_OG
        up_zero_OG = scale_OG
        for step in tl.range(0, STEPS, num_stages=STAGES):
            start = step * BLOCK_I
            if NUM_IN % BLOCK_I == 0:
                inside = is_row_T[:, None]
                upper_inside = inside
            else:
                inside = is_row_T[:, None] & (start + i < NUM_IN)[None, :]
                upper_inside = is_row_T[:, None] & (start + i + 16 < NUM_IN)[None, :]
            x_TI = tl.load(x_ptrs + (start + i)[None, :], mask=inside, other=0.0)
            upper_TI = x_TI
            if HALVES:
                upper_TI = tl.load(x_ptrs + (start + i + 16)[None, :], mask=upper_inside, other=0.0)
            if BY_GROUP:
                scale_OG = _load_groups(
                    scale_ptr, row_O, step, STEP_GROUPS, GROUP_STEPS, G, SCALE_O, SCALE_G
                )
                if HAS_ZEROS:
                    zero_OG = _load_groups(
                        zero_ptr, row_O, step, STEP_GROUPS, GROUP_STEPS, G, SCALE_O, SCALE_G
                    )
            if SUMS_X:
                step_sum_T = tl.sum(x_TI.to(tl.float32), axis=1)
                if HALVES:
                    step_sum_T += tl.sum(upper_TI.to(tl.float32), axis=1)
                x_sum_T = step_sum_T if BY_GROUP else x_sum_T + step_sum_T
            codes = _load_codes(
                code_desc, code_ptr, first_row + first_o, num_rows, step * BLOCK_B,
                BLOCK_O, BLOCK_B, NUM_BYTES, TMA,
            )  # fmt: skip
            total = _add_step(
                total, codes, x_TI, upper_TI, x_sum_T, scale_OG, zero_OG,
                KIND, HALVES, G, HAS_ZEROS, WAY, WIDEN,
            )  # fmt: skip
            if GATED:
                if BY_GROUP:
                    up_scale_OG = _load_groups(
                        scale_ptr, row_O + NUM_OUT, step, STEP_GROUPS, GROUP_STEPS, G, SCALE_O,
                        SCALE_G,
                    )  # fmt: skip
                    if HAS_ZEROS:
                        up_zero_OG = _load_groups(
                            zero_ptr, row_O + NUM_OUT, step, STEP_GROUPS, GROUP_STEPS, G, SCALE_O,
                            SCALE_G,
                        )  # fmt: skip
                up_codes = _load_codes(
                    code_desc, code_ptr, first_row + NUM_OUT + first_o, num_rows, step * BLOCK_B,
                    BLOCK_O, BLOCK_B, NUM_BYTES, TMA,
                )  # fmt: skip
                up_total = _add_step(
                    up_total, up_codes, x_TI, upper_TI, x_sum_T, up_scale_OG, up_zero_OG,
                    KIND, HALVES, G, HAS_ZEROS, WAY, WIDEN,
                )  # fmt: skip
        total = _of_rows(
            total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, row_O, G, SCALE_O, KIND, HAS_ZEROS,
            HAS_BIAS, WAY,
        )  # fmt: skip
        if GATED:
            up_total = _of_rows(
                up_total, x_sum_T, scale_ptr, zero_ptr, bias_ptr, row_O + NUM_OUT, G, SCALE_O,
                KIND, HAS_ZEROS, HAS_BIAS, WAY,
            )  # fmt: skip
            total = gated_rounded(total, up_total, GATING, x_ptr.dtype.element_ty)
        pointers = out_ptr + out_row_T.to(tl.int64)[:, None] * NUM_OUT + o[None, :]
        inside = is_row_T[:, None] & (o < NUM_OUT)[None, :]
        tl.store(pointers, tl.trans(total).to(out_ptr.dtype.element_ty), mask=inside)


def expert_gate_up(
    x_TE: Tensor,
    stack: ExpertStack,
    order: ExpertOrder,
    out_RF: Tensor,
    gating: Gating,
    config: ExpertConfig,
    *,
    pdl: bool = False,
) -> None:
    """Gates and ups of all pairs, gated, in the order of experts.

    The first half of an expert's rows are the gates. Rounded as by separate launches: gate and up,
    and what `gated_rounded` says.
    """
    num_pairs = order.order_R.numel()
    assert num_pairs % len(x_TE) == 0 and out_RF.shape == (num_pairs, stack.num_out // 2)
    _launch(x_TE, stack, order, out_RF, num_pairs // len(x_TE), gating, config, pdl)


def expert_down(
    inner_RF: Tensor,
    stack: ExpertStack,
    order: ExpertOrder,
    out_RE: Tensor,
    config: ExpertConfig,
    *,
    pdl: bool = False,
) -> None:
    """The products of rows in the order of experts, each to the row of its pair."""
    assert out_RE.shape == (order.order_R.numel(), stack.num_out)
    _launch(inner_RF, stack, order, out_RE, 0, None, config, pdl)


_PLAIN: dict[str, object] = {
    "G": 1, "SCALE_O": 0, "SCALE_G": 0, "KIND": None, "HALVES": False, "HAS_ZEROS": False
}  # fmt: skip


class _Operands(NamedTuple):
    """What a kernel takes of a weight."""

    codes: Tensor
    scales: Tensor
    zeros: Tensor
    constants: dict[str, object]

    @staticmethod
    def of(weight: Tensor | Packed) -> _Operands:
        if not isinstance(weight, Packed):
            return _Operands(weight, weight, weight, _PLAIN)
        scales, zeros = weight.scales_OG, weight.zeros_OG
        constants = {
            "G": scales.shape[1],
            "SCALE_O": scales.stride(0),
            "SCALE_G": scales.stride(1),
            "KIND": kernel_kind(weight),
            "HALVES": weight.has_halves,
            "HAS_ZEROS": zeros is not None,
        }
        return _Operands(weight.loadable_OB, scales, scales if zeros is None else zeros, constants)


def _way(weight: Tensor | Packed, x: Tensor) -> str | None:
    """Of decoding: with fewer instructions, where there are such for a weight."""
    if not x.is_cuda:
        return "wide"
    if not isinstance(weight, Packed) or x.dtype != torch.bfloat16:
        return None
    num_groups, size = weight.scales_OG.shape[1], weight.group_size
    if weight.kind == "fp4" and num_groups > 1 and size in (32, 64):
        is_exact = weight.scales_OG.dtype == torch.bfloat16 and weight.zeros_OG is None
        return "scaled fp4" if is_exact else None
    by_sums = num_groups == 1 or size % STEP_INPUTS == 0
    return "bf16" if by_sums and weight.kind in ("fp8", "int4") else None


def can_multiply(weight: Tensor | Packed) -> bool:
    """Whether its groups are a step's, or a step theirs, and its inputs as they come."""
    if not isinstance(weight, Packed) or weight.scales_OG.shape[1] == 1:
        return not isinstance(weight, Packed) or weight.order_I is None
    size = weight.group_size
    return weight.order_I is None and (
        size % STEP_INPUTS == 0 or (STEP_INPUTS % size == 0 and size >= HALF_GROUP)
    )


def _launch(
    x: Tensor,
    stack: ExpertStack,
    order: ExpertOrder,
    out: Tensor,
    top_k: int,
    gating: Gating | None,
    config: ExpertConfig,
    pdl: bool,
) -> None:
    codes, scales, zeros, constants = _Operands.of(stack.weight)
    halves = bool(constants["HALVES"])
    assert can_multiply(stack.weight) and x.shape[1] == stack.num_in
    assert x.is_contiguous() and codes.is_contiguous() and out.is_contiguous()
    assert config.block_rows == order.block_rows and order.num_experts == stack.num_experts
    assert config.block_in == STEP_INPUTS or not isinstance(stack.weight, Packed)
    column_bytes = config.block_in // 2 if halves else config.block_in
    tma = fits_device(x.device) and codes.stride(0) * codes.element_size() % 16 == 0
    block = [config.block_out, column_bytes]
    num_tiles, num_out = order.tiles_3N.shape[1], out.shape[1]
    _expert_kernel[(triton.cdiv(num_out, config.block_out), num_tiles)](
        x,
        TensorDescriptor.from_tensor(codes, block) if tma else None,
        codes,
        scales,
        zeros,
        x if stack.bias_XO is None else stack.bias_XO,  # any address will do where none is read
        out,
        order.order_R,
        order.tiles_3N,
        stack.weight.shape[0],
        num_tiles,
        NUM_OUT=num_out,
        NUM_IN=stack.num_in,
        K=top_k,
        **constants,
        HAS_BIAS=stack.bias_XO is not None,
        WAY=_way(stack.weight, x),
        GATING=gating,
        BLOCK_T=config.block_rows,
        BLOCK_O=config.block_out,
        BLOCK_I=config.block_in,
        STAGES=config.num_stages,
        TMA=tma,
        WIDEN=not x.is_cuda,
        num_warps=config.num_warps,
        **dependent_launch(pdl, out),
    )
