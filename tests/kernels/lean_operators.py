"""Operators, loads and casts of Triton's interpreter, done by what they came to the last time.

What an operator does follows from the types of its operands, and from a number among them. The
first time Triton does it; where that comes to one operation of numpy, it is kept for the next time.
"""

from __future__ import annotations

from collections.abc import Callable
from types import ModuleType
from typing import Any

import numpy as np


def _quotient(left: Any, right: Any) -> Any:
    return (left - np.fmod(left, right)) // right


UFUNCS = {
    "add": np.add,
    "sub": np.subtract,
    "mul": np.multiply,
    "truediv": np.divide,
    "floordiv": _quotient,
    "mod": np.fmod,
    "and": np.bitwise_and,
    "or": np.bitwise_or,
    "lshift": np.left_shift,
    "rshift": np.right_shift,
    "lt": np.less,
    "le": np.less_equal,
    "gt": np.greater,
    "ge": np.greater_equal,
    "eq": np.equal,
    "ne": np.not_equal,
}
COMPARISONS = {"lt", "le", "gt", "ge", "eq", "ne"}
WHOLE = slice(None)
SIGNED = {"int8", "int16", "int32", "int64"}
ORDINARY = SIGNED | {"fp32", "fp64", "uint8", "uint16", "uint32", "uint64"}


