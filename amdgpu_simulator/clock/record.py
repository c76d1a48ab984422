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

from amdgpu_simulator.clock import cost
from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.events import Event
from amdgpu_simulator.isa.wave import place, register


class Executed(NamedTuple):
    """An instruction that a wave executed.

    unit: the unit that it occupies, "end" or "barrier" if the wave stops, "" for none. cycles: how long it occupies the
    unit; without a unit, the number of issue slots. reads, writes: the rows of vector registers. left: the number of
    outstanding operations of global, shared and constant memory after it. lines: the cache lines that it accesses;
    private memory has negative numbers. loads: whether it reads these lines. priority: the wave's new priority, -1 if
    unchanged.
    """

    unit: str
    cycles: float
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    left: tuple[int, int, int]
    lines: tuple[int, ...] = ()
    loads: bool = False
    priority: int = -1


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
        if taken.unit:
            self.cycles[taken.unit] += taken.cycles
        queues = event.wave.queues
        left = len(queues.vector), len(queues.shared), len(queues.scalar)
        one = Executed(
            event.status or static.unit, taken.cycles or static.idle, static.reads, static.writes, left,
            lines, static.loads, static.priority,
        )  # fmt: skip
        self._groups[-1].setdefault(event.wave.index, []).append(one)


def _read(parts: tuple[Instruction, ...], target: str) -> _Static:
    taken = cost.fixed(parts, target)
    # RDNA executes matrix products in its vector units.
    unit = cost.VECTOR if taken.unit == cost.MATRIX and cost.rates(target).lanes == 32 else taken.unit
    name = parts[0].mnemonic
    idle = int(parts[0].operands[0]) if name == "s_nop" else 0
    priority = int(parts[0].operands[0]) if name == "s_setprio" else -1
    registers = [_registers(part) for part in parts]
    reads = tuple(row for one, _ in registers for row in one)
    writes = tuple(row for _, one in registers for row in one)
    return _Static(taken, unit, idle, priority, "load" in name, reads, writes)


def _registers(instruction: Instruction) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Rows of vector registers that an instruction reads and writes. A load writes none here, because its wave waits
    for it.
    """
    name = instruction.mnemonic
    rows = [_rows(text.strip("-|")) for text in instruction.operands]
    if not name.startswith("v_") or name.startswith(("v_cmp", "v_read")):
        return sum(rows, ()), ()
    accumulates = name.startswith(("v_fmac", "v_mac", "v_dot2c", "v_pk_fmac", "v_swap", "v_dual_fmac"))
    return sum(rows[0 if accumulates else 1 :], ()), rows[0] if rows else ()


def _rows(text: str) -> tuple[int, ...]:
    found = register(text)
    return tuple(range(place(text), place(text) + found[2])) if found and found[0] in "va" else ()
