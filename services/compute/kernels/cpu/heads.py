"""Query heads that share keys and values: each of these is read and widened once for several.

A vector has eight numbers of a head. What one head gets is summed in the same order whatever heads
and positions are beside it.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from llvmlite import ir
from numba import types
from numba.core import cgutils
from numba.extending import intrinsic

from services.compute.kernels.cpu.vectors import (
    ADDRESS,
    FLOAT,
    Builder,
    Value,
    add_to,
    everywhere,
    fetch_line,
    load,
    total_of,
    wide_vector,
)

LANES = 8
"""Of a vector, and what a head's width is a multiple of."""

HEADS = 3
"""That are multiplied at once: with four keys, or four vectors of values, they fill the registers
of AVX2."""

KEYS = 4
VECTORS = 4

FLOATS = ir.VectorType(FLOAT, LANES)


def _place(b: Builder, address: Value, size: int, first: Value, *more: Value) -> Value:
    """So many numbers behind an address."""
    for term in more:
        first = b.add(first, term)
    return b.add(address, b.mul(first, ADDRESS(size)))


def _size(like: Any) -> int:
    return 4 if like == types.float32 else 2


def _by_number(b: Builder, num_heads: Value, emit: Callable[[int], None]) -> None:
    """What is written for each number of heads that there may be."""
    for number in range(1, HEADS + 1):
        with b.if_then(b.icmp_signed("==", num_heads, ADDRESS(number))):
            emit(number)


def _scores_of(num_keys: int) -> Callable[..., Any]:
    @intrinsic
    def scores(typing_context, num_heads, queries, keys, width, out, stride, like):
        """Products of queries [H, D] in float32 and keys [P, D] that follow one another, into
        float32 at `out`, heads `stride` numbers apart."""

        def emit(context, b, signature, args):
            many, queries, keys, width, out, stride, _ = args
            size = _size(like)

            def of(num_heads: int) -> None:
                places = [(head, key) for head in range(num_heads) for key in range(num_keys)]
                sums = {place: cgutils.alloca_once(b, FLOATS) for place in places}
                for sum_ in sums.values():
                    b.store(ir.Constant(FLOATS, None), sum_)
                with cgutils.for_range_slice(b, ADDRESS(0), width, ADDRESS(LANES)) as (i, _):
                    for key in range(num_keys):
                        at = _place(b, keys, size, b.mul(width, ADDRESS(key)), i)
                        numbers = wide_vector(b, at, size, LANES)
                        for head in range(num_heads):
                            at = _place(b, queries, 4, b.mul(width, ADDRESS(head)), i)
                            add_to(b, sums[head, key], numbers, load(b, at, FLOATS))
                for (head, key), sum_ in sums.items():
                    at = _place(b, out, 4, b.mul(stride, ADDRESS(head)), ADDRESS(key))
                    b.store(total_of(b, b.load(sum_)), b.inttoptr(at, FLOAT.as_pointer()))

            _by_number(b, many, of)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 6, like), emit

    return scores


def _mixes_of(num_vectors: int) -> Callable[..., Any]:
    @intrinsic
    def mixes(typing_context, num_heads, weights, stride, values, width, count, out, like):
        """Add vectors of so many values [P, D] that follow one another, times weights in float32,
        to out [H, D]; heads' weights are `stride` numbers apart."""

        def emit(context, b, signature, args):
            many, weights, stride, values, width, count, out, _ = args
            size, vectors = _size(like), range(num_vectors)

            def of(num_heads: int) -> None:
                sums = {}
                for head, vector in [(h, v) for h in range(num_heads) for v in vectors]:
                    start = b.mul(width, ADDRESS(head))
                    at = _place(b, out, 4, start, ADDRESS(LANES * vector))
                    sums[head, vector] = at, cgutils.alloca_once(b, FLOATS)
                    b.store(load(b, at, FLOATS), sums[head, vector][1])
                with cgutils.for_range(b, count) as loop:
                    place = b.mul(loop.index, width)
                    starts = [_place(b, values, size, place, ADDRESS(LANES * v)) for v in vectors]
                    numbers = [wide_vector(b, start, size, LANES) for start in starts]
                    for head in range(num_heads):
                        at = _place(b, weights, 4, b.mul(stride, ADDRESS(head)), loop.index)
                        weight = everywhere(b, at, FLOATS)
                        for vector in vectors:
                            add_to(b, sums[head, vector][1], weight, numbers[vector])
                for at, sum_ in sums.values():
                    b.store(b.load(sum_), b.inttoptr(at, FLOATS.as_pointer())).align = 4

            _by_number(b, many, of)
            return context.get_dummy_value()

        return types.void(*[types.int64] * 7, like), emit

    return mixes


score, scores = _scores_of(1), _scores_of(KEYS)
add_vector, add_vectors = _mixes_of(1), _mixes_of(VECTORS)


@intrinsic
def fetch(typing_context, address):
    """Have a line in the caches soon."""

    def emit(context, b, signature, args):
        fetch_line(b, args[0])
        return context.get_dummy_value()

    return types.void(types.int64), emit
