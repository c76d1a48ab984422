"""The way of loads and stores to global memory: the first-level caches of the compute units, and what fills them."""

from __future__ import annotations

from collections import OrderedDict

from amdgpu_simulator.clock.cost import LINE, Rates
from amdgpu_simulator.clock.latencies import Latencies
from amdgpu_simulator.clock.record import Executed


class Caches:
    """One cache a compute unit, which keeps the lines that were loaded last. All fill from one way to the next level,
    at a fixed number of bytes a cycle; stores go that way too.

    Resident work groups are copies of one, so the lines of global memory that one loads are there for the others. On a
    GPU that holds for keys and values, which are most of what attention loads. Lines of private memory are each
    group's own.
    """

    def __init__(self, rates: Rates, latencies: Latencies) -> None:
        self._lines = rates.cache // LINE
        self._fill = rates.fill * rates.units
        self._latencies = latencies
        self._kept: list[OrderedDict[tuple[int, int], None]] = [OrderedDict() for _ in range(rates.units)]
        self._free = 0.0  # when the way to the next level is

    def serve(self, one: Executed, unit: int, group: int, begin: float, end: float) -> float:
        """When what an instruction asked for is there. unit: the compute unit; begin, end: when the unit's path to the
        cache serves the instruction."""
        kept = self._kept[unit]
        missing = 0
        for line in one.lines:
            place = line, group if line < 0 else 0
            if one.loads and place in kept:
                kept.move_to_end(place)
                continue
            missing += 1
            if one.loads:
                kept[place] = None
                if len(kept) > self._lines:
                    kept.popitem(last=False)
        if not missing:
            return end + self._latencies.cached
        self._free = max(self._free, begin) + missing * LINE / self._fill
        return max(end, self._free) + self._latencies.memory
