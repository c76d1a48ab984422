"""The values of a term, computed on the device at each call."""

from __future__ import annotations

import importlib
from typing import Any

import torch

from flash_attn.flex.terms import Term

_T = torch.Tensor
AXES = ("b", "h", "q", "kv")

# Calls that compute each element from the same elements, so that a term of them is computed for all places at once.
_NAMES = """
    abs add bitwise_and bitwise_not bitwise_or bitwise_xor bool ceil clamp clamp_max clamp_min cos div divide
    double eq exp exp2 expm1 float floor floor_divide fmod ge greater greater_equal gt int isfinite isinf isnan
    le less less_equal log log10 log1p log2 logical_and logical_not logical_or logical_xor long lt maximum
    minimum mul multiply ne neg negative not_equal pow reciprocal remainder round rsqrt sigmoid sign sin sqrt
    square sub subtract tanh true_divide trunc where masked_fill to __abs__ __add__ __and__ __eq__ __floordiv__
    __ge__ __gt__ __invert__ __le__ __lshift__ __lt__ __mod__ __mul__ __ne__ __neg__ __or__ __pow__ __radd__
    __rand__ __rfloordiv__ __rmod__ __rmul__ __ror__ __rpow__ __rshift__ __rsub__ __rtruediv__ __rxor__ __sub__
    __truediv__ __xor__
"""
_POINTWISE = {getattr(home, name) for home in (torch, _T) for name in _NAMES.split() if hasattr(home, name)}


def values(term: Any, places: dict[str, torch.Tensor], device: torch.device) -> torch.Tensor:
    """A term at places of its arguments, in four axes as they have, 1 for an axis on which it does not depend.

    places: argument -> integers in four axes, mostly along its own.
    """
    if isinstance(term, _T) and term.device == device:
        return term.view(1, 1, 1, 1)
    if isinstance(term, _T):  # a copy to the device would wait, and cannot be captured
        return torch.full((1, 1, 1, 1), term.item(), dtype=term.dtype, device=device)
    if not isinstance(term, Term):
        return torch.full((1, 1, 1, 1), term, device=device)
    if _is_pointwise(term, {}):
        x = _run(term, places, {}, device)
        return x.view((1,) * (4 - x.dim()) + tuple(x.shape))
    used = [name for name in AXES if name in term.names]

    def of_numbers(*numbers: torch.Tensor) -> Any:
        return _run(term, dict(zip(used, numbers, strict=True)), {}, None)

    function: Any = of_numbers
    for axis in reversed(range(len(AXES))):
        along = tuple(None if places[name].shape[axis] == 1 else 0 for name in used)
        if 0 in along:
            function = torch.vmap(function, in_dims=along)
    with _indexing_mode()():
        x = function(*(places[name].squeeze() for name in used))
    return x.view(torch.broadcast_shapes((1,) * len(AXES), *(places[name].shape for name in used)))


def _indexing_mode() -> Any:
    """The mode of PyTorch's eager FlexAttention, in which `tensor[index]` under vmap waits for nothing."""
    for home in ("torch._dynamo._trace_wrapped_higher_order_op", "torch._higher_order_ops.flex_attention"):
        mode = getattr(importlib.import_module(home), "TransformGetItemToIndex", None)
        if mode is not None:
            return mode
    raise NotImplementedError("this torch has no TransformGetItemToIndex")


def _is_pointwise(x: Any, known: dict[int, bool]) -> bool:
    """Whether a term, or what a term is called with, can be computed for all places at once."""
    if isinstance(x, (tuple, list)):
        return all(_is_pointwise(part, known) for part in x)
    if not isinstance(x, Term):
        return not isinstance(x, _T) or x.dim() == 0
    if id(x) not in known:
        known[id(x)] = x.is_argument or _is_pointwise_call(x, known)
    return known[id(x)]


def _is_pointwise_call(x: Term, known: dict[int, bool]) -> bool:
    if x.call is _T.__getitem__:
        table, index = _indexed(x)
        return (
            isinstance(table, _T)
            and table.dim() == len(index)
            and all(type(i) is int or (isinstance(i, Term) and _is_pointwise(i, known)) for i in index)
        )
    return x.call in _POINTWISE and _is_pointwise([*x.args, *(x.kwargs or {}).values()], known)


def _indexed(x: Any) -> tuple[Any, tuple[Any, ...]]:
    """The table and the index of `table[i]`, `table[i, j]` and `table[i][j]`."""
    index: tuple[Any, ...] = ()
    while isinstance(x, Term) and x.call is _T.__getitem__:
        inner = x.args[1]
        index = (*(inner if isinstance(inner, tuple) else (inner,)), *index)
        x = x.args[0]
    return x, index


def _run(x: Any, places: dict[str, torch.Tensor], done: dict[int, Any], device: torch.device | None) -> Any:
    """x at the places. device: where the places are, or None under vmap."""
    if isinstance(x, (tuple, list)):
        return type(x)(_run(part, places, done, device) for part in x)
    if not isinstance(x, Term):
        # A number on the device takes part in the choice of a type like the values of arguments.
        return x.view(1, 1, 1, 1) if isinstance(x, _T) and x.dim() == 0 and x.device == device else x
    if x.is_argument:
        return places[x.key]
    if id(x) not in done:
        if device is not None and x.call is _T.__getitem__:
            table, index = _indexed(x)
            arguments: list[Any] = [table, tuple(_run(i, places, done, device) for i in index)]
            if any(isinstance(i, _T) and i.dtype is torch.bool for i in arguments[1]):
                raise NotImplementedError("it takes a bool for an index")
        else:
            arguments = [_run(part, places, done, device) for part in x.args]
        named = {name: _run(part, places, done, device) for name, part in (x.kwargs or {}).items()}
        done[id(x)] = x.call(*arguments, **named)
    return done[id(x)]
