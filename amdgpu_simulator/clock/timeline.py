"""For how many cycles work groups occupy a compute unit. The recorded instructions of their waves are scheduled on its
units.

    timeline.play(record.groups[0], resident=2, target="gfx942")  # cycles until the last of two work groups ends

A wave issues in order. Its next instruction begins when three things are true: the instructions that compute its
operands are done, as few memory operations are under way as it waits for, and its unit is free. Of waves that want one
unit at the same time, the one of the highest priority (s_setprio) goes first, then the oldest. Each SIMD has a matrix
and a vector unit; each compute unit has one unit for shared memory, one for global memory (`caches`), and on CDNA a
path between shared memory and each pair of SIMDs. On RDNA a SIMD
has a scalar unit and one for transcendentals too, and a matrix product occupies the vector unit. `cost` says how long
an instruction holds a unit, `latencies` how long its result takes. The resident work groups are copies of one. On RDNA
they share a work group processor, which is two compute units, and both kinds of memory share one path of each unit.

Not modelled: other compute units, instruction fetch, on CDNA dependencies through scalar registers, and the part of
shared memory's time that loads straight to shared memory take.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import cache
from heapq import heapify, heappop, heappush
from itertools import islice

from amdgpu_simulator.clock import cost
from amdgpu_simulator.clock.caches import Caches
from amdgpu_simulator.clock.cost import Rates
from amdgpu_simulator.clock.latencies import Latencies, latencies
from amdgpu_simulator.clock.record import Executed

Unit = tuple[str, int]
_PATH = "path"  # between shared memory and a pair of SIMDs


class _Player:
    """A wave at its next instruction. time: when the instruction may issue. priority: relative to other waves of its
    SIMD.
    """

    def __init__(self, trace: Sequence[Executed], simd: int, rates: Rates, group: int, start: float) -> None:
        # The units that an instruction of a unit needs.
        unit = simd // rates.simds  # the compute unit
        vector = (cost.VECTOR, simd)
        self._units: dict[str, tuple[Unit, ...]] = {
            cost.MATRIX: ((cost.MATRIX, simd), vector),
            cost.TRANS: ((cost.TRANS, simd), vector),
            cost.VECTOR: (vector,),
            cost.SCALAR: ((cost.SCALAR, simd),),
            cost.SHARED: ((cost.MEMORY, unit),) if rates.rdna else ((cost.SHARED, unit), (_PATH, simd // 2)),
            cost.MEMORY: ((cost.MEMORY, unit),),
        }
        self._rdna = rates.rdna
        self._all = trace
        self.group = group
        self._unit = unit
        self.restart(start)

    def restart(self, start: float) -> None:
        """Begins at the first instruction, as another wave."""
        self._trace = iter(self._all)
        self.one = next(self._trace)
        self.time = start
        self.priority = 0
        self._waits = -1.0  # cycle until which the next instruction waits for others of its wave, -1 if unknown
        self._ready: dict[int, tuple[float, str]] = {}  # row -> (cycle of the result, unit)
        self._queues: tuple[deque[float], ...] = (deque(), deque(), deque())  # ends of outstanding operations

    def proceed(self, time: float) -> None:
        self.one = next(self._trace)
        self.time = time
        self._waits = -1.0

    def begins(self, free: Mapping[Unit, float], result: Callable[[str, str], int]) -> float:
        """The cycle at which the next instruction can begin."""
        if self._waits < 0:
            self._waits = self._own_wait(result)
        begin = self._waits
        for unit in self._units.get(self.one.unit, ()):
            begin = max(begin, free.get(unit, 0))
        return begin

    def _own_wait(self, result: Callable[[str, str], int]) -> float:
        """The cycle at which the wave itself is ready: its operands are computed and its loads have arrived."""
        step, begin = self.one, self.time
        for row in step.reads:
            if row in self._ready:
                end, computed = self._ready[row]
                # An accumulating product need not wait for the result of the previous product.
                chained = computed == step.unit == cost.MATRIX and row in step.writes
                begin = max(begin, end if chained else end + result(computed, step.unit))
        for queue, left in zip(self._queues, step.left, strict=True):
            if len(queue) > left:
                begin = max(begin, *islice(queue, len(queue) - left))
        return begin

    def execute(self, begin: float, free: dict[Unit, float], issue: int, caches: Caches, result: Latencies) -> None:
        step = self.one
        end = begin + step.cycles
        self.time = begin + issue
        if step.priority >= 0:
            self.priority = step.priority
        if needs := self._units.get(step.unit):
            for unit in needs:
                # Instructions of other units hold the vector unit for their issue alone. RDNA multiplies in it.
                issues = unit[0] == cost.VECTOR != step.unit and not (self._rdna and step.unit == cost.MATRIX)
                free[unit] = self.time if issues else begin + step.path if unit[0] == _PATH else end
        elif step.unit == cost.BRANCH:
            self.time += result.branch
        elif step.unit == cost.INVALIDATE:
            caches.empty(self._unit)
        else:
            self.time += issue * step.cycles
        for row in step.writes:
            self._ready[row] = end, step.unit
        there = caches.serve(step, self._unit, self.group, begin, end) if step.unit == cost.MEMORY else end
        arrivals = there, max(end, begin + step.path) + result.shared, end + result.constant
        for queue, left, arrival in zip(self._queues, step.left, arrivals, strict=True):
            while len(queue) > left:
                queue.popleft()
            if len(queue) < left:
                queue.append(arrival)


def play(
    group: Sequence[Sequence[Executed]],
    resident: int,
    target: str,
    result: Latencies | None = None,
    *,
    apart: int = 0,
    fill: float | None = None,
    rounds: int = 1,
    units: int | None = None,
    issued: dict[int, list[float]] | None = None,
) -> float:
    """Cycles until `resident` copies of a work group have ended, if they start `apart` cycles after each other.

    fill: the bytes per cycle that a compute unit gets from memory, where the copies load different lines (default: they
    load the same lines, which come from the next cache). rounds: how many work groups run one after another in the
    place of each resident one. units: compute units that share the work groups, 1 for CU mode. issued: receives for
    each wave the cycles at which its instructions begin.

    Raises ValueError if a wave waits at a barrier that another wave of its group never reaches.
    """
    rates = cost.rates(target)
    if units is not None:
        rates = replace(rates, units=units)
    result = result or latencies(target)
    simds, size = rates.simds * rates.units, len(group)
    waves = [
        _Player(trace, number % simds, rates, number // size, float(apart * (number // size)))
        for number, trace in enumerate([*group] * resident)
    ]
    caches = Caches(rates if fill is None else replace(rates, fill=fill), result, shared=fill is None)
    free: dict[Unit, float] = {}
    delay = cache(result.result)
    parked: list[list[int]] = [[] for _ in range(resident)]
    running, ended = [size] * resident, 0  # waves of each resident work group; work groups that have ended
    ages, born = list(range(len(waves))), len(waves)
    # (earliest start of the next instruction, order among equals, age, wave) for each wave.
    coming = [(wave.time, 0, number, number) for number, wave in enumerate(waves)]
    heapify(coming)
    while coming:
        expected, _, _, number = heappop(coming)
        wave = waves[number]
        if (begin := wave.begins(free, delay)) > expected:
            heappush(coming, (begin, -wave.priority, ages[number], number))
            continue
        wave.execute(begin, free, rates.passes, caches, result)
        if issued is not None:
            issued.setdefault(number, []).append(begin)
        if wave.one.unit == "end":
            running[wave.group] -= 1
            if not running[wave.group]:
                ended += 1
                if ended + resident <= resident * rounds:
                    running[wave.group] = size
                    for member in range(wave.group * size, (wave.group + 1) * size):
                        waves[member].restart(wave.time)
                        ages[member] = born = born + 1
                        heappush(coming, (wave.time, 0, born, member))
            continue
        go, time = [number], wave.time
        if wave.one.unit == "barrier":
            there = parked[wave.group]
            there.append(number)
            go, parked[wave.group] = (there, []) if len(there) == size else ([], there)
            time += result.barrier
        for member in go:
            waves[member].proceed(time)
            heappush(coming, (time, -waves[member].priority, ages[member], member))
    if waiting := sum(map(len, parked)):
        raise ValueError(f"{waiting} of {len(waves)} waves wait at a barrier that others never come to")
    return max(wave.time for wave in waves)
