"""A mask as a value: edges of ranges of keys, equality of ids, whole blocks."""

from __future__ import annotations

from dataclasses import dataclass, replace
from itertools import product
from typing import Any

from flash_attn.flex.terms import Term


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
