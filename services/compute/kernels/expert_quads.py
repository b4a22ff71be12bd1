"""Products of very few rows with their experts' codes of 4 bits, in integers, at memory's speed.

A quad is 16 bytes of codes, whose 32 inputs have one scale. A thread makes integers of 16 bits of a
quad's inputs, in two planes of bytes, and multiplies them by a quad of each of its rows, four codes
at a time and exactly (dp4a). Numbers of FP4 are looked up, eight in four instructions (prmt):
all sizes, and the sizes of those that are not negative; twice the second less the first is what
they are, and so are their products. Decoded to float32 a code takes five instructions or more, here
two and a half, and a product of one row is bound by them.

An input is off by 2^-15 of its quad's largest at most; bfloat16 has rounded it by up to 2^-9 of
itself before. Those of at least 2^-7 of the largest are exact.

Shape legend: R rows of a program, M maps that a program reads (of gates and ups; or of a token's
experts), Q quads, W words of a quarter of a quad, K experts of a token, T tokens.
"""

from __future__ import annotations

import triton
import triton.language as tl

from services.compute.kernels.activations import gated_rounded
from services.compute.kernels.combine_experts import add_shared
from services.compute.kernels.packed_codes import e2m1
from services.compute.kernels.routing import NOWHERE as _NOWHERE
from services.compute.quantization.packed import BLOCK, Packed

QUAD = BLOCK
"""Inputs of a quad."""

NOWHERE = tl.constexpr(_NOWHERE)
_MAGIC = tl.constexpr(12582912.0)  # 1.5 * 2^23: whole numbers added to it are its last bits

# The largest size of 32 bfloat16, two in a word, in both halves of one.
_LARGEST = tl.constexpr(
    "{ .reg .b32 most, other;"
    "and.b32 most, $1, 0x7fff7fff;"
    + "".join(
        f"and.b32 other, ${word}, 0x7fff7fff; max.NaN.bf16x2 most, most, other;"
        for word in range(2, 17)
    )
    + "prmt.b32 other, most, most, 0x1032; max.NaN.bf16x2 $0, most, other; }"
)
# The second bytes of four words, and the first ones.
_GATHER = tl.constexpr(
    "{ .reg .b32 a, b; prmt.b32 a, $2, $3, 0x5140; prmt.b32 b, $4, $5, 0x5140;"
    "prmt.b32 $0, a, b, 0x7632; prmt.b32 $1, a, b, 0x5410; }"
)


def _planes(text: str) -> str:
    """256 times the sums of a `text` with the upper plane ($5 to $12), and the lower ($13 on)."""
    upper = "".join(text.format(c=c, a=3 + 2 * c, b=4 + 2 * c, x="s32") for c in (1, 2, 3, 4))
    lower = "".join(text.format(c=c, a=11 + 2 * c, b=12 + 2 * c, x="u32") for c in (1, 2, 3, 4))
    return upper + "SHIFT" + lower


_FP4_DOT = tl.constexpr(
    "{ .reg .b32 few, many, p<5>, q<5>, m<5>, n<5>, t; .reg .s32 all, some;"
    "mov.b32 few, 0x03020100; mov.b32 many, 0x0c080604; mov.b32 all, 0; mov.b32 some, 0;"
    + "".join(
        f"prmt.b32 p{c}, few, many, ${c}; shr.b32 t, ${c}, 16; prmt.b32 q{c}, few, many, t;"
        f"and.b32 t, ${c}, 0x77777777; prmt.b32 m{c}, few, many, t;"
        f"shr.b32 t, t, 16; prmt.b32 n{c}, few, many, t;"
        for c in (1, 2, 3, 4)
    )
    + _planes(
        "dp4a.s32.{x} some, p{c}, ${a}, some; dp4a.s32.{x} all, m{c}, ${a}, all;"
        "dp4a.s32.{x} some, q{c}, ${b}, some; dp4a.s32.{x} all, n{c}, ${b}, all;"
    ).replace("SHIFT", "shl.b32 some, some, 8; shl.b32 all, all, 8;")
    + "add.s32 some, some, some; sub.s32 $0, some, all; }"
)
_INT4_DOT = tl.constexpr(
    "{ .reg .b32 p<5>, q<5>, t; .reg .s32 all; mov.b32 all, 0;"
    + "".join(
        f"and.b32 p{c}, ${c}, 0x0f0f0f0f; shr.b32 t, ${c}, 4; and.b32 q{c}, t, 0x0f0f0f0f;"
        for c in (1, 2, 3, 4)
    )
    + _planes("dp4a.s32.{x} all, p{c}, ${a}, all; dp4a.s32.{x} all, q{c}, ${b}, all;").replace(
        "SHIFT", "shl.b32 all, all, 8;"
    )
    + "mov.b32 $0, all; }"
)


