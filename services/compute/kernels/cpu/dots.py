"""Sums of products: rows in float32 with weights in bfloat16, or codes: rows in 16 bits, weights
in 8 or 4.

Of codes, processors multiply two vectors of 16-bit numbers and add neighbours in one instruction,
which LLVM does not find in loops of Python: it is named here. With AVX-512 and VNNI it adds to the
sum, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32
"""Inputs that are multiplied together where both are codes."""

NUMBERS = 8
"""The same where they are numbers."""

WORDS = 4
"""Codes of 4 bits in a word: one of each of four runs of LANES inputs, the first's in its lowest
bits. Each run is a group, or all are one."""

BLOCK = WORDS * LANES
PAIRS = LANES // 2
PANEL = LANES // 2
"""Outputs whose weights lie beside one another: a vector has two inputs of each, as numbers or
words, and the sums of a panel's outputs have a lane each, so that none has to be added up, and
scales of a group are multiplied by once for all of them."""

UNROLLED = 4  # pairs of inputs
PLACES = (1, 16, 256, 1)
"""What codes are times, run by run, if each run is a group: of the first three only the other bits
are taken off, as a group's scale can have the factor. Two shifts in six fewer."""

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
Builder = Any  # llvmlite's, which has no types
Value = Any


def _pairs(b: Builder, x: Value, y: Value) -> Value:
    """x times y, each product added to its neighbour's."""
    if IS_WIDE:
        return called(b, "llvm.x86.avx512.pmaddw.d.512", SUMS, x, y)
    size = LANES // 2
    kind = ir.VectorType(WORD, size // 2)

    def of_half(first: int) -> Value:
        halves = [_shuffled(b, v, v, range(first, first + size)) for v in (x, y)]
        return called(b, "llvm.x86.avx2.pmadd.wd", kind, *halves)

    return _shuffled(b, of_half(0), of_half(size), range(size))


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


def _same(number: int) -> Value:
    return ir.Constant(CODES, [number] * LANES)


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


def _panel_of_halves(num_rows: int, num_groups: int) -> Callable[..., Any]:
    """With so many groups in a block."""

    @intrinsic
    def panel(typing_context, weight, scales, lows, x, group_sums, steps, out, num_blocks, num_out):
        """Of each row of x [R, I] and a panel's outputs: the sum over groups of their scale times a
        dot product, less their low times the sum of x; times the row's step, into out [R, O]."""

        def emit(context, b, signature, args):
            weight, scales, lows, x, group_sums, steps, out, num_blocks, num_out = args
            totals = _variables(b, FLOATS, num_rows)
            with cgutils.for_range(b, num_blocks) as loop:
                words = _at(b, weight, loop.index, 2 * LANES * PAIRS)
                blocks = [
                    b.add(b.mul(num_blocks, ADDRESS(row)), loop.index) for row in range(num_rows)
                ]
                for group in range(num_groups):
                    sums = _variables(b, SUMS, num_rows)
                    for run in range(group, WORDS, num_groups):
                        codes = partial(_codes, run=run, num_groups=num_groups)
                        run_x = b.add(x, ADDRESS(2 * LANES * run))
                        places = [_at(b, run_x, block, 2 * BLOCK) for block in blocks]
                        _add_run(b, sums, words, codes, places)
                    at = b.add(b.mul(loop.index, ADDRESS(num_groups)), ADDRESS(group))
                    scale = load(b, _at(b, scales, at, 4 * PANEL), FLOATS)
                    low = b.fneg(load(b, _at(b, lows, at, 4 * PANEL), FLOATS))
                    group_x = b.add(group_sums, ADDRESS(4 * group))
                    for total, sum_, block in zip(totals, sums, blocks, strict=True):
                        sum_of_x = everywhere(b, _at(b, group_x, block, 4 * num_groups), FLOATS)
                        add_to(b, total, b.sitofp(b.load(sum_), FLOATS), scale)
                        add_to(b, total, low, sum_of_x)
            for row, total in enumerate(totals):
                step = everywhere(b, _at(b, steps, ADDRESS(row), 4), FLOATS)
                numbers = _narrowed(b, b.fmul(b.load(total), step))
                _store(b, numbers, _at(b, out, b.mul(num_out, ADDRESS(row)), 2))
            return context.get_dummy_value()

        return types.void(*[types.int64] * 9), emit

    return panel


def _add_run(
    b: Builder,
    sums: list[Value],
    words: Value,
    codes: Callable[[Builder, Value], Value],
    places: list[Value],
) -> None:
    """Add products of a run's pairs of inputs, of each row from its place on."""
    with cgutils.for_range_slice(b, ADDRESS(0), ADDRESS(PAIRS), ADDRESS(UNROLLED)) as (first, _):
        for step in range(UNROLLED):
            pair = b.add(first, ADDRESS(step))
            weights = codes(b, load(b, _at(b, words, pair, 2 * LANES), CODES))
            for sum_, place in zip(sums, places, strict=True):
                two = b.bitcast(everywhere(b, _at(b, place, pair, 4), SUMS), CODES)
                b.store(b.add(b.load(sum_), _pairs(b, weights, two)), sum_)


def _codes(b: Builder, words: Value, run: int, num_groups: int) -> Value:
    """Those of a run, times its place where it is a group."""
    if run == WORDS - 1:
        return b.lshr(words, _same(4 * run))
    if num_groups == WORDS:
        return b.and_(words, _same(15 * PLACES[run]))
    return b.and_(b.lshr(words, _same(4 * run)), _same(15))


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
panel_of_runs, pair_of_runs, panels_of_runs = (_panel_of_halves(n, WORDS) for n in (1, 2, ROWS))
panel_of_blocks, panels_of_blocks = _panel_of_halves(1, 1), _panel_of_halves(ROWS, 1)
