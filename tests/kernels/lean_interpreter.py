"""Triton's interpreter without what it does for nothing: the same bits in an eighth of the time.

A kernel in the interpreter spends its time on the types of its values, not on the values. They are
the same few types in all programs of all launches, so what follows from them is found out once.
"""

from __future__ import annotations

import functools
import importlib
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import Any

import pytest

from tests.kernels.lean_operators import LeanOperators

POINTER_BYTES = 8
MAX_NUMBERS = 1024  # blocks of one number each that are kept, of at most 64 KiB or so


def make_lean(patch: pytest.MonkeyPatch) -> None:
    """Patch Triton, which has to be imported with TRITON_INTERPRET=1."""
    interpreter = importlib.import_module("triton.runtime.interpreter")
    core = importlib.import_module("triton.language.core")
    language = importlib.import_module("triton.language")
    operators = LeanOperators(core, interpreter)
    _keep_patches(patch, interpreter, operators)
    _keep_types(patch, core, language)
    _keep_tests_of_types(patch, core.dtype)
    _unwrap_only_what_is_wrapped(patch, core)
    common, semantic = _CommonTypes(core, interpreter), interpreter.interpreter_semantic
    patch.setattr(semantic, "binary_op_type_checking_impl", common.check)
    patch.setattr(semantic, "broadcast_impl_value", common.broadcast)
    patch.setattr(semantic, "to_tensor", operators.to_tensor(semantic.to_tensor))