def has_quads(weight: Packed) -> bool:
    """Whether it is codes of 4 bits whose quads have one scale."""
    return weight.has_halves and weight.group_size % QUAD == 0 and weight.order_I is None


@triton.jit
def _byte(words, n: tl.constexpr):
    return (words >> (8 * n)) & 255


@triton.jit
def _size(words):
    """The larger of two bfloat16 in a word, without their signs: its bits."""
    return tl.maximum(words & 0x7FFF, (words >> 16) & 0x7FFF)


@triton.jit
def _sizes(a, b, c, d):
    return tl.maximum(tl.maximum(_size(a), _size(b)), tl.maximum(_size(c), _size(d)))


@triton.jit
def _whole(words, scale):
    """Words whose last 16 bits are the whole numbers next to two bfloat16 times a scale."""
    low = (words << 16).to(tl.float32, bitcast=True) * scale + _MAGIC
    high = (words & -0x10000).to(tl.float32, bitcast=True) * scale + _MAGIC
    return low.to(tl.int32, bitcast=True), high.to(tl.int32, bitcast=True)


@triton.jit
def _inputs(a, b, scale, KIND: tl.constexpr, ASM: tl.constexpr):
    """Four inputs in the order of the codes they meet: upper bytes, lower bytes."""
    a_low, a_high = _whole(a, scale)
    b_low, b_high = _whole(b, scale)
    first = a_low
    second = b_low
    third = a_high
    fourth = b_high
    if KIND == "int4":
        second = a_high
        third = b_low
    if ASM:
        upper, lower = tl.inline_asm_elementwise(
            _GATHER, "=r,=r,r,r,r,r", [first, second, third, fourth], dtype=(tl.int32, tl.int32),
            is_pure=True, pack=1,
        )  # fmt: skip
    else:
        upper = _byte(first, 1) | _byte(second, 1) << 8 | _byte(third, 1) << 16
        upper |= _byte(fourth, 1) << 24
        lower = _byte(first, 0) | _byte(second, 0) << 8 | _byte(third, 0) << 16
        lower |= _byte(fourth, 0) << 24
    return upper, lower


@triton.jit
def _quarters(words, ROWS: tl.constexpr, MAPS: tl.constexpr, QUADS: tl.constexpr):
    """Words [R * M, W] as four tensors [R, M, Q]; a thread has all four of a quad."""
    even, odd = tl.split(tl.reshape(words, (ROWS, MAPS, QUADS, 2, 2)))
    first, third = tl.split(even)
    second, fourth = tl.split(odd)
    return first, second, third, fourth


