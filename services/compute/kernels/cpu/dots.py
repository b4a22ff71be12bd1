"""Sums of products: rows in float32 or bfloat16 with weights in bfloat16, or codes: rows in 16 bits
and weights in 8, or rows in 8 and weights in 4.

Of codes, processors multiply two vectors and add neighbours in one instruction, which LLVM does not
find in loops of Python: it is named here. With AVX-512 and VNNI it adds to the sum, too, and with
AVX-512's BF16 there is one for pairs of bfloat16.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.compute.kernels.cpu.vectors import (
    ADDRESS,
    BFLOATS,
    BYTE,
    CODES,
    FLOAT,
    FLOATS,
    HALVES,
    LINE,
    SUMS,
    WORD,
    Builder,
    Value,
    add_to,
    called,
    everywhere,
    fetch_line,
    half_of,
    load,
    narrowed,
    place_of,
    shuffled,
    store,
    variables,
)

LANES = 32
"""Inputs that are multiplied together where both are codes."""

NUMBERS, PAIRED = 8, 4
"""The same where they are numbers, in float32 or in bfloat16."""

BLOCK = 2 * LANES
"""Inputs whose codes of 4 bits share bytes: the lower halves are the first LANES', the upper ones
those of the others."""

WHOLE = 2  # of a byte, not its half 0 or 1
ZERO = 128  # added to codes of 8 bits, so that they have no sign

FOUR = 4  # inputs that are added up in one sum of 32 bits

PANEL = LANES // 2
"""Outputs whose weights lie beside one another: a vector has two inputs of each as numbers, or FOUR
as codes, and the sums of a panel's outputs have a lane each, so that none has to be added up, and
scales of a group are multiplied by once for all of them."""

UNROLLED = 2  # of FOUR inputs: more at once does not fit the registers

FETCHED = 4
"""Lines that may be fetched of the next panel of codes for each LANES * PANEL bytes of one."""

ROWS, MOST_ROWS = 4, 16
"""Rows that share what has been read of a weight: of codes, and of pairs at most."""

FEATURES = binding.get_host_cpu_features()
HAS_DOTS = bool(FEATURES.get("avx2"))
"""Whether this processor has such an instruction."""

HAS_PAIRS = bool(FEATURES.get("avx512bf16"))
IS_WIDE = bool(FEATURES.get("avx512bw"))
HAS_VNNI = bool(FEATURES.get("avx512vnni"))
HAS_AMX = bool(FEATURES.get("amx-bf16"))
"""Whether oneDNN multiplies many rows of bfloat16 by tiles: codes of 8 were not measured beside."""


def _pairs(b: Builder, x: Value, y: Value) -> Value:
    """x times y, each product added to its neighbour's."""
    if not HAS_DOTS:
        return _plain_pairs(b, x, y, SUMS)
    if IS_WIDE:
        return called(b, "llvm.x86.avx512.pmaddw.d.512", SUMS, x, y)
    size = LANES // 2
    kind = ir.VectorType(WORD, size // 2)

    def of_half(first: int) -> Value:
        halves = [shuffled(b, v, v, range(first, first + size)) for v in (x, y)]
        return called(b, "llvm.x86.avx2.pmadd.wd", kind, *halves)

    return shuffled(b, of_half(0), of_half(size), range(size))


def _plain_pairs(b: Builder, x: Value, y: Value, kind: Any) -> Value:
    """The same by any processor, of which none calls it: what is compiled has to be valid."""
    count = kind.count

    def every_other(v: Value, first: int, widen: Callable[..., Value]) -> Value:
        return widen(shuffled(b, v, v, range(first, 2 * count, 2)), kind)

    widen = b.zext if kind == CODES else b.sext
    products = [
        b.mul(every_other(x, first, widen), every_other(y, first, b.sext)) for first in range(2)
    ]
    return b.add(*products)


def _panel_of_numbers(num_rows: int) -> Callable[..., Any]:
    """Of each row the same sums in the same order whatever rows there are beside it, so that it has
    the same bits alone: two of each output, as one would wait for itself. More than two rows' do
    not fit the registers."""

    @intrinsic
    def panel(typing_context, weight, ahead, x, out, num_in, num_out):
        """Of each row of x [R, I] in float32 and a panel's outputs, into out [R, O]; `ahead` is
        what is read next."""

        def emit(context, b, signature, args):
            weight, ahead, x, out, num_in, num_out = args
            sums = [variables(b, FLOATS, 2) for _ in range(num_rows)]
            with cgutils.for_range_slice(b, ADDRESS(0), num_in, ADDRESS(NUMBERS)) as (first, _):
                for step in range(0, NUMBERS, 2):
                    i = b.add(first, ADDRESS(step))
                    fetch_line(b, place_of(b, ahead, i, 2 * PANEL))
                    words = load(b, place_of(b, weight, i, 2 * PANEL), SUMS)
                    halves = [half_of(b, words, half) for half in range(2)]
                    for row in range(num_rows):
                        place = place_of(b, x, b.add(b.mul(num_in, ADDRESS(row)), i), 4)
                        for half, numbers in enumerate(halves):
                            at = b.add(place, ADDRESS(4 * half))
                            add_to(b, sums[row][half], numbers, everywhere(b, at, FLOATS))
            for row, both in enumerate(sums):
                total = b.fadd(*map(b.load, both))
                store(b, narrowed(b, total), place_of(b, out, b.mul(num_out, ADDRESS(row)), 2))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), emit

    return panel