def _keep_patches(patch: pytest.MonkeyPatch, interpreter: Any, operators: LeanOperators) -> None:
    """Patch `triton.language` once for each function, not for each launch and each call.

    And do not look for overflows of every integer operation, whose result is dropped unless it
    debugs, nor build a table of all dtypes to look up one, nor copy a call's named arguments.
    """
    builder = interpreter.interpreter_builder
    options = replace(builder.options, sanitize_overflow=builder.options.debug)
    patch.setattr(builder, "options", options)
    patch.setattr(interpreter, "_patch_lang", functools.cache(interpreter._patch_lang))
    patch.setattr(interpreter._LangPatchScope, "restore", lambda scope: None)

    np_dtype_of, known = interpreter._get_np_dtype, {}

    def np_dtype(dtype: Any) -> Any:
        name = dtype.scalar.name
        if name not in known:
            known[name] = np_dtype_of(dtype)
        return known[name]

    patch.setattr(interpreter, "_get_np_dtype", np_dtype)

    def fits(array: Any, dtype: Any) -> bool:
        return array.itemsize <= (getattr(dtype, "itemsize", POINTER_BYTES) or 1)

    patch.setattr(interpreter, "_validate_np_data_size", fits)

    def patch_attr(obj: Any, name: str, member: Any, _: Any, scope: Any) -> None:
        call = getattr(member, "__wrapped__", member)  # without asking whether it has its semantic

        def interpreted(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return call(*args, **kwargs)

        scope.set_attr(obj, name, operators.faster(obj, name, interpreted))

    patch.setattr(interpreter, "_patch_attr", patch_attr)


def _keep_types(patch: pytest.MonkeyPatch, core: Any, language: Any) -> None:
    """Have one type for each dtype and shape of a block, and one shape of tensors for each type."""
    for name in ("block_type", "pointer_type"):
        made_once = _made_once(getattr(core, name), core._unwrap_if_constexpr)
        patch.setattr(core, name, made_once)
        patch.setattr(language, name, made_once)

    def init(tensor: Any, handle: Any, type: Any) -> None:
        known = type.__dict__.get("_of_tensors")
        if known is None:
            whole_init(tensor, handle, type)
            type._of_tensors = tensor.shape, tensor.numel, tensor.dtype
            return
        tensor.handle, tensor.type = handle, type
        tensor.shape, tensor.numel, tensor.dtype = known

    whole_init = core.tensor.__init__
    patch.setattr(core.tensor, "__init__", init)


def _made_once(plain: Any, unwrap: Callable[[Any], Any]) -> Any:
    """Return a type of types of which there is one object for each element's type and the rest."""
    objects: dict[Any, Any] = {}  # each keeps its element's type, whose id is in the key

    class OneOfAKind(type):
        def __call__(cls, element_ty: Any, *rest: Any, **named: Any) -> Any:
            has_shape = rest and isinstance(rest[0], Iterable)
            key = id(element_ty), *(map(unwrap, rest[0]) if has_shape else rest), *named.items()
            if key not in objects:
                objects[key] = super().__call__(element_ty, *rest, **named)
            return objects[key]

    kept = {"__eq__": plain.__eq__, "__hash__": plain.__hash__}
    return OneOfAKind(plain.__name__, (plain,), kept)


def _keep_tests_of_types(patch: pytest.MonkeyPatch, dtype: Any) -> None:
    """Answer what a type is without making the list of all types first."""
    groups = {
        "is_floating": dtype.FP_TYPES,
        "is_int": dtype.SINT_TYPES + dtype.UINT_TYPES,
        "is_int_signed": dtype.SINT_TYPES,
        "is_int_unsigned": dtype.UINT_TYPES,
    }
    for name, members in groups.items():
        patch.setattr(dtype, name, lambda self, members=frozenset(members): self.name in members)
    equal = dtype.__eq__
    patch.setattr(dtype, "__eq__", lambda self, other: self is other or equal(self, other))


def _unwrap_only_what_is_wrapped(patch: pytest.MonkeyPatch, core: Any) -> None:
    """Return numbers, tensors and types at once: in the interpreter, hardly anything is wrapped."""
    unwrap = core._unwrap_if_constexpr
    plain = {int, float, bool, str, type(None), core.tensor, core.dtype}
    patch.setattr(core, "_unwrap_if_constexpr", lambda o: o if type(o) in plain else unwrap(o))


class _CommonTypes:
    """The common type and shape of two operands, found once for each pair of types.

    A number among them becomes a block, which is kept for each type that the number meets. What is
    kept begins with the types whose ids are in its key.
    """

    def __init__(self, core: Any, interpreter: Any) -> None:
        self._tensor = core.tensor
        self._handle = interpreter.TensorHandle
        self._semantic = interpreter.interpreter_semantic
        self._check = self._semantic.binary_op_type_checking_impl
        self._broadcast = self._semantic.broadcast_impl_value
        self._dtypes: dict[Any, Any] = {}
        self._blocks: dict[Any, Any] = {}
        self._numbers: dict[Any, Any] = {}

    def check(self, lhs: Any, rhs: Any, *how: bool) -> tuple[Any, Any]:
        """Stand in for `binary_op_type_checking_impl`, which makes both operands of one type."""
        left_is_tensor = type(lhs) is self._tensor
        right_is_tensor = type(rhs) is self._tensor
        if left_is_tensor and type(rhs) in (int, float):
            return self._with_number(lhs, rhs, how)
        if right_is_tensor and type(lhs) in (int, float):
            return self._with_number(rhs, lhs, how, number_first=True)[::-1]
        if not (left_is_tensor and right_is_tensor):
            return self._check(lhs, rhs, *how)
        key = id(lhs.type), id(rhs.type), how
        if key not in self._dtypes:
            left, right = self._check(lhs, rhs, *how)
            self._dtypes[key] = lhs.type, rhs.type, left.dtype, right.dtype
            return left, right
        _, _, left_dtype, right_dtype = self._dtypes[key]
        return self.broadcast(self._cast(lhs, left_dtype), self._cast(rhs, right_dtype))

    def broadcast(self, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        """Stand in for `broadcast_impl_value`, which makes both operands of one shape."""
        if lhs.type is rhs.type:
            return lhs, rhs
        key = id(lhs.type), id(rhs.type)
        if key not in self._blocks:
            left, right = self._broadcast(lhs, rhs)
            self._blocks[key] = lhs.type, rhs.type, left.type, right.type
            return left, right
        _, _, left_type, right_type = self._blocks[key]
        return self._shape(lhs, left_type), self._shape(rhs, right_type)

    def _with_number(
        self, tensor: Any, number: float, how: tuple[bool, ...], number_first: bool = False
    ) -> tuple[Any, Any]:
        """Return the tensor first."""
        key = type(number), number, id(tensor.type), number_first, how
        if key not in self._numbers:
            if number_first:
                block, cast = self._check(number, tensor, *how)
            else:
                cast, block = self._check(tensor, number, *how)
            if len(self._numbers) >= MAX_NUMBERS:
                self._numbers.clear()
            block.handle.data.flags.writeable = False
            self._numbers[key] = tensor.type, cast.dtype, block.handle, block.type
            return cast, block
        _, dtype, handle, block_type = self._numbers[key]
        block = self._tensor(self._handle(handle.data, handle.dtype), block_type)
        return self._cast(tensor, dtype), block

    def _cast(self, tensor: Any, dtype: Any) -> Any:
        return tensor if tensor.dtype is dtype else self._semantic.cast(tensor, dtype)

    def _shape(self, tensor: Any, wanted: Any) -> Any:
        if tensor.type is wanted:
            return tensor
        builder = self._semantic.builder
        if tensor.type.is_block():
            handle = builder.create_broadcast(tensor.handle, wanted.shape.values)
        else:
            handle = builder.create_splat(wanted, tensor.handle)
        return self._tensor(handle, wanted)
