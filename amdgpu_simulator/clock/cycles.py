"""The cycles that a kernel's instructions take of each unit of a compute unit, counted while it runs.

    program = cycles.Counted(assembly.parse(text))
    machine.launch(program, ...)
    program.cycles  # {"matrix": ..., "vector": ..., "shared": ..., "conflicts": ..., "memory": ...}

`matrix` and `vector` are sums over waves, which share out a compute unit's SIMDs; `shared` and `memory` are one unit's.
A bank of shared memory gives a word in a cycle: where the lanes of an instruction want more words of one bank than of
the others, `shared` is what that one takes, in whatever order the hardware serves them, and `conflicts` how much of it
other banks would have spared. Lines of global memory count with each instruction that touches them, all as found in
the cache.

Sources: AMD, "CDNA 3" and "CDNA 4" white papers (operations a cycle, banks of shared memory), "RDNA Architecture"; for
transcendentals and integer products, a quarter of the rate, the instruction set guides.
"""

from __future__ import annotations

import re
from collections import defaultdict

import numpy as np

from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.machine import Program, Step
from amdgpu_simulator.isa.wave import Array, Wave

_MATRIX = re.compile(r"v_(?:mfma|wmma)_\w+?_(\d+)x(\d+)x(\d+)_?(\w+)")
_SLOW = re.compile(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_|v_mul_(lo|hi)_|v_mad_u64")

# Bytes of global memory that come in a cycle, and lanes whose addresses are taken.
LINE, LANES = 64, 4

# Operations on 16 bits that the matrix unit of a SIMD does in a cycle; on 8 bits twice as many from gfx942 on, and on
# 32 bits what the second number says.
_RATES = {"gfx90a": (256, 64), "gfx942": (512, 64), "gfx950": (1024, 64), "gfx11": (256, 0), "gfx12": (512, 0)}


def simds(target: str) -> int:
    """SIMDs of a compute unit: of a CU of CDNA, of half a work group processor of RDNA."""
    return 4 if target.startswith("gfx9") else 2


def banks(target: str) -> int:
    """Banks of shared memory, of four bytes each."""
    return 64 if target == "gfx950" else 32


class Counted(Program):
    """A program that adds up what it takes."""

    def __init__(self, kernel: Kernel) -> None:
        self.cycles: defaultdict[str, float] = defaultdict(float)
        super().__init__(kernel)

    def _decode(self, instruction: Instruction) -> Step:
        execute = super()._decode(instruction)
        name, cycles, target = instruction.mnemonic, self.cycles, self.kernel.target
        where = unit(name)
        if where == "shared":

            def shared(wave: Wave) -> str | None:
                touched: list[Array] = []
                wave.shared.watch = touched.append
                status = execute(wave)
                taken, least = accesses(touched, banks(target), wave.count)
                cycles["shared"] += taken
                cycles["conflicts"] += taken - least
                return status

            return shared
        if where == "memory":

            def memory(wave: Wave) -> str | None:
                lines: set[int] = set()
                wave.memory.watch = lambda addresses, size: lines.update(
                    *((addresses.astype(np.int64) + end) // LINE for end in (0, size - 1))
                )
                status = execute(wave)
                cycles["memory"] += max(len(lines), wave.count // LANES)
                return status

            return memory
        if not where:
            return execute
        takes = _alone(name, self.kernel)

        def counted(wave: Wave) -> str | None:
            cycles[where] += takes
            return execute(wave)

        return counted


def unit(name: str) -> str:
    """The unit that an instruction takes; "" for those that take none."""
    if name.startswith("ds_"):
        return "shared"
    if name.startswith(("buffer_", "global_", "flat_", "scratch_")):
        return "memory"
    if _MATRIX.match(name):
        return "matrix"
    return "vector" if name.startswith("v_") else ""


def accesses(touched: list[Array], count: int, lanes: int) -> tuple[int, int]:
    """The least cycles in which `count` banks give these bytes, whatever the order of lanes, and if the words were
    spread over all banks. An instruction that exchanges a word of each lane touches none."""
    if not touched:
        return -(-lanes // count), -(-lanes // count)
    words = np.unique(np.concatenate([places.ravel() for places in touched]) // 4)
    return int(np.bincount(words % count).max()), -(-len(words) // count)


def _alone(name: str, kernel: Kernel) -> float:
    """Cycles that a matrix or vector instruction takes, or its half of those that a pair of RDNA does."""
    if found := _MATRIX.match(name):
        rows, columns, depth = (int(found[group]) for group in (1, 2, 3))
        half, single = next(rates for prefix, rates in _RATES.items() if kernel.target.startswith(prefix))
        rate = single if found[4].startswith("f32") else 2 * half if "8" in found[4] else half
        return 2 * rows * columns * depth // rate
    if name.startswith("v_dual_"):
        return 0.5
    return (4 if _SLOW.match(name) else 1) * (4 if kernel.wave == 64 else 1)
