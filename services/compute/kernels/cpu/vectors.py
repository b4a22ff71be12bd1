"""What kernels that name their instructions are made of: vectors of LLVM, and what is done with
them."""

from __future__ import annotations

from typing import Any

from llvmlite import ir
from numba.core import cgutils

BYTE, HALF, WORD = ir.IntType(8), ir.IntType(16), ir.IntType(32)
ADDRESS, FLOAT = ir.IntType(64), ir.FloatType()

LINE = 64
"""Bytes of a line of the cache, and of a vector."""

SUMS, FLOATS = ir.VectorType(WORD, LINE // 4), ir.VectorType(FLOAT, LINE // 4)
CODES, HALVES = ir.VectorType(HALF, LINE // 2), ir.VectorType(HALF, LINE // 4)


class _BFloat(ir.types.Type):  # type: ignore[misc]
    """bfloat16 as LLVM's own type, which llvmlite does not have."""

    intrinsic_name = "bf16"

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _BFloat)

    def __hash__(self) -> int:
        return hash(_BFloat)


BFLOATS = ir.VectorType(_BFloat(), LINE // 2)

Builder = Any  # llvmlite's, which has no types
Value = Any


def called(b: Builder, name: str, result: Any, *values: Value, **options: Any) -> Value:
    kind = ir.FunctionType(result, [value.type for value in values])
    return b.call(cgutils.get_or_insert_function(b.module, kind, name), values, **options)


def shuffled(b: Builder, x: Value, y: Value, places: Any) -> Value:
    chosen = list(places)
    return b.shuffle_vector(x, y, ir.Constant(ir.VectorType(WORD, len(chosen)), chosen))


def load(b: Builder, address: Value, kind: Any) -> Value:
    value = b.load(b.inttoptr(address, kind.as_pointer()))
    value.align = 1
    return value


def place_of(b: Builder, address: Value, index: Value, size: int) -> Value:
    """Where number `index` is of those of so many bytes from an address on."""
    return b.add(address, b.mul(index, ADDRESS(size)))


def everywhere(b: Builder, address: Value, kind: Any) -> Value:
    """What is at an address, in all lanes."""
    number = load(b, address, kind.element)
    one = b.insert_element(ir.Constant(kind, ir.Undefined), number, WORD(0))
    return shuffled(b, one, one, [0] * kind.count)


def wide_vector(b: Builder, address: Value, size: int, lanes: int) -> Value:
    """Numbers of so many bytes each, in float32: float32s or bfloat16s."""
    if size == 4:
        return load(b, address, ir.VectorType(FLOAT, lanes))
    words = b.zext(load(b, address, ir.VectorType(HALF, lanes)), ir.VectorType(WORD, lanes))
    shifted = b.shl(words, ir.Constant(words.type, [16] * lanes))
    return b.bitcast(shifted, ir.VectorType(FLOAT, lanes))


def total_of(b: Builder, numbers: Value) -> Value:
    """The sum of all lanes: of one half and the other, of the halves of that, and so on."""
    while (count := numbers.type.count) > 1:
        halves = [shuffled(b, numbers, numbers, range(n, n + count // 2)) for n in (0, count // 2)]
        numbers = b.fadd(*halves)
    return b.extract_element(numbers, WORD(0))


def variables(b: Builder, kind: Any, count: int) -> list[Value]:
    """So many, which are 0."""
    made = [cgutils.alloca_once(b, kind) for _ in range(count)]
    for variable in made:
        b.store(ir.Constant(kind, None), variable)
    return made


def half_of(b: Builder, words: Value, half: int) -> Value:
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


def narrowed(b: Builder, numbers: Value) -> Value:
    """bfloat16s of float32s, to the nearest, of two to the even."""
    bits = b.bitcast(numbers, SUMS)

    def same(number: int) -> Value:
        return ir.Constant(SUMS, [number] * SUMS.count)

    odd = b.and_(b.lshr(bits, same(16)), same(1))
    rounded = b.add(bits, b.add(odd, same(0x7FFF)))
    return b.trunc(b.lshr(rounded, same(16)), HALVES)


def store(b: Builder, value: Value, address: Value) -> None:
    b.store(value, b.inttoptr(address, value.type.as_pointer())).align = 1


def add_to(b: Builder, variable: Value, x: Value, y: Value) -> None:
    """variable += x * y"""
    name = f"llvm.fmuladd.v{x.type.count}f32"  # fused where the processor can
    b.store(called(b, name, x.type, x, y, b.load(variable)), variable)
