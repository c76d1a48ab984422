"""What a score_mod or mask_mod computes, as a term: the calls that it makes, recorded in one run."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class UntraceableError(Exception):
    """A function asks what no argument alone can tell, such as the truth of `q_idx > 2` in an `if`."""


class Term:
    """A number that a function computes from its arguments.

    call    the function that gives the number, or None for an argument
    args    what the call got: terms, tensors, numbers
    kwargs  the same for arguments with names
    name    of an argument: b, h, q, kv or score
    device  the device of the arguments
    """

    def __init__(
        self, call: Any, args: tuple[Any, ...], kwargs: dict[str, Any], device: torch.device, name: str = ""
    ) -> None:
        self.call, self.args, self.kwargs, self.device, self.name = call, args, kwargs, device, name

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Term:
        return _record(func, args, kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return torch.Size(())
        if name.startswith("__") or not callable(getattr(torch.Tensor, name, None)):
            raise UntraceableError(f"it reads .{name} of a number")
        return lambda *args, **kwargs: _record(getattr(torch.Tensor, name), (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise UntraceableError("it branches on a number that only a kernel knows")

    def __iter__(self) -> Iterator[Any]:
        raise UntraceableError("it iterates over a number")

    __int__ = __float__ = __index__ = __len__ = __bool__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Term:  # type: ignore[override]
        return _record(torch.Tensor.eq, (self, other), {})

    def __ne__(self, other: object) -> Term:  # type: ignore[override]
        return _record(torch.Tensor.ne, (self, other), {})


def _operator(name: str) -> Callable[..., Term]:
    return lambda *args: _record(getattr(torch.Tensor, name), args, {})


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
for _name in (*_BINARY, *(f"r{x}" for x in _BINARY), "lt", "le", "gt", "ge", "neg", "invert", "abs", "getitem"):
    setattr(Term, f"__{_name}__", _operator(f"__{_name}__"))


def _record(call: Any, args: Any, kwargs: Any) -> Term:
    args, kwargs = tuple(args), kwargs or {}
    first = next(x for x in _leaves((args, kwargs)) if isinstance(x, Term))
    return Term(call, args, kwargs, first.device)


def _leaves(value: Any) -> Iterator[Any]:
    if isinstance(value, (tuple, list)):
        for x in value:
            yield from _leaves(x)
    elif isinstance(value, dict):
        yield from _leaves(tuple(value.values()))
    else:
        yield value


class _Indices(TorchFunctionMode):
    """Records `tensor[term]`, for which PyTorch does not ask the term."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if any(isinstance(x, Term) for x in _leaves((args, kwargs or {}))):
            return _record(func, args, kwargs)
        return func(*args, **(kwargs or {}))


def trace(function: Callable[..., Any], names: tuple[str, ...], device: torch.device) -> Any:
    """What a function of these arguments gives: a term, or a value that depends on none.

    Raises UntraceableError for a function that cannot be written as a term.
    """
    try:
        with _Indices():
            return function(*(Term(None, (), {}, device, name) for name in names))
    except UntraceableError:
        raise
    except Exception as error:
        raise UntraceableError(f"{type(error).__name__}: {error}") from error


def depends(value: Any) -> set[str]:
    """The names of the arguments on which a value depends."""
    if isinstance(value, Term):
        return {value.name} if value.call is None else depends((value.args, value.kwargs))
    names = (depends(x) for x in _leaves(value) if isinstance(x, Term))
    return set().union(*names)


def tensors(value: Any) -> list[torch.Tensor]:
    """The tensors that a value is computed from."""
    found: list[torch.Tensor] = []
    for x in _leaves(value):
        if isinstance(x, Term):
            found += tensors((x.args, x.kwargs))
        elif isinstance(x, torch.Tensor):
            found.append(x)
    return found


def key(value: Any) -> Any:
    """A key that two values share only if they compute the same, as long as their tensors live.

    Raises UntraceableError for a constant of another kind than numbers, strings, types, devices and tensors.
    """
    if isinstance(value, Term):
        return value.name or (value.call, key(value.args), key(value.kwargs))
    if isinstance(value, torch.Tensor):
        is_number = value.dim() == 0 and value.device.type == "cpu" and not value.requires_grad
        return (value.dtype, repr(value.item())) if is_number else (id(value), value._version)
    if isinstance(value, (tuple, list)):
        return tuple(key(x) for x in value)
    if isinstance(value, dict):
        return tuple((name, key(x)) for name, x in value.items())
    if value is None or isinstance(value, (bool, int, float, str, slice, torch.dtype, torch.device, type(...))):
        return type(value), repr(value) if isinstance(value, (float, slice)) else value
    raise UntraceableError(f"it passes on a {type(value).__name__}")
