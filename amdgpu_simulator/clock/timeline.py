"""How long work groups hold a compute unit: what their waves executed, played against the clock.

    timeline.play(record.groups[0], resident=2, target="gfx942")  # cycles until the last of two work groups ends

A wave issues in order. Its next instruction begins when four things are true: the instructions that compute its
operands are done, its unit is free, as few memory operations are under way as it waits for, and no older wave of the
SIMD takes its place. Each SIMD has a matrix and a vector unit; the compute unit has one unit for shared memory and one
for global memory. `cost` says how long an instruction holds a unit. The resident work groups are copies of one.

Not modelled: caches, other compute units, instruction fetch, and dependencies through scalar registers.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from heapq import heappop, heappush
from itertools import islice

from amdgpu_simulator.clock import cost
from amdgpu_simulator.clock.record import Executed


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Cycles from the moment when a unit has served an instruction until its result is there.

    memory: a load of global memory. Round number for the level-2 cache while all compute units ask it.
    constant: a scalar load. shared: an access of shared memory. Both are near measurements by others on an idle MI300X.
    matrix, vector: between two instructions of a wave, where the second needs the result of the first.
    """

    memory: int = 500
    constant: int = 200
    shared: int = 64
    matrix: int = 12
    vector: int = 4

    def result(self, unit: str) -> int:
        return self.matrix if unit == cost.MATRIX else self.vector if unit == cost.VECTOR else 0


class _Player:
    """A wave at its next instruction. time: when that may issue."""

    def __init__(self, trace: Sequence[Executed], simd: int, latencies: Latencies) -> None:
        self.trace = iter(trace)
        self.one = next(self.trace)
        self.time = 0.0
        self._simd = simd
        self._latencies = latencies
        self._ready: dict[int, tuple[float, str]] = {}  # by row of vector registers: when it is computed, by which unit
        self._queues: tuple[deque[float], ...] = (deque(), deque(), deque())  # when the operations under way end

    def begins(self, free: Mapping[tuple[str, int], float]) -> float:
        """When its next instruction can."""
        one = self.one
        begin = max(self.time, *(free.get(unit, 0) for unit in self._needs()))
        for row in one.reads:
            end, unit = self._ready.get(row, (0, ""))
            # A product that adds to the product before it need not wait for the result.
            chained = unit == one.unit == cost.MATRIX and row in one.writes
            begin = max(begin, end if chained else end + self._latencies.result(unit))
        for queue, left in zip(self._queues, one.left, strict=True):
            begin = max(begin, *islice(queue, max(0, len(queue) - left)), 0)
        return begin

    def _needs(self) -> tuple[tuple[str, int], ...]:
        """The units that its next instruction needs. Vector and matrix instructions of a SIMD issue one at a time."""
        unit = self.one.unit
        if unit == cost.MATRIX:
            return (cost.MATRIX, self._simd), (cost.VECTOR, self._simd)
        return ((unit, self._simd if unit == cost.VECTOR else 0),)

    def execute(self, begin: float, free: dict[tuple[str, int], float], issue: int) -> None:
        one, latencies = self.one, self._latencies
        end = begin + one.cycles
        self.time = begin + issue
        if one.unit:
            for unit in self._needs():
                free[unit] = end if unit[0] == one.unit else self.time
        else:
            self.time += issue * one.cycles
        for row in one.writes:
            self._ready[row] = end, one.unit
        more = latencies.memory, latencies.shared, latencies.constant
        for queue, left, latency in zip(self._queues, one.left, more, strict=True):
            while len(queue) > left:
                queue.popleft()
            if len(queue) < left:
                queue.append(end + latency)


def play(group: Sequence[Sequence[Executed]], resident: int, target: str, latencies: Latencies | None = None) -> float:
    """Cycles until `resident` copies of a work group are done that begin together on a compute unit.

    Raises ValueError where a wave waits at a barrier that another wave of its group never reaches.
    """
    rates = cost.rates(target)
    simds, issue = rates.simds, rates.passes
    size = len(group)
    waves = [
        _Player(trace, number % simds, latencies or Latencies()) for number, trace in enumerate([*group] * resident)
    ]
    free: dict[tuple[str, int], float] = {}
    parked: list[list[int]] = [[] for _ in range(resident)]
    coming = [(0.0, number) for number in range(len(waves))]  # when each begins at the earliest; the oldest first
    while coming:
        expected, number = heappop(coming)
        wave = waves[number]
        if (begin := wave.begins(free)) > expected:
            heappush(coming, (begin, number))
            continue
        wave.execute(begin, free, issue)
        if wave.one.unit == "end":
            continue
        go = [number]
        if wave.one.unit == "barrier":
            there = parked[number // size]
            there.append(number)
            go, parked[number // size] = (there, []) if len(there) == size else ([], there)
        for one in go:
            waves[one].one = next(waves[one].trace)
            waves[one].time = wave.time
            heappush(coming, (wave.time, one))
    if waiting := sum(map(len, parked)):
        raise ValueError(f"{waiting} of {len(waves)} waves wait at a barrier that others never come to")
    return max(wave.time for wave in waves)
