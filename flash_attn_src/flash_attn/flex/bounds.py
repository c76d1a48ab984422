"""A mask as bounds, read from the term of a mask_mod: ranges of keys for each query, equality of ids, whole blocks."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from itertools import product
from typing import Any

import torch

from flash_attn.flex.terms import Term

_T = torch.Tensor
# Above every place: a bound of this times a bool is open or shows nothing.
_FAR = 1 << 31


def _calls(*names: str) -> set[Any]:
    return {call for name in names for home in (_T, torch) if (call := getattr(home, name, None)) is not None}


_AND = _calls("__and__", "__rand__", "logical_and", "bitwise_and")
_OR = _calls("__or__", "__ror__", "logical_or", "bitwise_or")
_NOT = _calls("__invert__", "logical_not", "bitwise_not")
_LE = _calls("__le__", "le", "less_equal")
_LT = _calls("__lt__", "lt", "less")
_GE = _calls("__ge__", "ge", "greater_equal")
_GT = _calls("__gt__", "gt", "greater")
_EQ = _calls("__eq__", "eq")
_NE = _calls("__ne__", "ne", "not_equal")
_ADD = _calls("__add__", "__radd__", "add")
_SUBTRACT = _calls("__sub__", "sub", "subtract")
_SUBTRACT_FROM = _calls("__rsub__", "rsub")
_NEGATE = _calls("__neg__", "neg", "negative")
_MULTIPLY = _calls("__mul__", "__rmul__", "mul", "multiply")
_DIVIDE = _calls("__floordiv__", "floor_divide")
_REMAINDER = _calls("__mod__", "remainder")
_ABS = _calls("__abs__", "abs", "absolute")
_WRAPPERS = _calls("to", "bool")
_CONSTANTS = {_T.new_zeros: False, torch.zeros_like: False, _T.new_ones: True, torch.ones_like: True}


class UnboundedError(Exception):
    """A mask that no bounds describe."""


@dataclass(frozen=True)
class Linear:
    """kv * key + q * query + number + the sum of terms of the batch, the head and the query.

    terms: (factor, term) each, in a fixed order.
    """

    kv: int = 0
    q: int = 0
    number: int = 0
    terms: tuple[tuple[int, Term], ...] = ()

    def plus(self, other: Linear, factor: int = 1) -> Linear:
        """self + factor * other."""
        terms = {x.key: (count, x) for count, x in self.terms}
        for count, x in other.terms:
            terms[x.key] = terms.get(x.key, (0, x))[0] + factor * count, x
        return Linear(
            self.kv + factor * other.kv,
            self.q + factor * other.q,
            self.number + factor * other.number,
            tuple(entry for entry in terms.values() if entry[0]),
        )

    @property
    def rest(self) -> Linear:
        """The form without the key."""
        return replace(self, kv=0)

    def differs_by(self, other: Edge) -> int | None:
        """other - self if that is a number, else None."""
        if not isinstance(other, Linear):
            return None
        apart = other.plus(self, -1)
        return apart.number if apart == Linear(number=apart.number) else None


@dataclass(frozen=True)
class Extreme:
    """The least or the greatest of two edges."""

    is_least: bool
    first: Edge
    second: Edge


@dataclass(frozen=True)
class Quotient:
    """An edge divided by a positive number, rounded down."""

    edge: Linear
    by: int


Edge = Linear | Extreme | Quotient


def _extreme(first: Edge, second: Edge, *, is_least: bool) -> Edge:
    apart = first.differs_by(second) if isinstance(first, Linear) else None
    if apart is None:
        return Extreme(is_least, first, second)
    return second if (apart < 0) == is_least else first


@dataclass(frozen=True)
class Range:
    """Keys from `first` on, and before `stop`; None where open."""

    first: Edge | None = None
    stop: Edge | None = None

    def both(self, other: Range) -> Range:
        """The keys of both."""
        first = _joined(self.first, other.first, is_least=False)
        return Range(first, _joined(self.stop, other.stop, is_least=True))

    def either(self, other: Range) -> Range | None:
        """The keys of either, where both are open to the same side; else None."""
        if self.first is None and other.first is None:
            if self.stop is None or other.stop is None:
                return Range()
            return Range(None, _extreme(self.stop, other.stop, is_least=False))
        if self.stop is None and other.stop is None:
            if self.first is None or other.first is None:
                return Range()
            return Range(_extreme(self.first, other.first, is_least=True))
        return None


def _joined(first: Edge | None, second: Edge | None, *, is_least: bool) -> Edge | None:
    if first is None or second is None:
        return first if second is None else second
    return _extreme(first, second, is_least=is_least)


@dataclass(frozen=True)
class Bounds:
    """A key is visible if it is in a range, all ids are equal and its block is visible.

    ranges  at most two; none shows nothing
    ids     (term of the query, term of the key, or True for a key that must be true) each
    blocks  terms that are the same for all queries and keys of a block
    """

    ranges: tuple[Range, ...] = (Range(),)
    ids: tuple[tuple[Any, Term], ...] = ()
    blocks: tuple[Term, ...] = ()

    def both(self, other: Bounds) -> Bounds:
        """The keys of both."""
        ranges = tuple(a.both(b) for a, b in product(self.ranges, other.ranges))
        if len(ranges) > 2:
            raise UnboundedError("more than two ranges of keys")
        return Bounds(ranges, self.ids + other.ids, self.blocks + other.blocks)

    def either(self, other: Bounds) -> Bounds:
        """The keys of either."""
        if not self.ranges or not other.ranges:
            return self if self.ranges else other
        if self.ids or self.blocks or other.ids or other.blocks:
            raise UnboundedError("ids or blocks in an `or`")
        ranges = list(self.ranges)
        for added in other.ranges:
            for place, old in enumerate(ranges):
                merged = old.either(added)
                if merged is not None:
                    ranges[place] = merged
                    break
            else:
                ranges.append(added)
        if len(ranges) > 2:
            raise UnboundedError("more than two ranges of keys")
        return Bounds(tuple(ranges))

    def others(self) -> Bounds:
        """The keys that are not visible."""
        if self.ids or self.blocks:
            raise UnboundedError("a `not` of ids or blocks")
        bounds = Bounds()
        for keys in self.ranges:
            below = (Range(None, keys.first),) if keys.first is not None else ()
            above = (Range(keys.stop, None),) if keys.stop is not None else ()
            bounds = bounds.both(Bounds(below + above))
        return bounds


def bounds_of(term: Any, block_size: tuple[int, int]) -> Bounds:
    """The bounds of a traced mask_mod. UnboundedError for one that has none.

    block_size: (queries, keys) of a block, in which terms of `blocks` do not change.
    """
    if not isinstance(term, Term):
        return Bounds() if _is_true(term) else Bounds(())
    if term.call in _CONSTANTS:
        return Bounds() if _CONSTANTS[term.call] else Bounds(())
    if term.call in _WRAPPERS and "kv" in term.names:
        return bounds_of(term.args[0], block_size)
    if "kv" not in term.names:
        return Bounds((Range(None, Linear(terms=((_FAR, Term(_T.long, (Term(_T.bool, (term,)),))),))),))
    try:
        return _of_call(term, block_size)
    except UnboundedError:
        if term.names <= {"b", "h", "kv"}:
            return Bounds(ids=((True, term),))
        if _is_constant_in_blocks(term, block_size):
            return Bounds(blocks=(term,))
        raise


def _is_true(value: Any) -> bool:
    if not isinstance(value, bool):
        raise UnboundedError("a value that is no bool")
    return value


def _of_call(term: Term, block_size: tuple[int, int]) -> Bounds:
    call, args = term.call, term.args
    if term.kwargs:
        raise UnboundedError("named arguments")
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
    if isinstance(term, Term) and term.call in _AND:
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
            if side.call in _ABS:
                inner, limit = _linear(side.args[0]), _linear(other)
                if is_below:
                    return _below(inner.plus(limit, -1)).both(_below(Linear().plus(inner, -1).plus(limit, -1)))
                return _at_most(side.args[0], _negated(other)).either(_at_most(other, side.args[0]))
            if side.call in _DIVIDE and type(side.args[1]) is int and side.args[1] > 0:
                inner, limit, by = _linear(side.args[0]), _linear(other), side.args[1]
                scaled = Linear().plus(limit, by)
                if is_below:
                    return _below(inner.plus(scaled, -1).plus(Linear(number=by - 1), -1))
                return _below(scaled.plus(inner, -1))
    return _below(_linear(first).plus(_linear(second), -1))


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
        if isinstance(distance, Term) and distance.call in _ABS:
            (distance,) = distance.args
        if isinstance(distance, Term) and distance.call in _SUBTRACT and type(by) is int and not distance.kwargs:
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


def _linear(x: Any) -> Linear:
    if type(x) is int:
        return Linear(number=x)
    if not isinstance(x, Term):
        if isinstance(x, _T) and x.dim() == 0:
            _whole(x)
            return Linear(number=int(x.item())) if x.device.type == "cpu" else Linear(terms=((1, Term(_T.long, (x,))),))
        raise UnboundedError("a number that is not whole")
    if x.is_argument and x.key in ("q", "kv"):
        return Linear(kv=int(x.key == "kv"), q=int(x.key == "q"))
    if "kv" not in x.names and "q" not in x.names:
        return Linear(terms=((1, x),))
    if not x.kwargs:
        args = x.args
        if x.call in _ADD and len(args) == 2:
            return _linear(args[0]).plus(_linear(args[1]))
        if x.call in _SUBTRACT and len(args) == 2:
            return _linear(args[0]).plus(_linear(args[1]), -1)
        if x.call in _SUBTRACT_FROM:
            return _linear(args[1]).plus(_linear(args[0]), -1)
        if x.call in _NEGATE:
            return Linear().plus(_linear(args[0]), -1)
        if x.call in _MULTIPLY and int in (type(args[0]), type(args[1])):
            number, other = args if type(args[0]) is int else args[::-1]
            return Linear().plus(_linear(other), number)
    if "kv" not in x.names:
        return Linear(terms=((1, x),))
    raise UnboundedError("a key in another function")


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


def window_of(bounds: Bounds, seqlen_k: int) -> tuple[int | None, int | None] | None:
    """(left, right) if the ranges show keys i - left to i + right to query i, None where open; None for others."""
    if len(bounds.ranges) != 1:
        return None
    (keys,) = bounds.ranges
    first = _of_distance(keys.first, seqlen_k, is_least=False)
    stop = _of_distance(keys.stop, seqlen_k, is_least=True)
    if first is None or stop is None:
        return None
    return -first[0] if first else None, stop[0] - 1 if stop else None


def _of_distance(edge: Edge | None, seqlen_k: int, *, is_least: bool) -> tuple[int, ...] | None:
    """(n,) for the edge q + n, () for an open one, None for another one."""
    if isinstance(edge, Extreme) and edge.is_least == is_least:
        sides = [_of_distance(x, seqlen_k, is_least=is_least) for x in (edge.first, edge.second)]
        numbers = [n for side in sides if side is not None for n in side]
        return None if None in sides else tuple(numbers[:1]) if len(set(numbers)) <= 1 else None
    if edge is None:
        return ()
    if not isinstance(edge, Linear) or edge.terms or edge.q not in (0, 1):
        return None
    if edge.q == 1:
        return (edge.number,)
    is_open = edge.number >= seqlen_k if is_least else edge.number <= 0
    return () if is_open else None


def is_of_distance(x: Any) -> bool:
    """Whether x depends on the batch, the head and the distance of query and key alone."""
    if isinstance(x, (tuple, list)):
        return all(is_of_distance(part) for part in x)
    if not isinstance(x, Term) or x.names <= {"b", "h"}:
        return True
    try:
        form = _linear(x)
    except UnboundedError:
        return not x.is_argument and is_of_distance([*x.args, *(x.kwargs or {}).values()])
    return form.kv == -form.q and is_of_distance([term for _, term in form.terms])


def is_causal(bounds: Bounds) -> bool:
    """Whether no query sees a key behind its own place."""
    return all(_ends_at_query(keys.stop) for keys in bounds.ranges)


def _ends_at_query(edge: Edge | None) -> bool:
    if isinstance(edge, Extreme):
        return (any if edge.is_least else all)(_ends_at_query(x) for x in (edge.first, edge.second))
    return isinstance(edge, Linear) and edge.q == 1 and edge.number <= 1 and not edge.terms


def slopes_of(addend: Any, *, causal: bool) -> tuple[float, list[Any]] | None:
    """A factor and terms of the head whose product is `slope`, if the addend is -slope * |query - key|; else None.

    causal: no key behind a query is visible, so that the sign of the distance is known.
    """
    if not isinstance(addend, Term) or addend.kwargs:
        return None
    if addend.call in _NEGATE:
        inner = slopes_of(addend.args[0], causal=causal)
        return inner and (-inner[0], inner[1])
    if addend.call in _MULTIPLY:
        for distance, other in (addend.args, addend.args[::-1]):
            inner = slopes_of(distance, causal=causal)
            if inner is not None and isinstance(other, Term) and other.names == {"h"}:
                return inner[0], [*inner[1], other]
            if inner is not None and isinstance(other, (int, float)):
                return inner[0] * other, inner[1]
        return None
    is_absolute = addend.call in _ABS
    try:
        form = _linear(addend.args[0] if is_absolute else addend)
    except UnboundedError:
        return None
    if form not in (Linear(kv=1, q=-1), Linear(kv=-1, q=1)) or not (causal or is_absolute):
        return None
    return (-1.0 if is_absolute or form.kv < 0 else 1.0), []
