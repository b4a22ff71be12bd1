"""Sums of products: rows in float32 with weights in bfloat16, or codes: rows in 16 bits and weights
in 8, or rows in 8 and weights in 4.

Of codes, processors multiply two vectors and add neighbours in one instruction, which LLVM does not
find in loops of Python: it is named here. With AVX-512 and VNNI it adds to the sum, too.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32
"""Inputs that are multiplied together where both are codes."""

NUMBERS = 8
"""The same where they are numbers."""

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

LINE = 64
"""Bytes of a line of the cache."""

FETCHED = 4
"""Lines that may be fetched of the next panel of codes for each LANES * PANEL bytes of one."""

ROWS = 4
"""Rows that share what has been read of a weight."""

BYTE, HALF, WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
ADDRESS, FLOAT = ir.IntType(64), ir.FloatType()
SUMS, CODES = ir.VectorType(WORD, LANES // 2), ir.VectorType(HALF, LANES)
FLOATS = ir.VectorType(FLOAT, LANES // 2)
HALVES = ir.VectorType(HALF, LANES // 2)

FEATURES = binding.get_host_cpu_features()
HAS_DOTS = bool(FEATURES.get("avx2"))
"""Whether this processor has such an instruction."""

IS_WIDE = bool(FEATURES.get("avx512bw"))
HAS_VNNI = bool(FEATURES.get("avx512vnni"))
HAS_AMX = bool(FEATURES.get("amx-bf16"))
"""Whether oneDNN multiplies many rows of bfloat16 by tiles: codes of 8 were not measured beside."""

Builder = Any  # llvmlite's, which has no types
Value = Any


def _pairs(b: Builder, x: Value, y: Value) -> Value:
    """x times y, each product added to its neighbour's."""
    if not HAS_DOTS:
        return _plain_pairs(b, x, y, SUMS)
    if IS_WIDE:
        return called(b, "llvm.x86.avx512.pmaddw.d.512", SUMS, x, y)
    size = LANES // 2
    kind = ir.VectorType(WORD, size // 2)

    def of_half(first: int) -> Value:
        halves = [_shuffled(b, v, v, range(first, first + size)) for v in (x, y)]
        return called(b, "llvm.x86.avx2.pmadd.wd", kind, *halves)

    return _shuffled(b, of_half(0), of_half(size), range(size))


def _plain_pairs(b: Builder, x: Value, y: Value, kind: Any) -> Value:
    """The same by any processor, of which none calls it: what is compiled has to be valid."""
    count = kind.count

    def every_other(v: Value, first: int, widen: Callable[..., Value]) -> Value:
        return widen(_shuffled(b, v, v, range(first, 2 * count, 2)), kind)

    widen = b.zext if kind == CODES else b.sext
    products = [
        b.mul(every_other(x, first, widen), every_other(y, first, b.sext)) for first in range(2)
    ]
    return b.add(*products)


def called(b: Builder, name: str, result: Any, *values: Value, **options: Any) -> Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values, **options)


def _shuffled(b: Builder, x: Value, y: Value, places: Any) -> Value:
    chosen = list(places)
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(WORD, len(chosen)), chosen))


def load(b: Builder, address: Value, kind: Any) -> Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _at(b: Builder, address: Value, index: Value, size: int) -> Value:
    return b.add(address, b.mul(index, ADDRESS(size)))


def everywhere(b: Builder, address: Value, kind: Any) -> Value:
    """What is at an address, in all lanes."""
    number = load(b, address, kind.element)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), number, WORD(0))
    return _shuffled(b, one, one, [0] * kind.count)


