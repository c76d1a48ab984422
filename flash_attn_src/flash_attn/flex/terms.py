"""What a score_mod or mask_mod computes, as a term: the calls that it makes, recorded in one run."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch.overrides import TorchFunctionMode


class _Traced(threading.local):
    """What a thread traces now."""

    device: torch.device


_traced = _Traced()


class UntraceableError(Exception):
    """A function asks what no argument alone can tell, such as the truth of `q_idx > 2` in an `if`."""


class Term:
    """A number that a function computes from its arguments.

    call     the function that gives the number, or None for an argument
    args     what the call got: terms, tensors, numbers
    kwargs   the same for arguments with names
    names    the arguments on which the number depends: among b, h, q, kv and score
    tensors  what it is computed from
    key      two terms of one call with the same key compute the same
    """

    __slots__ = ("args", "call", "key", "kwargs", "names", "tensors")

    def __init__(self, call: Any, args: tuple[Any, ...] = (), kwargs: dict[str, Any] | None = None) -> None:
        self.call, self.args, self.kwargs = call, args, kwargs
        self.names: frozenset[str] = frozenset()
        self.tensors: tuple[torch.Tensor, ...] = ()
        keys = tuple(self._met(x) for x in args)
        self.key: Any = (
            (call, keys, tuple((name, self._met(x)) for name, x in kwargs.items())) if kwargs else (call, keys)
        )

    def _met(self, x: Any) -> Any:
        """The key of an argument, whose names and tensors become those of the term."""
        names, tensors, key = facts(x)
        self.names, self.tensors = self.names | names, self.tensors + tensors
        return key

    @property
    def device(self) -> torch.device:
        """That of the call whose functions are traced."""
        return _traced.device

    @property
    def is_argument(self) -> bool:
        """Whether it is an argument of the function itself."""
        return self.call is None

    @classmethod
    def __torch_function__(cls, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Term:
        return Term(func, tuple(args), kwargs)

    def __getattr__(self, name: str) -> Any:
        if name == "shape":
            return torch.Size(())
        if name.startswith("__") or not callable(getattr(torch.Tensor, name, None)):
            raise UntraceableError(f"it reads .{name} of a number")
        return lambda *args, **kwargs: Term(getattr(torch.Tensor, name), (self, *args), kwargs)

    def __bool__(self) -> bool:
        raise UntraceableError("it branches on a number that only a kernel knows")

    def __iter__(self) -> Iterator[Any]:
        raise UntraceableError("it iterates over a number")

    __int__ = __float__ = __index__ = __len__ = __bool__
    __hash__ = object.__hash__

    def __eq__(self, other: object) -> Term:  # type: ignore[override]
        return Term(torch.Tensor.eq, (self, other))

    def __ne__(self, other: object) -> Term:  # type: ignore[override]
        return Term(torch.Tensor.ne, (self, other))


def _operator(name: str) -> Callable[..., Term]:
    call = getattr(torch.Tensor, name)
    return lambda *args: Term(call, args)


_BINARY = ["add", "sub", "mul", "truediv", "floordiv", "mod", "pow", "and", "or", "xor", "lshift", "rshift"]
for _name in (*_BINARY, *(f"r{x}" for x in _BINARY), "lt", "le", "gt", "ge", "neg", "invert", "abs", "getitem"):
    setattr(Term, f"__{_name}__", _operator(f"__{_name}__"))


def facts(value: Any) -> tuple[frozenset[str], tuple[torch.Tensor, ...], Any]:
    """The names, tensors and key of a value: see `Term`.

    Raises UntraceableError for a constant of another kind than numbers, strings, types, devices and tensors.
    """
    if isinstance(value, Term):
        return value.names, value.tensors, value.key
    if isinstance(value, torch.Tensor):
        return _NONE, (value,), (torch.Tensor, id(value))
    if isinstance(value, (tuple, list)):
        whole = Term(type(value), tuple(value))
        return whole.names, whole.tensors, whole.key
    if value is None or isinstance(value, (bool, int, float, str, slice, torch.dtype, torch.device, type(...))):
        return _NONE, (), (type(value), repr(value) if isinstance(value, (float, slice)) else value)
    raise UntraceableError(f"it passes on a {type(value).__name__}")


_NONE: frozenset[str] = frozenset()


class _Indices(TorchFunctionMode):
    """Records `tensor[term]`, for which PyTorch does not ask the term."""

    def __torch_function__(self, func: Any, _types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.Tensor.__getitem__ and not isinstance(args[0], Term) and facts(args[1])[0]:
            return Term(func, tuple(args))
        return func(*args, **(kwargs or {}))


def trace(function: Callable[..., Any], names: tuple[str, ...], device: torch.device) -> Any:
    """What a function of these arguments gives: a term, or a value that depends on none.

    Raises UntraceableError for a function that cannot be written as a term.
    """
    _traced.device = device
    arguments = []
    for name in names:
        argument = Term(None)
        argument.names, argument.key = frozenset((name,)), name
        arguments.append(argument)
    try:
        with _Indices():
            return function(*arguments)
    except UntraceableError:
        raise
    except Exception as error:
        raise UntraceableError(f"{type(error).__name__}: {error}") from error