class LeanOperators:
    """Stands before Triton's functions; each table begins with what its keys name by their ids."""

    def __init__(self, core: Any, interpreter: Any) -> None:
        self._tensor = core.tensor
        self._constexpr = core.constexpr
        self._handle = interpreter.TensorHandle
        self._semantic = interpreter.interpreter_semantic
        self._load = interpreter._interpreter.load
        self._np_dtype = interpreter._get_np_dtype
        self._convert = interpreter._convert_float

    def faster(self, owner: Any, name: str, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return what to call instead of a function of `triton.language` or of its tensors."""
        if owner is self._tensor:
            operator = name.strip("_")
            if operator in UFUNCS:
                return self._operator(operator, plain)
            if operator[:1] == "r" and operator[1:] in UFUNCS.keys() - COMPARISONS:
                return self._operator(operator[1:], plain, is_reflected=True)
            if name in ("to", "__getitem__"):
                return {"to": self._cast, "__getitem__": self._new_axes}[name](plain)
        elif isinstance(owner, ModuleType) and name in ("load", "arange"):
            return {"load": self._loading, "arange": self._arange}[name](plain)
        return plain

    def to_tensor(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        """Return what every assignment calls, mostly with a tensor."""
        tensor_type = self._tensor
        return lambda x, *how, **named: x if type(x) is tensor_type else plain(x, *how, **named)

    def _made(self, data: Any, dtype: Any, type_: Any, known: Any) -> Any:
        """Return a tensor without looking at what it is made of."""
        handle = object.__new__(self._handle)
        handle.data, handle.dtype, handle.attr = data, dtype, {}
        tensor = object.__new__(self._tensor)
        tensor.handle, tensor.type = handle, type_
        tensor.shape, tensor.numel, tensor.dtype = known
        return tensor

    def _like(self, result: Any) -> tuple[Any, ...]:
        """Return what `_made` needs besides the data to make such a tensor again."""
        return result.handle.dtype, result.type, (result.shape, result.numel, result.dtype)

    def _operator(
        self, name: str, plain: Callable[..., Any], is_reflected: bool = False
    ) -> Callable[..., Any]:
        ufunc, table, made = UFUNCS[name], {}, self._made
        tensor_type, constexpr = self._tensor, self._constexpr

        def operate(self_: Any, other: Any, **named: Any) -> Any:
            if type(other) is constexpr:
                other = other.value
            if type(other) is tensor_type:
                key = id(self_.type), id(other.type)
            elif type(other) in (int, float):
                key = id(self_.type), type(other), other
            else:
                return plain(self_, other, **named)
            known = table.get(key)
            if known is None:
                result = plain(self_, other, **named)
                how = self._learn(name, self_, other, result, is_reflected)
                table[key] = (self_.type, getattr(other, "type", None), how)
                return result
            how = known[2]
            if how is None:
                return plain(self_, other, **named)
            number, width, like = how
            data = self_.handle.data
            theirs = other.handle.data if number is None else number
            if width:
                theirs = theirs.astype(np.uint64)
                return made(data + (width * theirs if width > 1 else theirs), *like)
            return made(ufunc(theirs, data) if is_reflected else ufunc(data, theirs), *like)

        return operate

    def _learn(
        self, name: str, left: Any, right: Any, result: Any, is_reflected: bool
    ) -> tuple[Any, int, Any] | None:
        """Return a number's array, the bytes of a pointer's element, and what is made of them."""
        is_number = type(right) is not self._tensor
        number, width = None, 0
        if left.dtype.is_ptr():
            if name != "add" or (is_number and type(right) is not int):
                return None
            if is_number:
                number = np.array([right], np.int64)
            elif right.dtype.name not in SIGNED:
                return None
            width = max(1, left.handle.get_element_ty().primitive_bitwidth // 8)
            offsets = right.handle.data if number is None else number
            data = left.handle.data + width * offsets.astype(np.uint64)
        else:
            theirs = right
            if is_number:
                operand = self._semantic.to_tensor(right) if name in COMPARISONS else right
                ours, theirs = self._semantic.binary_op_type_checking_impl(left, operand)
                if ours.dtype is not left.dtype:
                    return None
                number = theirs.handle.data.ravel()[:1]
            are_signed = {left.dtype.name, theirs.dtype.name} <= SIGNED
            if theirs.dtype is not left.dtype and not are_signed:
                return None
            operands = (left.handle.data, theirs.handle.data if number is None else number)
            data = UFUNCS[name](*(operands[::-1] if is_reflected else operands))
        expected = result.handle.data
        if (data.dtype, data.shape) != (expected.dtype, expected.shape):
            return None
        return number, width, self._like(result)

    def _cast(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        table: dict[Any, Any] = {}

        def to(self_: Any, dtype: Any, *how: Any, **named: Any) -> Any:
            if type(dtype) is self._constexpr:
                dtype = dtype.value
            if how or named:
                return plain(self_, dtype, *how, **named)
            key = id(self_.type), id(dtype)
            known = table.get(key)
            if known is None:
                result = plain(self_, dtype)
                table[key] = self_.type, dtype, *self._learn_cast(self_, result)
                return result
            _, _, cast, like = known
            if like is None:
                return plain(self_, dtype) if cast is None else self_
            return self._made(cast(self_.handle.data), *like)

        return to

    def _learn_cast(self, before: Any, result: Any) -> tuple[Any, Any]:
        """Return how data are cast and what the result is like; no likeness if nothing is done."""
        if result is before:
            return "as it is", None
        source, wanted = before.dtype, result.dtype
        names, np_dtype = {source.name, wanted.name}, result.handle.data.dtype
        if names - {"int1"} <= ORDINARY and wanted.name != "int1" or names == {"fp16", "fp32"}:
            return lambda data: data.astype(np_dtype), self._like(result)
        is_wider = source.is_fp8() and wanted.is_floating() or names == {"bf16", "fp32"}
        if is_wider and source.primitive_bitwidth < wanted.primitive_bitwidth:
            every = np.arange(1 << source.primitive_bitwidth).astype(before.handle.data.dtype)
            values = self._convert(every, source, wanted, None).view(np_dtype)
            return lambda data: values[data], self._like(result)
        return None, None

    def _new_axes(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        table: dict[Any, Any] = {}

        def getitem(self_: Any, slices: Any, **named: Any) -> Any:
            if type(slices) is not tuple or not self_.type.is_block():
                return plain(self_, slices, **named)
            places = tuple([each is None for each in slices])
            if not all(
                is_new or each == WHOLE for is_new, each in zip(places, slices, strict=True)
            ):
                return plain(self_, slices, **named)
            key = id(self_.type), places
            known = table.get(key)
            if known is None:
                result = plain(self_, slices, **named)
                table[key] = self_.type, self._like(result)[1:]
                return result
            handle = self_.handle
            return self._made(handle.data[slices], handle.dtype.scalar, *known[1])

        return getitem

    def _arange(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        table: dict[Any, Any] = {}

        def arange(start: Any, end: Any, **named: Any) -> Any:
            key = getattr(start, "value", start), getattr(end, "value", end)
            if key not in table:
                result = plain(start, end, **named)
                result.handle.data.flags.writeable = False
                table[key] = result.handle.data, *self._like(result)
            return self._made(*table[key])

        return arange

    def _loading(self, plain: Callable[..., Any]) -> Callable[..., Any]:
        table: dict[Any, Any] = {}

        def load(pointer: Any, mask: Any = None, other: Any = None, **named: Any) -> Any:
            other = other.value if type(other) is self._constexpr else other
            operands = self._operand(mask), self._operand(other)
            if None in operands:
                return plain(pointer, mask, other, **named)
            key = id(pointer.type), operands, *named.items()
            known = table.get(key)
            if known is None:
                result = plain(pointer, mask, other, **named)
                types = pointer.type, getattr(mask, "type", None), getattr(other, "type", None)
                table[key] = types, self._learn_load(pointer, mask, other, result)
                return result
            if known[1] is None:
                return plain(pointer, mask, other, **named)
            shape, is_there, instead, np_dtype, like = known[1]
            places = _of_shape(pointer.handle.data, shape)
            is_there = _of_shape(mask.handle.data, shape) if is_there is None else is_there
            instead = _of_shape(other.handle.data, shape) if instead is None else instead
            return self._made(self._load(places, is_there, instead, np_dtype), *like)

        return load

    def _operand(self, value: Any) -> Any:
        """Return what tells an operand from others of another effect; None if it is not known."""
        if type(value) is self._tensor:
            return id(value.type)
        if value is None or type(value) in (int, float):
            return type(value), value
        return None

    def _learn_load(self, pointer: Any, mask: Any, other: Any, result: Any) -> Any:
        """Return a load's shape, its mask and what stands for the masked where these are fixed."""
        if not pointer.dtype.is_ptr() or pointer.dtype.element_ty.name == "int1":
            return None
        if type(mask) in (int, float) or (mask is not None and mask.handle.data.dtype != bool):
            return None
        element = result.dtype
        shape, np_dtype = result.handle.data.shape, result.handle.data.dtype
        if np_dtype != self._np_dtype(element) or pointer.handle.get_element_ty() is not element:
            return None
        is_there = np.ones(shape, bool) if mask is None else None
        if other is None:
            instead = np.zeros(shape, np_dtype)
        elif type(other) is self._tensor:
            if other.dtype is not element:
                return None
            instead = None
        else:
            number = self._semantic.cast(self._semantic.to_tensor(other), element)
            instead = np.full(shape, number.handle.data, np_dtype)
        return shape, is_there, instead, np_dtype, self._like(result)


def _of_shape(data: Any, shape: tuple[int, ...]) -> Any:
    return data if data.shape == shape else np.broadcast_to(data, shape)