def _panel_of_pairs(num_rows: int) -> Callable[..., Any]:
    """Of each row one sum of each output, in one order whatever rows there are beside it."""

    @intrinsic
    def panel(typing_context, weight, x, out, num_in, num_out):
        """Of these rows of x [I / 2, R, 2] in bfloat16 and a panel's outputs, into out [R, O]. What
        all rows need next of x is in one line: 16 rows apart take 1.2 to 1.5 times as long."""

        def emit(context, b, signature, args):
            weight, x, out, num_in, num_out = args
            sums = variables(b, FLOATS, num_rows)
            with cgutils.for_range_slice(b, ADDRESS(0), num_in, ADDRESS(PAIRED)) as (first, _):
                for step in range(0, PAIRED, 2):
                    i = b.add(first, ADDRESS(step))
                    words = load(b, place_of(b, weight, i, 2 * PANEL), SUMS)
                    pairs = place_of(b, x, i, 2 * num_rows)
                    for row, sum_ in enumerate(sums):
                        of_row = everywhere(b, b.add(pairs, ADDRESS(4 * row)), SUMS)
                        _add_pairs(b, sum_, words, of_row)
            for row, sum_ in enumerate(sums):
                place = place_of(b, out, b.mul(num_out, ADDRESS(row)), 2)
                store(b, narrowed(b, b.load(sum_)), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 5), emit

    return panel


def _add_pairs(b: Builder, variable: Value, x: Value, y: Value) -> None:
    """variable += the products of both bfloat16s of each word"""
    if HAS_PAIRS:
        pairs = [b.bitcast(words, BFLOATS) for words in (x, y)]
        name = "llvm.x86.avx512bf16.dpbf16ps.512"
        b.store(called(b, name, FLOATS, b.load(variable), *pairs), variable)
        return
    for half in range(2):
        add_to(b, variable, half_of(b, x, half), half_of(b, y, half))