def _variables(b: Builder, kind: Any, count: int) -> list[Value]:
    zero = ir.Constant(kind, None)
    variables = [cgutils.alloca_once(b, kind) for _ in range(count)]
    for variable in variables:
        b.store(zero, variable)
    return variables


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
            sums = [_variables(b, FLOATS, 2) for _ in range(num_rows)]
            with cgutils.for_range_slice(b, ADDRESS(0), num_in, ADDRESS(NUMBERS)) as (first, _):
                for step in range(0, NUMBERS, 2):
                    i = b.add(first, ADDRESS(step))
                    fetch_line(b, _at(b, ahead, i, 2 * PANEL))
                    words = load(b, _at(b, weight, i, 2 * PANEL), SUMS)
                    halves = [_half(b, words, half) for half in range(2)]
                    for row in range(num_rows):
                        place = _at(b, x, b.add(b.mul(num_in, ADDRESS(row)), i), 4)
                        for half, numbers in enumerate(halves):
                            at = b.add(place, ADDRESS(4 * half))
                            add_to(b, sums[row][half], numbers, everywhere(b, at, FLOATS))
            for row, both in enumerate(sums):
                total = b.fadd(*map(b.load, both))
                _store(b, _narrowed(b, total), _at(b, out, b.mul(num_out, ADDRESS(row)), 2))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6), emit

    return panel


def _half(b: Builder, words: Value, half: int) -> Value:
    """The lower or the upper one of two bfloat16s in each word, as float32."""
    if half:
        return b.bitcast(b.and_(words, ir.Constant(SUMS, [0xFFFF0000] * SUMS.count)), FLOATS)
    return b.bitcast(b.shl(words, ir.Constant(SUMS, [16] * SUMS.count)), FLOATS)


