"""Makes Triton's interpreter several times as fast, with the same results.

Most of its time goes into the types of tensors, not into numbers: each sum makes shapes and types anew, looks for
constants in them and asks which of two types is the wider one. Here a type is made once, and operands of one type are
taken as they are. Without `debug`, nobody asks whether a sum of integers overflows. The language is patched where a
launch begins, and a call of a function in the kernel patches what is not patched yet.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from types import ModuleType

    import pytest


def patch(within: pytest.MonkeyPatch) -> None:
    """Patches the interpreter of this process."""
    from triton.language import core
    from triton.language.semantic import TritonSemantic
    from triton.runtime import interpreter

    builder = interpreter.interpreter_builder
    assert not builder.options.debug
    within.setattr(builder, "options", dataclasses.replace(builder.options, sanitize_overflow=False))
    within.setattr(interpreter, "_patch_lang", _patched_once(interpreter))
    within.setattr(interpreter, "_patch_attr", _with_semantic(interpreter, core.full.__code__))
    within.setattr(interpreter, "_get_np_dtype", _once_for_a_scalar(interpreter._get_np_dtype))
    within.setattr(core, "_unwrap_if_constexpr", _unwrap(core))
    within.setattr(core.block_type, "__init__", _once_for_a_type(core))
    within.setattr(core.tensor, "__init__", _shaped_by_type(core))
    within.setattr(TritonSemantic, "binary_op_type_checking_impl", _of_one_type(core, TritonSemantic))
    within.setattr(TritonSemantic, "broadcast_impl_value", _of_one_shape(TritonSemantic))
    within.setattr(TritonSemantic, "scalar_constant", _once_for_a_constant(TritonSemantic.scalar_constant))


def _patched_once(interpreter: ModuleType) -> Callable[..., object]:
    tl, real = interpreter.tl, interpreter._patch_lang

    @functools.cache
    def seen_by(function: Callable[..., object]) -> list[ModuleType]:
        return [module for module in (tl, tl.core) if any(value is module for value in function.__globals__.values())]

    def patch_lang(function: Callable[..., object]) -> object:
        fresh = any(tl.core.is_builtin(module.load) for module in seen_by(function))
        return real(function) if fresh else interpreter._LangPatchScope()

    return patch_lang


def _with_semantic(interpreter: ModuleType, wrapper: object) -> Callable[..., None]:
    """wrapper: the code of what a builtin function is wrapped in, which only asks whether `_semantic` is there."""

    def patch_attr(place: object, name: str, member: Any, _: object, scope: Any) -> None:
        inner = member.__wrapped__ if getattr(member, "__code__", None) is wrapper else member

        def call(*args: Any, **kwargs: Any) -> Any:
            kwargs["_semantic"] = interpreter.interpreter_semantic
            return inner(*args, **kwargs)

        scope.set_attr(place, name, call)

    return patch_attr


def _once_for_a_scalar(real: Callable[[Any], Any]) -> Callable[[Any], Any]:
    known: dict[str, Any] = {}

    def np_dtype(of: Any) -> Any:
        name = of.scalar.name
        if name not in known:
            known[name] = real(of)
        return known[name]

    return np_dtype


def _unwrap(core: ModuleType) -> Callable[[Any], Any]:
    real, constexpr = core._unwrap_if_constexpr, core.constexpr
    plain = frozenset({int, float, bool, str, type(None), core.tensor, core.dtype})

    def unwrap(value: Any) -> Any:
        kind = type(value)
        return value if kind in plain else value.value if kind is constexpr else real(value)

    return unwrap


def _once_for_a_type(core: ModuleType) -> Callable[..., None]:
    real, known = core.block_type.__init__, {}  # type: ignore[var-annotated]

    def init(self: Any, element_ty: Any, shape: Any) -> None:
        sizes = shape.values if type(shape) is core.tuple else shape
        key = (element_ty.name, *[size if type(size) is int else core._unwrap_if_constexpr(size) for size in sizes])
        if key not in known:
            real(self, element_ty, shape)
            known[key] = dict(self.__dict__)
        self.__dict__.update(known[key])
        self.element_ty = element_ty  # a pointer's name does not say where it points

    return init


def _shaped_by_type(core: ModuleType) -> Callable[..., None]:
    real, known = core.tensor.__init__, {}  # type: ignore[var-annotated]

    def init(self: Any, handle: Any, type: Any) -> None:  # noqa: A002 - Triton's name
        name = type.name
        if name not in known:
            real(self, handle, type)
            known[name] = self.shape, self.numel
        self.handle, self.type, self.dtype = handle, type, type.scalar
        self.shape, self.numel = known[name]

    return init


def _of_one_type(core: ModuleType, semantic: Any) -> Callable[..., tuple[Any, Any]]:
    real, tensor, known = semantic.binary_op_type_checking_impl, core.tensor, {}  # type: ignore[var-annotated]

    def operands(self: Any, lhs: Any, rhs: Any, *flags: bool) -> tuple[Any, Any]:
        """flags: the last of four says that it is a division or a remainder."""
        if type(lhs) is not tensor:
            return real(self, lhs, rhs, *flags)
        if type(rhs) is tensor:
            if len(flags) == 4 or lhs.dtype.name != rhs.dtype.name or lhs.dtype.is_ptr():
                return real(self, lhs, rhs, *flags)
            return (lhs, rhs) if lhs.type.name == rhs.type.name else self.broadcast_impl_value(lhs, rhs)
        key = (lhs.type.name, type(rhs), rhs or repr(rhs), flags)  # 0.0 equals -0.0
        if key in known:
            return lhs, known[key]
        left, right = real(self, lhs, rhs, *flags)
        if left is lhs and type(rhs) in (int, float):
            known[key] = right
        return left, right

    return operands


def _of_one_shape(semantic: Any) -> Callable[..., tuple[Any, Any]]:
    real = semantic.broadcast_impl_value

    def broadcast(self: Any, lhs: Any, rhs: Any) -> tuple[Any, Any]:
        one, other = lhs.type, rhs.type
        if one.is_block() and other.is_block() and one.shape.values == other.shape.values:
            return lhs, rhs
        return real(self, lhs, rhs)

    return broadcast


def _once_for_a_constant(real: Callable[..., Any]) -> Callable[..., Any]:
    known: dict[tuple[str, type, Any], Any] = {}

    def constant(self: Any, value: Any, dtype: Any) -> Any:
        key = (dtype.name, type(value), value or repr(value))  # 0.0 equals -0.0
        if key not in known:
            known[key] = real(self, value, dtype)
        return known[key]

    return constant