def _fetch_lines(b: Builder, address: Value, more: Value) -> None:
    """Those from an address on, and as many `more` bytes behind; of 0 the same."""
    for line in range(FETCHED // 2):
        first = b.add(address, ADDRESS(line * LINE))
        fetch_line(b, first)
        fetch_line(b, b.add(first, more))


def _dots_of_bytes(num_rows: int) -> Callable[..., Any]:
    @intrinsic
    def dots(typing_context, weight, x, num_in):
        """Of each row of x [R, I] and a weight's output, as float32."""
        kind = types.UniTuple(types.float32, num_rows)

        def emit(context, b, signature, args):
            weight, x, num_in = args
            sums = variables(b, SUMS, num_rows)
            row_bytes = b.mul(num_in, ADDRESS(2))
            with cgutils.for_range_slice(b, ADDRESS(0), num_in, ADDRESS(LANES)) as (i, _):
                codes = load(b, b.add(weight, i), ir.VectorType(BYTE, LANES))
                codes = b.sext(codes, CODES)
                for row, sum_ in enumerate(sums):
                    of_row = b.add(x, b.mul(row_bytes, ADDRESS(row)))
                    products = _pairs(b, codes, load(b, place_of(b, of_row, i, 2), CODES))
                    b.store(b.add(b.load(sum_), products), sum_)
            name = f"llvm.vector.reduce.add.v{SUMS.count}i32"
            totals = [called(b, name, WORD, b.load(sum_)) for sum_ in sums]
            floats = [b.sitofp(total, FLOAT) for total in totals]
            return context.make_tuple(b, signature.return_type, floats)

        return kind(types.int64, types.int64, types.int64), emit

    return dots


def _panel_of_halves(num_rows: int) -> Callable[..., Any]:
    """One row takes both halves of bytes at once; sums of more do not fit the registers so."""
    turns = ((0, 1),) if num_rows == 1 else ((0,), (1,))

    @intrinsic
    def panel(
        typing_context, weight, ahead, more, scales, lows, x, steps, sums, out, num_in, num_out,
        shift,
    ):  # fmt: skip
        """Of each row of x [R, I] and a panel's outputs, into out [R, O]: the sum over each LANES
        inputs of their scale and the row's step times a dot product, less their low times the sum
        of x. 2 ** shift LANES have one scale and one low. A part of the codes at `ahead` is fetched
        meanwhile."""

        def emit(context, b, signature, args):
            weight, ahead, more, scales, lows, x, steps, sums, out, num_in, num_out, shift = args
            totals = variables(b, FLOATS, num_rows)
            num_groups = b.udiv(num_in, ADDRESS(LANES))
            firsts = [b.mul(num_groups, ADDRESS(row)) for row in range(num_rows)]
            with cgutils.for_range(b, b.udiv(num_in, ADDRESS(BLOCK))) as loop:
                block = place_of(b, weight, loop.index, LANES * PANEL)
                if num_rows > 1:
                    _fetch_lines(b, place_of(b, ahead, loop.index, LANES * PANEL), more)
                groups = [b.add(b.mul(loop.index, ADDRESS(2)), ADDRESS(half)) for half in range(2)]
                of_rows = [[b.add(first, group) for first in firsts] for group in groups]
                for turn in turns:
                    places = {
                        half: [place_of(b, x, g, LANES) for g in of_rows[half]] for half in turn
                    }
                    for half, dots in _dots_of_codes(b, block, places).items():
                        at = b.lshr(groups[half], shift)
                        scale = load(b, place_of(b, scales, at, 4 * PANEL), FLOATS)
                        low = b.fneg(load(b, place_of(b, lows, at, 4 * PANEL), FLOATS))
                        for total, dot, g in zip(totals, dots, of_rows[half], strict=True):
                            step = everywhere(b, place_of(b, steps, g, 4), FLOATS)
                            add_to(b, total, b.fmul(b.sitofp(dot, FLOATS), step), scale)
                            add_to(b, total, low, everywhere(b, place_of(b, sums, g, 4), FLOATS))
            for row, total in enumerate(totals):
                place = place_of(b, out, b.mul(num_out, ADDRESS(row)), 2)
                store(b, narrowed(b, b.load(total)), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 12), emit

    return panel


def _panel_of_bytes(num_rows: int) -> Callable[..., Any]:
    """With VNNI alone: products of neighbours have more than 16 bits."""

    @intrinsic
    def panel(typing_context, weight, ahead, more, scales, x, steps, sums, out, num_in, num_out):
        """The same of codes of 8 bits with ZERO added, with a scale for each output."""

        def emit(context, b, signature, args):
            weight, ahead, more, scales, x, steps, sums, out, num_in, num_out = args
            totals = variables(b, FLOATS, num_rows)
            num_groups = b.udiv(num_in, ADDRESS(LANES))
            zero = ir.Constant(FLOATS, [float(-ZERO)] * FLOATS.count)
            with cgutils.for_range(b, num_groups) as loop:
                groups = [
                    b.add(b.mul(num_groups, ADDRESS(row)), loop.index) for row in range(num_rows)
                ]
                block = place_of(b, weight, loop.index, LANES * PANEL)
                if num_rows > 1:
                    _fetch_lines(b, place_of(b, ahead, loop.index, LANES * PANEL), more)
                places = [place_of(b, x, g, LANES) for g in groups]
                dots = _dots_of_codes(b, block, {WHOLE: places})[WHOLE]
                for total, dot, g in zip(totals, dots, groups, strict=True):
                    step = everywhere(b, place_of(b, steps, g, 4), FLOATS)
                    add_to(b, total, b.sitofp(dot, FLOATS), step)
                    add_to(b, total, zero, everywhere(b, place_of(b, sums, g, 4), FLOATS))
            scale = load(b, scales, FLOATS)
            for row, total in enumerate(totals):
                place = place_of(b, out, b.mul(num_out, ADDRESS(row)), 2)
                store(b, narrowed(b, b.fmul(b.load(total), scale)), place)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 10), emit

    return panel


