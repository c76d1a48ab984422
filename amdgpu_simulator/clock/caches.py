"""Loads and stores to global memory: the first-level caches of the compute units and their fill bandwidth."""

from __future__ import annotations

from collections import OrderedDict

from amdgpu_simulator.clock.cost import LINE, Rates
from amdgpu_simulator.clock.latencies import Latencies
from amdgpu_simulator.clock.record import Executed


class Caches:
    """One cache per compute unit, with least-recently-used eviction.

    All caches share one path to the next level with a fixed number of bytes per cycle; stores use that path too. Only
    one work group is simulated; the others are assumed to hit the cache lines it loaded. On a GPU that is true for keys
    and values, which are most of what attention loads. Lines of private memory belong to one group.
    """

    def __init__(self, rates: Rates, latencies: Latencies, *, shared: bool = True) -> None:
        """shared: whether all work groups load the same lines."""
        self._shared = shared
        self._lines = rates.cache // LINE
        self._fill = rates.fill * rates.units
        self._latencies = latencies
        self._kept: list[OrderedDict[tuple[int, int], None]] = [OrderedDict() for _ in range(rates.units)]
        self._free = 0.0  # cycle at which the path to the next level is free

    def empty(self, unit: int) -> None:
        """Invalidates the lines of a compute unit."""
        self._kept[unit].clear()

    def serve(self, one: Executed, unit: int, group: int, begin: float, end: float) -> float:
        """Returns the cycle at which the data of an instruction has arrived.

        unit: the compute unit. begin, end: cycles in which the unit's path to the cache serves the instruction.
        """
        kept = self._kept[unit]
        missing = 0
        for line in one.lines:
            place = line, group if line < 0 or not self._shared else 0
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
