"""Latencies until a result arrives: one row per family of GPUs, with the reason for each number.

A target that `python -m amdgpu_simulator refit` was run for has its own values in measured.json.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any

from amdgpu_simulator.isa import targets


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Cycles from the end of an instruction in its unit until its result can be used.

    memory: a load that misses the first-level cache. cached: a load that hits it. constant: a scalar load. shared: an
    access of shared memory. matrix, vector, trans, scalar: between two instructions of a wave, if the second one needs
    the result of the first one. operand: the same, from a vector or matrix unit to an address or data of shared or
    global memory. to_scalar: the same, from a vector unit to a scalar instruction or a branch. barrier: from the last
    wave's arrival until the waves go on. branch: from a taken branch to the next instruction.
    """

    memory: int
    cached: int
    constant: int = 200
    shared: int
    matrix: int
    vector: int
    trans: int = 0
    scalar: int = 0
    operand: int = 0
    to_scalar: int = 0
    barrier: int = 0
    branch: int = 0

    def result(self, unit: str, reader: str = "") -> int:
        """unit, reader: the units of the instruction that computes a value and of the one that needs it."""
        if reader in _MEMORIES and unit in _VECTORS:
            return max(self.operand, self._of(unit))
        if reader in _SCALARS and unit in _VECTORS:
            return self.to_scalar
        return self._of(unit)

    def _of(self, unit: str) -> int:
        return getattr(self, unit) if unit in _RESULTS else 0


_RESULTS = ("matrix", "vector", "trans", "scalar")
_VECTORS, _MEMORIES, _SCALARS = ("vector", "trans", "matrix"), ("shared", "memory"), ("scalar", "branch", "")

# vector: a SIMD of CDNA takes four cycles for an instruction, and the next instruction of the wave can use its result.
# shared: fitted to twelve latencies of LDS: thread traces of gfx950 (`python -m amdgpu_simulator traces`) and gcnasm's
# microbenchmarks of MI308X (`ubench` at its README). memory, cached: gcnasm's chains of loads, 622 and 100 cycles with
# the 20 that the clock spends on an instruction of the chain. barrier: RDNA 3's 13, rounded up to the four cycles
# between two issues of a SIMD, because no public trace of CDNA has a barrier of several waves.
_CDNA = Latencies(memory=602, cached=80, shared=34, matrix=12, vector=0, barrier=16)
# `python -m amdgpu_simulator traces` prints what thread traces of gfx1100 and gfx1200 say about shared, vector, scalar,
# operand, to_scalar, barrier and branch. trans: LLVM's model of the scheduler, ten cycles with the four in the unit.
# memory, cached: fitted (`python -m amdgpu_simulator published`). RDNA 1 and 2 have no trace: they have RDNA 3's row.
_RDNA3 = Latencies(
    memory=300, cached=100, shared=30, matrix=4, vector=4, trans=6, scalar=1, operand=17, to_scalar=16, barrier=13,
    branch=8,
)  # fmt: skip
_RDNA4 = replace(_RDNA3, scalar=8, barrier=11)

_OF = {"CDNA": _CDNA, "RDNA1": _RDNA3, "RDNA2": _RDNA3, "RDNA3": _RDNA3, "RDNA4": _RDNA4}


# target -> {"gpu", "date", "ghz", "hip", "driver", "wheel", "latencies": {name: cycles}}, measured on hardware.
MEASURED = Path(__file__).with_name("measured.json")


@cache
def measured() -> dict[str, Any]:
    """The content of measured.json."""
    content: dict[str, Any] = json.loads(MEASURED.read_text(encoding="utf-8"))
    return content


def merge(target: str, row: dict[str, Any]) -> None:
    """Writes a target's row into measured.json."""
    MEASURED.write_text(json.dumps(measured() | {target: row}, indent=1, sort_keys=True) + "\n", encoding="utf-8")
    measured.cache_clear()


def latencies(target: str) -> Latencies:
    """The row of a target's generation, with what was measured on the target. Raises ValueError for a target without a
    row.
    """
    generation = targets.get(target).generation.name
    if generation not in _OF:
        raise ValueError(f"the clock has no latencies for {generation}: add a row to clock/latencies.py")
    return replace(_OF[generation], **measured().get(target, {}).get("latencies", {}))