def _dots_of_codes(
    b: Builder, block: Value, places: dict[int, list[Value]]
) -> dict[int, list[Value]]:
    """By the half of a byte, or of WHOLE ones, those of LANES inputs and of each row from its place
    on."""
    low_bits, four = (ir.Constant(SUMS, [n] * SUMS.count) for n in (0x0F0F0F0F, 4))
    kind = SUMS if HAS_VNNI else CODES
    sums = {half: variables(b, kind, len(of_rows)) for half, of_rows in places.items()}
    # A number that LLVM does not know: it would unroll the loop whole, and spill sums.
    end = b.asm(ir.FunctionType(ADDRESS, [ADDRESS]), "", "=r,0", [ADDRESS(LANES)], False)
    with cgutils.for_range_slice(b, ADDRESS(0), end, ADDRESS(FOUR * UNROLLED)) as (first, _):
        for step in range(0, FOUR * UNROLLED, FOUR):
            i = b.add(first, ADDRESS(step))
            both = load(b, place_of(b, block, i, PANEL), SUMS)
            for half, of_rows in places.items():
                codes = both
                if half != WHOLE:
                    codes = b.and_(b.lshr(both, four) if half else both, low_bits)
                for sum_, place in zip(sums[half], of_rows, strict=True):
                    x = everywhere(b, b.add(place, i), SUMS)
                    b.store(_with_products(b, b.load(sum_), codes, x), sum_)
    found = {half: list(map(b.load, of_rows)) for half, of_rows in sums.items()}
    if HAS_VNNI:
        return found
    ones = ir.Constant(CODES, [1] * LANES)
    return {half: [_pairs(b, sum_, ones) for sum_ in of_rows] for half, of_rows in found.items()}


def _with_products(b: Builder, sums: Value, codes: Value, x: Value) -> Value:
    """Sums with the products of codes without a sign and x added, of FOUR in 32 bits or, where
    there are no such dots, of two in 16, which hold 15 * 127 * LANES / 2."""
    if HAS_VNNI:
        return called(b, "llvm.x86.avx512.vpdpbusd.512", SUMS, sums, codes, x)
    if not HAS_DOTS:
        codes, x = (b.bitcast(v, ir.VectorType(BYTE, 2 * LANES)) for v in (codes, x))
        return b.add(sums, _plain_pairs(b, codes, x, CODES))
    size = LANES // 2

    def of_half(first: int) -> Value:
        words = [shuffled(b, v, v, range(first, first + size // 2)) for v in (codes, x)]
        both = [b.bitcast(v, ir.VectorType(BYTE, LANES)) for v in words]
        return called(b, "llvm.x86.avx2.pmadd.ub.sw", HALVES, *both)

    products = shuffled(b, of_half(0), of_half(size // 2), range(LANES))
    return b.add(sums, products)


panel_of_numbers, pair_of_numbers = _panel_of_numbers(1), _panel_of_numbers(2)
panel_of_pairs, panels_of_pairs = _panel_of_pairs(1), _panel_of_pairs(ROWS)
most_of_pairs = _panel_of_pairs(MOST_ROWS)
dot_of_bytes, dots_of_bytes = _dots_of_bytes(1), _dots_of_bytes(ROWS)
panel_of_halves, panels_of_halves = _panel_of_halves(1), _panel_of_halves(ROWS)
panel_of_bytes, panels_of_bytes = _panel_of_bytes(1), _panel_of_bytes(ROWS)
