"""Kernels to measure, each with calls that run it: one module per kernel provider."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from amdgpu_simulator.clock.record import Record

Programs = Callable[[int, bool], list[int]]


def every_tile(rows: int) -> Programs:
    """One work group per tile. With a causal mask the last rows start first, because they see the most keys."""

    def lengths(seqlen: int, causal: bool) -> list[int]:
        tiles = range(rows, seqlen + rows, rows)
        return [min(tile, seqlen) for tile in reversed(tiles)] if causal else [seqlen] * len(tiles)

    return lengths


@dataclass(frozen=True, kw_only=True)
class Workload:
    """A kernel and the calls that run it.

    rows: rows of a work group (for dk and dv the rows are keys, and the length counts queries). entry: the kernel's
    manifest entry. run: runs a call of the given length on the simulator. lengths: the lengths to measure. operations:
    matrix operations per row and key that the mask keeps. programs: for a sequence length and a causal mask or none,
    the number of keys of each work group of a head, in the order in which they start.
    """

    target: str
    rows: int
    entry: dict[str, Any]
    run: Callable[[int], Record]
    programs: Programs
    operations: int
    lengths: tuple[int, int] = (256, 768)
