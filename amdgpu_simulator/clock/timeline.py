"""How long work groups hold a compute unit: what their waves executed, played again against the clock.

    program = timeline.Traced(assembly.parse(text))
    machine.launch(program, ...)
    timeline.play(program.groups[0], resident=2, kernel=program.kernel)  # cycles until the last of two groups ends

A wave issues in order. An instruction begins when what computes its operands is done, when its unit is free and when as
many loads are back as it waits for; of waves that could begin, the oldest does. Matrix and vector units are a SIMD's,
shared memory and the way to global memory a compute unit's; `cycles` says how long an instruction has one. Groups are
copies of one, in the order in which they would start. What is not there: caches (every load takes as long), other
compute units, the fetching of instructions, and scalar registers as operands.

Sources: AMD, "CDNA 3" white paper and instruction set guide, "RDNA Architecture". Latencies are round numbers, near
those that others measured on MI300X when nothing else was under way (shared memory, the level-2 cache).
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from heapq import heappop, heappush
from itertools import islice
from typing import NamedTuple

from amdgpu_simulator.clock import cycles
from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.machine import Step
from amdgpu_simulator.isa.wave import Wave, place, register

# Cycles until a load of global memory is back: a guess of what the level-2 cache takes while all compute units ask it.
LATENCY = 500
# Until those of constants and of shared memory are, once their units have had them.
_CONSTANT, _SHARED = 200, 64
# From the end of matrix and vector instructions to their results, and between two instructions of a wave.
_RESULT = {"matrix": 12, "vector": 4}


class Executed(NamedTuple):
    """An instruction that a wave executed: its unit ("" for none) and the cycles there; the rows of vector registers
    that it reads and writes; how many operations of global, shared and constant memory are under way behind it."""

    unit: str
    cycles: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    left: tuple[int, ...]


class Traced(cycles.Counted):
    """A program that keeps what its waves execute."""

    def __init__(self, kernel: Kernel) -> None:
        self._waves: dict[Wave, list[Executed]] = {}
        super().__init__(kernel)

    @property
    def groups(self) -> list[list[list[Executed]]]:
        """What each wave of each work group executed."""
        found: dict[int, list[tuple[int, list[Executed]]]] = {}
        for wave, trace in self._waves.items():
            found.setdefault(id(wave.shared), []).append((wave.index, trace))
        return [[trace for _, trace in sorted(waves, key=lambda one: one[0])] for waves in found.values()]

    def _decode(self, instruction: Instruction) -> Step:
        execute = super()._decode(instruction)
        name, counted = instruction.mnemonic, self.cycles
        unit = cycles.unit(name)
        where = "vector" if unit == "matrix" and self.kernel.wave == 32 else unit  # which RDNA multiplies on
        reads, writes = _registers(instruction)
        waits = int(instruction.operands[0]) if name == "s_nop" else 0

        def traced(wave: Wave) -> str | None:
            before = counted[unit]
            status = execute(wave)
            queues = wave.queues
            left = len(queues.vector), len(queues.shared), len(queues.scalar)
            one = Executed(status or where, counted[unit] - before or waits, reads, writes, left)
            self._waves.setdefault(wave, []).append(one)
            return status

        return traced


def _registers(instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of vector registers that an instruction reads and writes. A load writes none: its wave waits for it."""
    name = instruction.mnemonic
    rows = [_rows(text.strip("-|")) for text in instruction.operands]
    if not name.startswith("v_") or name.startswith(("v_cmp", "v_read")):
        return sum(rows, ()), ()
    accumulates = name.startswith(("v_fmac", "v_mac", "v_dot2c", "v_pk_fmac", "v_swap"))
    return sum(rows[0 if accumulates else 1 :], ()), rows[0]


def _rows(text: str) -> tuple[int, ...]:
    found = register(text)
    return tuple(range(place(text), place(text) + found[2])) if found and found[0] in "va" else ()


class _Player:
    """A wave at its next instruction. time: when that may issue; ready: when rows of vector registers are computed, and
    by which unit; queues: when the operations under way end."""

    def __init__(self, trace: Sequence[Executed], simd: int) -> None:
        self.trace = iter(trace)
        self.one = next(self.trace)
        self.simd = simd
        self.time = 0.0
        self._ready: dict[int, tuple[float, str]] = {}
        self._queues: tuple[deque[float], ...] = (deque(), deque(), deque())

    def begins(self, free: Mapping[tuple[str, int], float]) -> float:
        """When its next instruction can."""
        one = self.one
        begin = max(self.time, *(free.get(place, 0) for place in self.places()))
        for row in one.reads:
            end, unit = self._ready.get(row, (0, ""))
            # A sum of products goes on from the one before, for whose result it need not wait.
            chained = unit == one.unit == "matrix" and row in one.writes
            begin = max(begin, end if chained else end + _RESULT.get(unit, 0))
        for queue, left in zip(self._queues, one.left, strict=True):
            begin = max(begin, *islice(queue, max(0, len(queue) - left)), 0)
        return begin

    def places(self) -> tuple[tuple[str, int], ...]:
        """The units that its next instruction needs. Vector and matrix instructions of a SIMD issue one at a time."""
        unit = self.one.unit
        if unit == "matrix":
            return ("matrix", self.simd), ("vector", self.simd)
        return ((unit, self.simd if unit == "vector" else 0),)

    def execute(self, begin: float, free: dict[tuple[str, int], float], issue: int, latency: int) -> None:
        one = self.one
        end = begin + one.cycles
        self.time = begin + issue
        if one.unit:
            for place in self.places():
                free[place] = end if place[0] == one.unit else self.time
        else:
            self.time += issue * one.cycles
        for row in one.writes:
            self._ready[row] = end, one.unit
        for queue, left, more in zip(self._queues, one.left, (latency, _SHARED, _CONSTANT), strict=True):
            while len(queue) > left:
                queue.popleft()
            if len(queue) < left:
                queue.append(end + more)


def play(group: Sequence[Sequence[Executed]], resident: int, kernel: Kernel, latency: int = LATENCY) -> float:
    """Cycles until `resident` copies of a work group are done that a compute unit begins together."""
    simds, issue = cycles.simds(kernel.target), 4 if kernel.wave == 64 else 1
    size = len(group)
    waves = [_Player(trace, number % simds) for number, trace in enumerate([*group] * resident)]
    free: dict[tuple[str, int], float] = {}
    parked: list[list[int]] = [[] for _ in range(resident)]
    coming = [(0.0, number) for number in range(len(waves))]  # when each begins, at the earliest; the oldest first
    while coming:
        expected, number = heappop(coming)
        wave = waves[number]
        if (begin := wave.begins(free)) > expected:
            heappush(coming, (begin, number))
            continue
        wave.execute(begin, free, issue, latency)
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
