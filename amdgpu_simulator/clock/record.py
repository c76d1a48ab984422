"""What the waves of a launch executed, with its cost: an observer of `isa.machine`.

    record = Record(kernel)
    machine.launch(machine.Program(kernel, record), ...)
    record.cycles            # {"matrix": ..., "vector": ..., "shared": ..., "conflicts": ..., "memory": ...}
    record.groups[0][0]      # what the first wave of the first work group executed

`cycles` of `matrix` and `vector` are sums over waves, which share the SIMDs of a compute unit.
"""

from __future__ import annotations

from collections import defaultdict
from typing import NamedTuple

from amdgpu_simulator.clock import cost, registers
from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.events import Event


class Executed(NamedTuple):
    """An instruction that a wave executed.

    unit: the unit that it occupies, "end" or "barrier" if the wave stops, "branch" for a branch that is taken, "" for
    none. cycles: how long it occupies the unit; without a unit, the number of issue slots. reads, writes: the rows of
    vector registers, and on RDNA those of scalar registers (`registers`). left: the number of
    outstanding operations of global, shared and constant memory after it. lines: the cache lines that it accesses;
    private memory has negative numbers. loads: whether it reads these lines. priority: the wave's new priority, -1 if
    unchanged. path: cycles for which it occupies the path between shared memory and its pair of SIMDs.
    """

    unit: str
    cycles: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    left: tuple[int, int, int]
    lines: tuple[int, ...] = ()
    loads: bool = False
    priority: int = -1
    path: float = 0


class _Static(NamedTuple):
    """The static part of an instruction's cost. unit: the unit that it waits for."""

    cost: cost.Cost
    unit: str
    idle: int
    priority: int
    loads: bool
    reads: tuple[int, ...]
    writes: tuple[int, ...]


class Record:
    """Records what every wave executes, and sums the cycles of each unit."""

    def __init__(self, kernel: Kernel) -> None:
        self.kernel = kernel
        self.cycles: defaultdict[str, float] = defaultdict(float)
        self._groups: list[dict[int, list[Executed]]] = []
        self._static: dict[int, _Static] = {}
        rates = cost.rates(kernel.target)
        self._passes, self._rdna = rates.passes, rates.rdna

    def _branches(self, event: Event) -> bool:
        """Whether an instruction of RDNA continues somewhere else."""
        return self._rdna and event.wave.pc != event.place + 1

    @property
    def groups(self) -> list[list[list[Executed]]]:
        """The executed instructions of each wave of each work group, in the order of waves."""
        return [[trace for _, trace in sorted(waves.items())] for waves in self._groups]

    def begin(self) -> None:
        self._groups.append({})

    def step(self, event: Event) -> None:
        static = self._static.get(event.place)
        if static is None:
            parts = self.kernel.instructions[event.place]
            static = self._static[event.place] = _read(parts, self.kernel.target)
        taken = static.cost
        if taken.unit == cost.SHARED:
            taken = cost.shared(event.shared, self.kernel.target)
            self.cycles["conflicts"] += taken.conflicts
        lines: tuple[int, ...] = ()
        if taken.unit == cost.MEMORY:
            lines = cost.lines(event.memory)
            taken = cost.memory(lines, self.kernel.target)
        if taken.cycles:
            self.cycles[taken.unit] += taken.cycles
        if taken.unit == cost.TRANS:  # it holds the issue of vector instructions for a pass
            self.cycles[cost.VECTOR] += self._passes
        queues = event.wave.queues
        left = len(queues.vector), len(queues.shared), len(queues.scalar)
        unit = cost.BRANCH if self._branches(event) else static.unit
        executed = Executed(
            event.status or unit, taken.cycles or static.idle, static.reads, static.writes, left,
            lines, static.loads, static.priority, taken.path,
        )  # fmt: skip
        self._groups[-1].setdefault(event.wave.index, []).append(executed)


def _read(parts: tuple[Instruction, ...], target: str) -> _Static:
    taken = cost.fixed(parts, target)
    name = parts[0].mnemonic
    idle = int(parts[0].operands[0]) if name == "s_nop" else 0
    priority = int(parts[0].operands[0]) if name == "s_setprio" else -1
    touch = registers.all_rows if cost.rates(target).rdna else registers.vector_rows
    rows = [touch(part) for part in parts]
    reads = tuple(row for read, _ in rows for row in read)
    writes = tuple(row for _, written in rows for row in written)
    return _Static(taken, taken.unit, idle, priority, "load" in name, reads, writes)
