"""Sums of products: rows in float32 with weights in bfloat16, or codes: rows in 16 bits, weights
in 8 or 4.

Of codes, processors multiply two vectors of 16-bit numbers and add neighbours in one instruction,
which LLVM does not find in loops of Python: it is named here. With AVX-512 and VNNI it adds to the
sum, too.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import reduce
from typing import Any

from llvmlite import binding, ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

LANES = 32
"""Inputs that are multiplied together where both are codes."""

NUMBERS = LANES // 2
"""The same where they are numbers."""

WORDS = 4
"""Codes of 4 bits in a word: word i of a block has input i of each of four runs of LANES inputs,
the first's in its lowest bits. Each run is a group, or all are one."""

BLOCK = WORDS * LANES
PLACES = (1, 16, 256, 1)
"""What codes are times, run by run, if each run is a group: of the first three only the other bits
are taken off, as a group's scale can have the factor. Two shifts in six fewer."""

ROWS = 4
"""Rows that share what has been read of a weight."""

BYTE, HALF, WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
ADDRESS, FLOAT = ir.IntType(64), ir.FloatType()
SUMS, CODES = ir.VectorType(WORD, LANES // 2), ir.VectorType(HALF, LANES)
FLOATS, LOWS = ir.VectorType(FLOAT, LANES // 2), ir.VectorType(FLOAT, WORDS)
NUMBERS_16 = ir.VectorType(HALF, NUMBERS)

FEATURES = binding.get_host_cpu_features()
HAS_DOTS = bool(FEATURES.get("avx2"))
"""Whether this processor has such an instruction."""

IS_WIDE = bool(FEATURES.get("avx512bw"))
PARTS = FLOATS if IS_WIDE else ir.VectorType(FLOAT, LANES // 4)
"""A group's sums as numbers: where vectors are short, halves are added before that."""

Builder = Any  # llvmlite's, which has no types
Value = Any


def _pairs(b: Builder, x: Value, y: Value) -> Value:
    """x times y, each product added to its neighbour's."""
    if IS_WIDE:
        return _called(b, "llvm.x86.avx512.pmaddw.d.512", SUMS, x, y)
    size = LANES // 2
    kind = ir.VectorType(WORD, size // 2)

    def of_half(first: int) -> Value:
        halves = [_shuffled(b, v, v, range(first, first + size)) for v in (x, y)]
        return _called(b, "llvm.x86.avx2.pmadd.wd", kind, *halves)

    return _shuffled(b, of_half(0), of_half(size), range(size))


def _called(b: Builder, name: str, result: Any, *values: Value, **options: Any) -> Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values, **options)


def _shuffled(b: Builder, x: Value, y: Value, places: Any) -> Value:
    chosen = list(places)
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(WORD, len(chosen)), chosen))


def _load(b: Builder, address: Value, kind: Any) -> Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def _at(b: Builder, address: Value, index: Value, size: int) -> Value:
    return b.add(address, b.mul(index, ADDRESS(size)))


def _everywhere(b: Builder, address: Value) -> Value:
    """The float32 at an address, in all lanes of a group's sums."""
    one = b.insert_element(ir.Constant(PARTS, ir.Undefined), _load(b, address, FLOAT), WORD(0))
    return _shuffled(b, one, one, [0] * PARTS.count)


def _same(number: int) -> Value:
    return ir.Constant(CODES, [number] * LANES)


def _variables(b: Builder, kind: Any, count: int) -> list[Value]:
    zero = ir.Constant(kind, None)
    variables = [cgutils.alloca_once(b, kind) for _ in range(count)]
    for variable in variables:
        b.store(zero, variable)
    return variables


def _dots_of_numbers(num_rows: int) -> Callable[..., Any]:
    """Of each row the same sums in the same order whatever rows there are beside it, so that it has
    the same bits alone. Two outputs at once would be slower: processors fetch ahead of one row of
    the weight better than of several."""

    @intrinsic
    def dots(typing_context, weight, x, num_in):
        """Of each row of x [R, I] in float32 and a weight's output in bfloat16."""
        kind = types.UniTuple(types.float32, num_rows)

        def emit(context, b, signature, args):
            weight, x, num_in = args
            sums = _variables(b, FLOATS, num_rows)
            with cgutils.for_range_slice(b, ADDRESS(0), num_in, ADDRESS(NUMBERS)) as (i, _):
                numbers = _widened(b, _load(b, _at(b, weight, i, 2), NUMBERS_16))
                for row, sum_ in enumerate(sums):
                    at = _at(b, x, b.add(b.mul(num_in, ADDRESS(row)), i), 4)
                    _add_to(b, sum_, numbers, _load(b, at, FLOATS))
            totals = [_added_up(b, b.load(sum_)) for sum_ in sums]
            return context.make_tuple(b, signature.return_type, totals)

        return kind(types.int64, types.int64, types.int64), emit

    return dots


def _widened(b: Builder, numbers: Value) -> Value:
    """bfloat16 as float32."""
    shift = ir.Constant(SUMS, [16] * SUMS.count)
    return b.bitcast(b.shl(b.zext(numbers, SUMS), shift), FLOATS)


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
                codes = _load(b, b.add(weight, i), ir.VectorType(BYTE, LANES))
                codes = b.sext(codes, CODES)
                for row, sum_ in enumerate(sums):
                    of_row = b.add(x, b.mul(row_bytes, ADDRESS(row)))
                    products = _pairs(b, codes, _load(b, _at(b, of_row, i, 2), CODES))
                    b.store(b.add(b.load(sum_), products), sum_)
            name = f"llvm.vector.reduce.add.v{SUMS.count}i32"
            totals = [_called(b, name, WORD, b.load(sum_)) for sum_ in sums]
            floats = [b.sitofp(total, FLOAT) for total in totals]
            return context.make_tuple(b, signature.return_type, floats)

        return kind(types.int64, types.int64, types.int64), emit

    return dots


def _dots_of_halves(num_rows: int, num_groups: int) -> Callable[..., Any]:
    """With so many groups in a block."""
    chains = num_groups if num_rows == 1 else 1  # sums that need not wait for one another
    lows_kind = LOWS if num_groups == WORDS else FLOAT

    @intrinsic
    def dots(typing_context, weight, scales, lows, x, group_sums, num_blocks):
        """Of each row of x [R, I] and a weight's output: the sum over its groups of their scale
        times a dot product, less their low times the sum of x."""
        kind = types.UniTuple(types.float32, num_rows)

        def emit(context, b, signature, args):
            weight, scales, lows, x, group_sums, num_blocks = args
            sums = [_variables(b, PARTS, chains) for _ in range(num_rows)]
            low_sums = _variables(b, lows_kind, num_rows)
            with cgutils.for_range(b, num_blocks) as loop:
                words = _load(b, _at(b, weight, loop.index, 2 * LANES), CODES)
                codes = _codes(b, words, num_groups)
                first = _at(b, scales, loop.index, 4 * num_groups)
                places = [b.add(first, ADDRESS(4 * group)) for group in range(num_groups)]
                wide = [_everywhere(b, place) for place in places]
                low = _load(b, _at(b, lows, loop.index, 4 * num_groups), lows_kind)
                for row in range(num_rows):
                    block = b.add(b.mul(num_blocks, ADDRESS(row)), loop.index)
                    x_block = _at(b, x, block, 2 * BLOCK)
                    for group, products in enumerate(_by_group(b, codes, x_block, num_groups)):
                        sum_ = sums[row][group % chains]
                        _add_to(b, sum_, b.sitofp(products, PARTS), wide[group])
                    at = _at(b, group_sums, block, 4 * num_groups)
                    _add_to(b, low_sums[row], low, _load(b, at, lows_kind))
            totals = [_total(b, *pair) for pair in zip(sums, low_sums, strict=True)]
            return context.make_tuple(b, signature.return_type, totals)

        return kind(*[types.int64] * 6), emit

    return dots


def _codes(b: Builder, words: Value, num_groups: int) -> list[Value]:
    """The codes of each run in words, times their places where each run is a group."""
    last = b.lshr(words, _same(4 * (WORDS - 1)))
    if num_groups == WORDS:
        return [*(b.and_(words, _same(15 * place)) for place in PLACES[:-1]), last]
    shifted = [b.lshr(words, _same(4 * run)) for run in range(WORDS - 1)]
    return [*(b.and_(one, _same(15)) for one in shifted), last]


def _by_group(b: Builder, codes: list[Value], x_block: Value, num_groups: int) -> list[Value]:
    """Sums of products of each group of a block."""
    places = [b.add(x_block, ADDRESS(2 * LANES * run)) for run in range(WORDS)]
    runs = zip(codes, places, strict=True)
    products = [_pairs(b, code, _load(b, place, CODES)) for code, place in runs]
    groups = products if num_groups == WORDS else [reduce(b.add, products)]
    return groups if IS_WIDE else [_halved(b, sums) for sums in groups]


def _halved(b: Builder, sums: Value) -> Value:
    """Both halves added."""
    size = PARTS.count
    lower, upper = (_shuffled(b, sums, sums, range(at, at + size)) for at in (0, size))
    return b.add(lower, upper)


def _add_to(b: Builder, variable: Value, x: Value, y: Value) -> None:
    """variable += x * y"""
    lanes = f"v{x.type.count}" if isinstance(x.type, ir.VectorType) else ""
    b.store(_called(b, f"llvm.fma.{lanes}f32", x.type, x, y, b.load(variable)), variable)


def _total(b: Builder, sums: list[Value], low_sum: Value) -> Value:
    total = reduce(b.fadd, [b.load(sum_) for sum_ in sums])
    low = b.load(low_sum)
    if low.type == LOWS:
        low = _added_up(b, low)
    return b.fsub(_added_up(b, total), low)


def _added_up(b: Builder, x: Value) -> Value:
    name = f"llvm.vector.reduce.fadd.v{x.type.count}f32"
    return _called(b, name, FLOAT, FLOAT(-0.0), x, fastmath=("reassoc",))


dot_of_numbers, pair_of_numbers = _dots_of_numbers(1), _dots_of_numbers(2)
dots_of_numbers = _dots_of_numbers(ROWS)
dot_of_bytes, dots_of_bytes = _dots_of_bytes(1), _dots_of_bytes(ROWS)
dot_of_runs, dots_of_runs = _dots_of_halves(1, WORDS), _dots_of_halves(ROWS, WORDS)
dot_of_blocks, dots_of_blocks = _dots_of_halves(1, 1), _dots_of_halves(ROWS, 1)
