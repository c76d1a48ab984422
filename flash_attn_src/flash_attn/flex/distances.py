"""Masks and addends that depend on the distance of query and key: windows, causal masks, ALiBi."""

from __future__ import annotations

from typing import Any

from flash_attn.flex.bounds import ABS, MULTIPLY, NEGATE, linear
from flash_attn.flex.edges import Bounds, Edge, Extreme, Linear, UnboundedError
from flash_attn.flex.terms import Term


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
        form = linear(x)
    except UnboundedError:
        form = Linear(terms=((1, x),))
    terms = [term for _, term in form.terms]
    if any(term is x for term in terms):
        return is_of_distance([*x.args, *(x.kwargs or {}).values()])
    return form.kv == -form.q and is_of_distance(terms)


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
    if addend.call in NEGATE:
        inner = slopes_of(addend.args[0], causal=causal)
        return inner and (-inner[0], inner[1])
    if addend.call in MULTIPLY:
        for distance, other in (addend.args, addend.args[::-1]):
            inner = slopes_of(distance, causal=causal)
            if inner is not None and isinstance(other, Term) and other.names == {"h"}:
                return inner[0], [*inner[1], other]
            if inner is not None and isinstance(other, (int, float)):
                return inner[0] * other, inner[1]
        return None
    is_absolute = addend.call in ABS
    try:
        form = linear(addend.args[0] if is_absolute else addend)
    except UnboundedError:
        return None
    if form not in (Linear(kv=1, q=-1), Linear(kv=-1, q=1)) or not (causal or is_absolute):
        return None
    return (-1.0 if is_absolute or form.kv < 0 else 1.0), []
