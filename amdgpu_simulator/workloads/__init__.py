"""Kernels that the clock measures, each with calls that run it: one module a source of kernels."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amdgpu_simulator.clock.record import Record

Programs = Callable[[int, bool], list[int]]


def every_tile(rows: int) -> Programs:
    """A work group a tile. With a causal mask the last rows go first, because they see the most keys."""

    def lengths(seqlen: int, causal: bool) -> list[int]:
        tiles = range(rows, seqlen + rows, rows)
        return [min(tile, seqlen) for tile in reversed(tiles)] if causal else [seqlen] * len(tiles)

    return lengths


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A kernel and the calls that run it.

    rows: rows of a work group, which has as many more products with each more key. For dk and dv the rows are keys, and
    what grows are the queries. entry: the kernel's entry in a manifest. run: makes the call with so many keys on the
    simulator. lengths: how many to measure with. operations: of matrices, for a row and a key that the mask keeps.
    programs: for the length of a sequence, and for a causal mask or none, the number of keys that each work group of a
    head would get in `run`, in the order in which they start.
    """

    target: str
    rows: int
    entry: dict[str, Any]
    run: Callable[[int], Record]
    programs: Programs
    operations: int
    lengths: tuple[int, int] = (256, 768)