@triton.jit
def _x_words(x_ptr, row_M, w, w_in, PART: tl.constexpr, NUM_IN: tl.constexpr):
    """Words [M, W] of eight of each quad's inputs."""
    pointers = x_ptr + row_M[:, None] * (NUM_IN // 2) + (w // 4 * 16 + w % 4 + 4 * PART)[None, :]
    if w_in is None:
        words = tl.load(pointers, volatile=True)
    else:
        words = tl.load(pointers, mask=w_in[None, :], other=0, volatile=True)
    return words


@triton.jit
def _value(code, KIND: tl.constexpr):
    return e2m1(code) if KIND == "fp4" else code


@triton.jit
def _word_dot(codes, a, b, a_lower, b_lower, KIND: tl.constexpr):
    """What instructions make of eight codes, for the interpreter."""
    sums = tl.zeros_like(codes + a)
    for n in tl.static_range(4):
        x = ((a << (24 - 8 * n)) >> 24) * 256 + _byte(a_lower, n)
        y = ((b << (24 - 8 * n)) >> 24) * 256 + _byte(b_lower, n)
        first: tl.constexpr = 4 * n if KIND == "fp4" else 8 * n
        second: tl.constexpr = 4 * n + 16 if KIND == "fp4" else 8 * n + 4
        sums += _value((codes >> first) & 15, KIND) * x + _value((codes >> second) & 15, KIND) * y
    return sums


@triton.jit
def _dot(
    c0, c1, c2, c3, a0, b0, a1, b1, a2, b2, a3, b3, d0, e0, d1, e1, d2, e2, d3, e3,
    KIND: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Quads of codes times inputs, exactly: of upper bytes a and b, and of lower ones d and e."""
    TEXT: tl.constexpr = _FP4_DOT if KIND == "fp4" else _INT4_DOT
    if ASM:
        sums = tl.inline_asm_elementwise(
            TEXT, "=r" + ",r" * 20,
            [c0, c1, c2, c3, a0, b0, a1, b1, a2, b2, a3, b3, d0, e0, d1, e1, d2, e2, d3, e3],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        sums = _word_dot(c0, a0, b0, d0, e0, KIND) + _word_dot(c1, a1, b1, d1, e1, KIND)
        sums += _word_dot(c2, a2, b2, d2, e2, KIND) + _word_dot(c3, a3, b3, d3, e3, KIND)
    return sums


@triton.jit
def _outputs(r, ROWS: tl.constexpr, NUM_OUT: tl.constexpr):
    """Outputs of this program; beyond the last, it again."""
    o = tl.program_id(0) * ROWS + r
    if NUM_OUT % ROWS != 0:
        o = tl.minimum(o, NUM_OUT - 1)
    return o


@triton.jit
def _of_groups(pointer, map_N, q_N, NUM_IN: tl.constexpr, NUM_OUT: tl.constexpr,
    ROWS: tl.constexpr, MAPS: tl.constexpr, QUADS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """Scales or zeros [R, M, Q]: a thread's rows are next to one another."""
    o_R = _outputs(tl.arange(0, ROWS), ROWS, NUM_OUT)
    row_NR = (map_N * NUM_OUT)[:, None] + o_R[None, :]
    place_NR = row_NR * FORM[2] + (q_N * 32 // (NUM_IN // FORM[1]) * FORM[3])[:, None]
    if (NUM_IN // 32) % QUADS == 0 and not FORM[5]:
        values_NR = tl.load(pointer + place_NR, volatile=True)
    else:
        inside_N = (q_N < NUM_IN // 32) & (map_N != NOWHERE if FORM[5] else True)
        values_NR = tl.load(pointer + place_NR, mask=inside_N[:, None], other=0.0, volatile=True)
    return tl.permute(tl.reshape(values_NR, (MAPS, QUADS, ROWS)), (2, 0, 1))


@triton.jit
def _ask(
    x_ptr, row_M, code_ptr, scale_ptr, zero_ptr, map_P, map_N, first, NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr, FORM: tl.constexpr,
):  # fmt: skip
    """The loads of these quads of rows: codes, scales, zeros, and inputs.

    As volatile ones all begin at once; else the compiler puts each where it is waited for.
    """
    MAPS: tl.constexpr = map_P.shape[0] // ROWS
    NUM_QUADS: tl.constexpr = NUM_IN // 32
    w = first * 4 + tl.arange(0, 4 * QUADS)
    q_N = first + tl.arange(0, MAPS * QUADS) % QUADS
    o_P = _outputs(tl.arange(0, ROWS * MAPS) // MAPS, ROWS, NUM_OUT)
    row_P = (map_P * NUM_OUT + o_P).to(tl.int64) * (NUM_IN // 8)
    w_in = None
    if NUM_QUADS % QUADS == 0 and not FORM[5]:
        codes = tl.load(code_ptr + row_P[:, None] + w[None, :], volatile=True)
    else:
        w_in = w < NUM_QUADS * 4
        inside = w_in[None, :] & (map_P != NOWHERE)[:, None] if FORM[5] else w_in[None, :]
        codes = tl.load(code_ptr + row_P[:, None] + w[None, :], mask=inside, other=0, volatile=True)
    scale = _of_groups(scale_ptr, map_N, q_N, NUM_IN, NUM_OUT, ROWS, MAPS, QUADS, FORM)
    zero = scale
    if FORM[4]:
        zero = _of_groups(zero_ptr, map_N, q_N, NUM_IN, NUM_OUT, ROWS, MAPS, QUADS, FORM)
    w0 = _x_words(x_ptr, row_M, w, w_in, 0, NUM_IN)
    w4 = _x_words(x_ptr, row_M, w, w_in, 1, NUM_IN)
    v0 = _x_words(x_ptr, row_M, w, w_in, 2, NUM_IN)
    v4 = _x_words(x_ptr, row_M, w, w_in, 3, NUM_IN)
    return codes, scale, zero, w0, w4, v0, v4


@triton.jit
def _step(
    codes, scale, zero, x0, x1, x2, x3, ROWS: tl.constexpr, QUADS: tl.constexpr,
    FORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products [R, M, Q] of what `_ask` has asked for."""
    KIND: tl.constexpr = FORM[0]
    MAPS: tl.constexpr = codes.shape[0] // ROWS
    w0, w1, w2, w3 = _quarters(x0, 1, x0.shape[0], QUADS)
    w4, w5, w6, w7 = _quarters(x1, 1, x0.shape[0], QUADS)
    v0, v1, v2, v3 = _quarters(x2, 1, x0.shape[0], QUADS)
    v4, v5, v6, v7 = _quarters(x3, 1, x0.shape[0], QUADS)
    if ASM:
        size = tl.inline_asm_elementwise(
            _LARGEST, "=r" + ",r" * 16,
            [w0, w1, w2, w3, w4, w5, w6, w7, v0, v1, v2, v3, v4, v5, v6, v7],
            dtype=tl.int32, is_pure=True, pack=1,
        )  # fmt: skip
    else:
        size = tl.maximum(_sizes(w0, w1, w2, w3), _sizes(w4, w5, w6, w7))
        size = tl.maximum(size, tl.maximum(_sizes(v0, v1, v2, v3), _sizes(v4, v5, v6, v7)))
    # The largest becomes at least 2^14, below 2^15; what is no number makes the product none.
    exponent = tl.maximum((size << 16) & 0x7F800000, 15 << 23)
    inverse = ((253 << 23) - (exponent - (15 << 23))).to(tl.float32, bitcast=True)
    unit = (exponent - (14 << 23)).to(tl.float32, bitcast=True)
    unit = tl.where(exponent == 0x7F800000, float("nan"), unit)
    if KIND == "fp4":  # the codes of a word's first and last half meet inputs 16 apart by turns
        a0, d0 = _inputs(w0, v0, inverse, KIND, ASM)
        b0, e0 = _inputs(w1, v1, inverse, KIND, ASM)
        a1, d1 = _inputs(w2, v2, inverse, KIND, ASM)
        b1, e1 = _inputs(w3, v3, inverse, KIND, ASM)
        a2, d2 = _inputs(w4, v4, inverse, KIND, ASM)
        b2, e2 = _inputs(w5, v5, inverse, KIND, ASM)
        a3, d3 = _inputs(w6, v6, inverse, KIND, ASM)
        b3, e3 = _inputs(w7, v7, inverse, KIND, ASM)
        unit *= 0.5
    else:
        a0, d0 = _inputs(w0, w1, inverse, KIND, ASM)
        b0, e0 = _inputs(v0, v1, inverse, KIND, ASM)
        a1, d1 = _inputs(w2, w3, inverse, KIND, ASM)
        b1, e1 = _inputs(v2, v3, inverse, KIND, ASM)
        a2, d2 = _inputs(w4, w5, inverse, KIND, ASM)
        b2, e2 = _inputs(v4, v5, inverse, KIND, ASM)
        a3, d3 = _inputs(w6, w7, inverse, KIND, ASM)
        b3, e3 = _inputs(v6, v7, inverse, KIND, ASM)
    c0, c1, c2, c3 = _quarters(codes, ROWS, MAPS, QUADS)
    sums = _dot(
        c0, c1, c2, c3, a0, b0, a1, b1, a2, b2, a3, b3, d0, e0, d1, e1, d2, e2, d3, e3, KIND, ASM
    ).to(tl.float32)
    if KIND == "int4":
        ones = tl.full((1, 1, 1), 0x11111111, tl.int32)
        x_sum = _dot(
            ones, ones, ones, ones,
            a0, b0, a1, b1, a2, b2, a3, b3, d0, e0, d1, e1, d2, e2, d3, e3, KIND, ASM,
        ).to(tl.float32)  # fmt: skip
        if FORM[4]:
            sums -= (zero.to(tl.float32) + 8.0) * x_sum
        else:
            sums -= 8.0 * x_sum
    return sums * unit * scale.to(tl.float32)


@triton.jit
def _products(
    x_ptr, row_M, code_ptr, scale_ptr, zero_ptr, map_P, map_N, NUM_OUT: tl.constexpr,
    NUM_IN: tl.constexpr, ROWS: tl.constexpr, QUADS: tl.constexpr,
    FORM: tl.constexpr, ASM: tl.constexpr,
):  # fmt: skip
    """Products [R, M] in float32 of inputs, one row for each map or one for all."""
    y_RMQ = tl.zeros((ROWS, map_P.shape[0] // ROWS, QUADS), dtype=tl.float32)
    for first in tl.static_range(0, NUM_IN // 32, QUADS):
        codes, scale, zero, x0, x1, x2, x3 = _ask(
            x_ptr, row_M, code_ptr, scale_ptr, zero_ptr, map_P, map_N, first, NUM_OUT, NUM_IN,
            ROWS, QUADS, FORM,
        )  # fmt: skip
        y_RMQ += _step(codes, scale, zero, x0, x1, x2, x3, ROWS, QUADS, FORM, ASM)
    return tl.sum(y_RMQ, axis=2)


@triton.jit
def quad_gate_up_kernel(
    x_ptr, expert_ptr, code_ptr, scale_ptr, zero_ptr, bias_ptr, out_ptr,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, K: tl.constexpr, ROWS: tl.constexpr,
    QUADS: tl.constexpr, FORM: tl.constexpr, GATING: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Gates and ups of a pair, gated."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    pair = tl.program_id(1)
    expert = tl.load(expert_ptr + pair)
    if FORM[5]:
        if expert == NOWHERE:
            return
    first = expert * 2
    token = pair // K + tl.zeros((1,), dtype=tl.int32)
    y_RM = _products(
        x_ptr, token, code_ptr, scale_ptr, zero_ptr, first + tl.arange(0, 2 * ROWS) % 2,
        first + tl.arange(0, 2 * QUADS) // QUADS, NUM_OUT, NUM_IN, ROWS, QUADS, FORM, ASM,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_R = _outputs(tl.arange(0, ROWS), ROWS, NUM_OUT)
    if bias_ptr is not None:
        map_M = first + tl.arange(0, 2)
        y_RM += tl.load(bias_ptr + (map_M * NUM_OUT)[None, :] + o_R[:, None]).to(tl.float32)
    gate_R, up_R = tl.split(y_RM)
    y_R = gated_rounded(gate_R, up_R, GATING, out_ptr.dtype.element_ty)
    tl.store(out_ptr + pair.to(tl.int64) * NUM_OUT + o_R, y_R.to(out_ptr.dtype.element_ty))


@triton.jit
def quad_down_kernel(
    x_ptr, expert_ptr, weight_ptr, code_ptr, scale_ptr, zero_ptr, bias_ptr, shared_ptr, gate_ptr,
    out_ptr,
    NUM_OUT: tl.constexpr, NUM_IN: tl.constexpr, K: tl.constexpr, BLOCK_K: tl.constexpr,
    ROWS: tl.constexpr, QUADS: tl.constexpr, FORM: tl.constexpr,
    ASM: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Outputs of a token: the weighted sums of what all of its experts make of it, at once."""
    if PDL:
        tl.extra.cuda.gdc_wait()
    token = tl.program_id(1)
    k = tl.arange(0, BLOCK_K)
    pair_M = token * K + tl.minimum(k, K - 1)
    k_P = tl.minimum(tl.arange(0, BLOCK_K * ROWS) % BLOCK_K, K - 1)
    k_N = tl.minimum(tl.arange(0, BLOCK_K * QUADS) // QUADS, K - 1)
    y_RM = _products(
        x_ptr, pair_M, code_ptr, scale_ptr, zero_ptr, tl.load(expert_ptr + token * K + k_P),
        tl.load(expert_ptr + token * K + k_N), NUM_OUT, NUM_IN, ROWS, QUADS, FORM, ASM,
    )  # fmt: skip
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
    o_R = _outputs(tl.arange(0, ROWS), ROWS, NUM_OUT)
    map_M = tl.load(expert_ptr + pair_M)
    adds_M = k < K
    if FORM[5]:
        adds_M = adds_M & (map_M != NOWHERE)
    if bias_ptr is not None:
        bias_ptrs = bias_ptr + (map_M * NUM_OUT)[None, :] + o_R[:, None]
        y_RM += tl.load(bias_ptrs, mask=adds_M[None, :], other=0.0).to(tl.float32)
    weight_M = tl.load(weight_ptr + pair_M)
    total_R = tl.sum(tl.where(adds_M[None, :], y_RM * weight_M[None, :], 0.0), axis=1)
    total_R = add_shared(total_R, shared_ptr, gate_ptr, token, o_R, o_R < NUM_OUT, NUM_OUT)
    place = token.to(tl.int64) * NUM_OUT + o_R
    tl.store(out_ptr + place, total_R.to(out_ptr.dtype.element_ty))
