"""Reads a mask's bounds from the term of a mask_mod."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch

from flash_attn.flex.edges import Bounds, Linear, Quotient, Range, UnboundedError
from flash_attn.flex.terms import Term

_T = torch.Tensor
# Above every place: a bound of this times a bool is open or shows nothing.
_FAR = 1 << 31


def _calls(*names: str) -> set[Any]:
    return {call for name in names for home in (_T, torch) if (call := getattr(home, name, None)) is not None}


_LOGICAL = _calls("logical_and", "logical_or", "logical_not")
_AND = _calls("__and__", "__rand__", "logical_and", "bitwise_and")
_OR = _calls("__or__", "__ror__", "logical_or", "bitwise_or")
_NOT = _calls("__invert__", "logical_not", "bitwise_not")
_LE = _calls("__le__", "le", "less_equal")
_LT = _calls("__lt__", "lt", "less")
_GE = _calls("__ge__", "ge", "greater_equal")
_GT = _calls("__gt__", "gt", "greater")
_EQ = _calls("__eq__", "eq")
_NE = _calls("__ne__", "ne", "not_equal")
ADD = _calls("__add__", "__radd__", "add")
SUBTRACT = _calls("__sub__", "sub", "subtract")
_SUBTRACT_FROM = _calls("__rsub__", "rsub")
NEGATE = _calls("__neg__", "neg", "negative")
MULTIPLY = _calls("__mul__", "__rmul__", "mul", "multiply")
_DIVIDE = _calls("__floordiv__", "floor_divide")
_REMAINDER = _calls("__mod__", "remainder")
ABS = _calls("__abs__", "abs", "absolute")
_WRAPPERS = _calls("to", "bool")
_OF_BITS = _calls("__xor__", "__rxor__", "bitwise_xor") | (_AND | _OR | _NOT) - _LOGICAL
_OF_TRUTH = _calls("logical_xor", "isnan", "isinf", "isfinite") | _LOGICAL | _LE | _LT | _GE | _GT | _EQ | _NE
_CONSTANTS = {_T.new_zeros: False, torch.zeros_like: False, _T.new_ones: True, torch.ones_like: True}


def bounds_of(term: Any, block_size: tuple[int, int]) -> Bounds:
    """The bounds of a traced mask_mod. UnboundedError for one that has none.

    block_size: (queries, keys) of a block, in which terms of `blocks` do not change.
    """
    if not isinstance(term, Term):
        return Bounds() if _is_true(term) else Bounds(())
    if term.call in _CONSTANTS:
        return Bounds() if _CONSTANTS[term.call] else Bounds(())
    if term.call in _WRAPPERS and "kv" in term.names and _is_bool(term.args[0]):
        return bounds_of(term.args[0], block_size)
    is_true = Term(_T.bool, (term,))
    if "kv" not in term.names:
        return Bounds((Range(None, Linear(terms=((_FAR, Term(_T.long, (is_true,))),))),))
    try:
        return _of_call(term, block_size)
    except UnboundedError:
        if term.names <= {"b", "h", "kv"}:
            return Bounds(ids=((True, is_true),))
        if _is_constant_in_blocks(term, block_size):
            return Bounds(blocks=(is_true,))
        raise


def _is_bool(x: Any) -> bool:
    """Whether x is known to be a bool, so that its bit is a condition."""
    if not isinstance(x, Term):
        return isinstance(x, bool) or (isinstance(x, _T) and x.dtype is torch.bool)
    dtypes = [y for y in (*x.args, *(x.kwargs or {}).values()) if isinstance(y, torch.dtype)]
    if dtypes:
        return dtypes == [torch.bool] and (x.call is _T.to or x.call in _CONSTANTS)
    if x.call in (torch.where, _T.where):
        return all(map(_is_bool, x.args[1:] if x.call is torch.where else x.args[::2]))
    if x.call in _OF_BITS:
        return all(map(_is_bool, x.args))
    if x.call in (_T.__getitem__, _T.to, *_CONSTANTS):
        return _is_bool(x.args[0])
    return x.call in _OF_TRUTH or x.call is _T.bool


def _is_true(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UnboundedError("a value that is no bool")
    return value


def _of_call(term: Term, block_size: tuple[int, int]) -> Bounds:
    call, args = term.call, term.args
    if term.kwargs:
        raise UnboundedError("named arguments")
    if call in _OF_BITS and not _is_bool(term):
        raise UnboundedError("bits of numbers")
    if call in _AND:
        bounds = Bounds()
        for part in _with_equal_ids([*_parts(term)]):
            bounds = bounds.both(bounds_of(part, block_size))
        return bounds
    if call in _OR:
        return bounds_of(args[0], block_size).either(bounds_of(args[1], block_size))
    if call in _NOT:
        return bounds_of(args[0], block_size).others()
    for calls, compare in _COMPARISONS:
        if call in calls:
            return compare(*args)
    raise UnboundedError("another function")


def _parts(term: Any) -> Iterator[Any]:
    """The terms that an `and` joins."""
    if isinstance(term, Term) and term.call in _AND and (term.call in _LOGICAL or _is_bool(term)):
        for x in term.args:
            yield from _parts(x)
    else:
        yield term


def _with_equal_ids(parts: list[Any]) -> list[Any]:
    """The parts of an `and`, in which ids of a key that equal ids of its query are replaced by these.

    So `kv - offsets[document[kv]]` is a number less than kv, where document[q] == document[kv] holds beside it.
    """
    for place in range(len(parts)):
        part = parts[place]  # by now with the ids that parts before it made equal
        if isinstance(part, Term) and part.call in _EQ and not part.kwargs:
            of_query, of_key = _separated(*part.args)
            if of_query is not None and not isinstance(of_key, bool) and not of_key.is_argument:
                parts = [x if i == place else _replaced(x, of_key.key, of_query) for i, x in enumerate(parts)]
    return parts


def _replaced(x: Any, key: Any, other: Any) -> Any:
    if isinstance(x, (tuple, list)):
        return type(x)(_replaced(part, key, other) for part in x)
    if not isinstance(x, Term) or x.is_argument:
        return x
    if x.key == key:
        return other
    if x.call in _REMAINDER and Term(_T.__floordiv__, x.args).key == key:  # x % n is x - x // n * n
        return Term(_T.__sub__, (x.args[0], Term(_T.__mul__, (other, x.args[1]))))
    args = tuple(_replaced(part, key, other) for part in x.args)
    return x if all(a is b for a, b in zip(args, x.args, strict=True)) else Term(x.call, args, x.kwargs)


def _separated(first: Any, second: Any) -> tuple[Any, Any]:
    """(the side of the query, the side of the key) of a comparison of both; (None, None) for another one."""
    for of_query, of_key in ((first, second), (second, first)):
        names_q, names_k = (x.names if isinstance(x, Term) else frozenset() for x in (of_query, of_key))
        if "kv" not in names_q and "kv" in names_k and "q" not in names_k:
            return of_query, of_key
    return None, None


def _at_most(first: Any, second: Any) -> Bounds:
    """first <= second."""
    for side, other, is_below in ((first, second, True), (second, first, False)):
        if isinstance(side, Term) and "kv" in side.names and not side.kwargs:
            if side.call in ABS:
                inner, limit = linear(side.args[0]), linear(other)
                if is_below:
                    return _below(inner.plus(limit, -1)).both(_below(Linear().plus(inner, -1).plus(limit, -1)))
                return _at_most(side.args[0], _negated(other)).either(_at_most(other, side.args[0]))
            if side.call in _DIVIDE and type(side.args[1]) is int and side.args[1] > 0:
                inner, limit, by = linear(side.args[0]), linear(other), side.args[1]
                scaled = Linear().plus(limit, by)
                if is_below:
                    return _below(inner.plus(scaled, -1).plus(Linear(number=by - 1), -1))
                return _below(scaled.plus(inner, -1))
    return _below(linear(first).plus(linear(second), -1))


def _negated(x: Any) -> Any:
    return Term(_T.__neg__, (x,)) if isinstance(x, Term) else -x


def _below(form: Linear) -> Bounds:
    """form <= 0."""
    if form.kv == 0:
        raise UnboundedError("a comparison of the query alone")
    rest = form.rest
    if form.kv > 0:  # kv <= floor(-rest / form.kv)
        edge = Linear().plus(rest, -1)
        stop = edge.plus(Linear(number=1)) if form.kv == 1 else Quotient(edge.plus(Linear(number=form.kv)), form.kv)
        return Bounds((Range(None, stop),))
    first = rest if form.kv == -1 else Quotient(rest.plus(Linear(number=-form.kv - 1)), -form.kv)
    return Bounds((Range(first, None),))


def _equal(first: Any, second: Any) -> Bounds:
    try:
        return _at_most(first, second).both(_at_most(second, first))
    except UnboundedError:
        of_query, of_key = _separated(first, second)
        if of_key is None:
            of_query, of_key = _congruent(first, second)
        return Bounds(ids=((of_query, of_key),))


def _congruent(first: Any, second: Any) -> tuple[Any, Any]:
    """Ids that are equal where (q - kv) % n == 0 or (q - kv).abs() % n == 0. UnboundedError for another equality."""
    if (
        isinstance(first, Term)
        and first.call in _REMAINDER
        and not first.kwargs
        and type(second) is int
        and second == 0
    ):
        distance, by = first.args
        if isinstance(distance, Term) and distance.call in ABS:
            (distance,) = distance.args
        if isinstance(distance, Term) and distance.call in SUBTRACT and type(by) is int and not distance.kwargs:
            places = {x.key: x for x in distance.args if isinstance(x, Term) and x.is_argument}
            if places.keys() == {"q", "kv"}:
                return Term(_T.__mod__, (places["q"], by)), Term(_T.__mod__, (places["kv"], by))
    raise UnboundedError("an equality of more than ids")


_COMPARISONS: list[tuple[set[Any], Callable[[Any, Any], Bounds]]] = [
    (_LE, _at_most),
    (_GE, lambda first, second: _at_most(second, first)),
    (_LT, lambda first, second: _at_most(second, first).others()),
    (_GT, lambda first, second: _at_most(first, second).others()),
    (_EQ, _equal),
    (_NE, lambda first, second: _equal(first, second).others()),
]


def linear(x: Any) -> Linear:
    if type(x) is int:
        return Linear(number=x)
    if not isinstance(x, Term):
        if isinstance(x, _T) and x.dim() == 0:
            _whole(x)
            return Linear(number=int(x.item())) if x.device.type == "cpu" else Linear(terms=((1, Term(_T.long, (x,))),))
        raise UnboundedError("a number that is not whole")
    if x.is_argument and x.key in ("q", "kv"):
        return Linear(kv=int(x.key == "kv"), q=int(x.key == "q"))
    if "kv" not in x.names and not ("q" in x.names and _is_int64(x)):
        return Linear(terms=((1, x),))
    if not x.kwargs:
        args = x.args
        if x.call in ADD and len(args) == 2:
            return linear(args[0]).plus(linear(args[1]))
        if x.call in SUBTRACT and len(args) == 2:
            return linear(args[0]).plus(linear(args[1]), -1)
        if x.call in _SUBTRACT_FROM:
            return linear(args[1]).plus(linear(args[0]), -1)
        if x.call in NEGATE:
            return Linear().plus(linear(args[0]), -1)
        if x.call in MULTIPLY and int in (type(args[0]), type(args[1])):
            number, other = args if type(args[0]) is int else args[::-1]
            return Linear().plus(linear(other), number)
    if "kv" not in x.names:
        return Linear(terms=((1, x),))
    raise UnboundedError("a key in another function")


def _is_int64(x: Any) -> bool:
    """Whether a sum has a place in it, and so the places' type. A sum of values of a table may overflow in theirs."""
    is_sum = isinstance(x, Term) and x.call in (ADD | SUBTRACT | _SUBTRACT_FROM | NEGATE | MULTIPLY)
    return any(map(_is_int64, x.args)) if is_sum else isinstance(x, Term) and x.is_argument


def _whole(x: torch.Tensor) -> torch.Tensor:
    if x.is_floating_point() or x.is_complex():
        raise UnboundedError("a number that is not whole")
    return x


def _is_constant_in_blocks(x: Any, block_size: tuple[int, int]) -> bool:
    """Whether x is the same for all queries and keys of a block: it asks for `q // n` and `kv // n` alone."""
    if isinstance(x, (tuple, list)):
        return all(_is_constant_in_blocks(part, block_size) for part in x)
    if not isinstance(x, Term):
        return True
    if x.is_argument:
        return x.key not in ("q", "kv")
    if x.call in _DIVIDE and isinstance(x.args[0], Term) and x.args[0].is_argument and type(x.args[1]) is int:
        size = block_size[x.args[0].key == "kv"] if x.args[0].key in ("q", "kv") else 1
        if x.args[1] > 0 and x.args[1] % size == 0:
            return True
    return all(_is_constant_in_blocks(part, block_size) for part in [*x.args, *(x.kwargs or {}).values()])