def fetch_line(b: Builder, address: Value) -> None:
    """Have a line in the first-level cache soon."""
    pointer = b.inttoptr(address, BYTE.as_pointer())
    kind = ir.FunctionType(ir.VoidType(), [pointer.type, WORD, WORD, WORD])
    fetch = cgutils.get_or_insert_function(b.module, kind, "llvm.prefetch.p0i8")
    b.call(fetch, [pointer, WORD(0), WORD(3), WORD(1)])


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
            sums = _variables(b, SUMS, num_rows)
            row_bytes = b.mul(num_in, ADDRESS(2))
            with cgutils.for_range_slice(b, ADDRESS(0), num_in, ADDRESS(LANES)) as (i, _):
                codes = load(b, b.add(weight, i), ir.VectorType(BYTE, LANES))
                codes = b.sext(codes, CODES)
                for row, sum_ in enumerate(sums):
                    of_row = b.add(x, b.mul(row_bytes, ADDRESS(row)))
                    products = _pairs(b, codes, load(b, _at(b, of_row, i, 2), CODES))
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
        typing_context,
        weight,
        ahead,
        more,
        scales,
        lows,
        x,
        steps,
        sums,
        out,
        num_in,
        num_out,
        shift,
    ):
        """Of each row of x [R, I] and a panel's outputs, into out [R, O]: the sum over each LANES
        inputs of their scale and the row's step times a dot product, less their low times the sum
        of x. 2 ** shift LANES have one scale and one low. A part of the codes at `ahead` is fetched
        meanwhile."""

        def emit(context, b, signature, args):
            weight, ahead, more, scales, lows, x, steps, sums, out, num_in, num_out, shift = args
            totals = _variables(b, FLOATS, num_rows)
            num_groups = b.udiv(num_in, ADDRESS(LANES))
            firsts = [b.mul(num_groups, ADDRESS(row)) for row in range(num_rows)]
            with cgutils.for_range(b, b.udiv(num_in, ADDRESS(BLOCK))) as loop:
                block = _at(b, weight, loop.index, LANES * PANEL)
                if num_rows > 1:
                    _fetch_lines(b, _at(b, ahead, loop.index, LANES * PANEL), more)
                groups = [b.add(b.mul(loop.index, ADDRESS(2)), ADDRESS(half)) for half in range(2)]
                of_rows = [[b.add(first, group) for first in firsts] for group in groups]
                for turn in turns:
                    places = {half: [_at(b, x, g, LANES) for g in of_rows[half]] for half in turn}
                    for half, dots in _dots_of_codes(b, block, places).items():
                        at = b.lshr(groups[half], shift)
                        scale = load(b, _at(b, scales, at, 4 * PANEL), FLOATS)
                        low = b.fneg(load(b, _at(b, lows, at, 4 * PANEL), FLOATS))
                        for total, dot, g in zip(totals, dots, of_rows[half], strict=True):
                            step = everywhere(b, _at(b, steps, g, 4), FLOATS)
                            add_to(b, total, b.fmul(b.sitofp(dot, FLOATS), step), scale)
                            add_to(b, total, low, everywhere(b, _at(b, sums, g, 4), FLOATS))
            for row, total in enumerate(totals):
                place = _at(b, out, b.mul(num_out, ADDRESS(row)), 2)
                _store(b, _narrowed(b, b.load(total)), place)
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
            totals = _variables(b, FLOATS, num_rows)
            num_groups = b.udiv(num_in, ADDRESS(LANES))
            zero = ir.Constant(FLOATS, [float(-ZERO)] * FLOATS.count)
            with cgutils.for_range(b, num_groups) as loop:
                groups = [
                    b.add(b.mul(num_groups, ADDRESS(row)), loop.index) for row in range(num_rows)
                ]
                block = _at(b, weight, loop.index, LANES * PANEL)
                if num_rows > 1:
                    _fetch_lines(b, _at(b, ahead, loop.index, LANES * PANEL), more)
                places = [_at(b, x, g, LANES) for g in groups]
                dots = _dots_of_codes(b, block, {WHOLE: places})[WHOLE]
                for total, dot, g in zip(totals, dots, groups, strict=True):
                    step = everywhere(b, _at(b, steps, g, 4), FLOATS)
                    add_to(b, total, b.sitofp(dot, FLOATS), step)
                    add_to(b, total, zero, everywhere(b, _at(b, sums, g, 4), FLOATS))
            scale = load(b, scales, FLOATS)
            for row, total in enumerate(totals):
                place = _at(b, out, b.mul(num_out, ADDRESS(row)), 2)
                _store(b, _narrowed(b, b.fmul(b.load(total), scale)), place)
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
    sums = {half: _variables(b, kind, len(of_rows)) for half, of_rows in places.items()}
    # A number that LLVM does not know: it would unroll the loop whole, and spill sums.
    end = b.asm(ir.FunctionType(ADDRESS, [ADDRESS]), "", "=r,0", [ADDRESS(LANES)], False)
    with cgutils.for_range_slice(b, ADDRESS(0), end, ADDRESS(FOUR * UNROLLED)) as (first, _):
        for step in range(0, FOUR * UNROLLED, FOUR):
            i = b.add(first, ADDRESS(step))
            both = load(b, _at(b, block, i, PANEL), SUMS)
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
        words = [_shuffled(b, v, v, range(first, first + size // 2)) for v in (codes, x)]
        both = [b.bitcast(v, ir.VectorType(BYTE, LANES)) for v in words]
        return called(b, "llvm.x86.avx2.pmadd.ub.sw", HALVES, *both)

    products = _shuffled(b, of_half(0), of_half(size // 2), range(LANES))
    return b.add(sums, products)


def _narrowed(b: Builder, numbers: Value) -> Value:
    """bfloat16s of float32s, to the nearest, of two to the even."""
    bits = b.bitcast(numbers, SUMS)

    def same(number: int) -> Value:
        return ir.Constant(SUMS, [number] * SUMS.count)

    odd = b.and_(b.lshr(bits, same(16)), same(1))
    rounded = b.add(bits, b.add(odd, same(0x7FFF)))
    return b.trunc(b.lshr(rounded, same(16)), HALVES)


def _store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def add_to(b: Builder, variable: Value, x: Value, y: Value) -> None:
    """variable += x * y"""
    name = f"llvm.fmuladd.v{x.type.count}f32"  # fused where the processor can
    b.store(called(b, name, x.type, x, y, b.load(variable)), variable)


panel_of_numbers, pair_of_numbers = _panel_of_numbers(1), _panel_of_numbers(2)
dot_of_bytes, dots_of_bytes = _dots_of_bytes(1), _dots_of_bytes(ROWS)
panel_of_halves, panels_of_halves = _panel_of_halves(1), _panel_of_halves(ROWS)
panel_of_bytes, panels_of_bytes = _panel_of_bytes(1), _panel_of_bytes(ROWS)
