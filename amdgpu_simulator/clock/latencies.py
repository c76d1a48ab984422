"""Latencies until a result arrives: one row per family of GPUs, with the reason for each number."""

from __future__ import annotations

from dataclasses import dataclass

from amdgpu_simulator.isa import targets


@dataclass(frozen=True, kw_only=True)
class Latencies:
    """Cycles from the end of an instruction in its unit until its result can be used.

    memory: a load that misses the first-level cache. cached: a load that hits it. constant: a scalar load. shared: an
    access of shared memory. matrix, vector: between two instructions of a wave, if the second one needs the result of
    the first one.
    """

    memory: int
    cached: int
    constant: int = 200
    shared: int
    matrix: int = 12
    vector: int

    def result(self, unit: str) -> int:
        return self.matrix if unit == "matrix" else self.vector if unit == "vector" else 0


# vector: a SIMD of CDNA takes four cycles for an instruction, and the next instruction of the wave can use its result.
# A SIMD of RDNA takes one cycle, and the result arrives four cycles later. memory, shared: from `python -m
# amdgpu_simulator calibrate`, which compares simulated cycles with hardware counters of MI300X. For RDNA no counters
# are published: its numbers are close to published measurements on an idle GPU. cached: close to published measurements
# on an idle GPU.
_CDNA = Latencies(memory=800, cached=200, shared=128, vector=0)
_RDNA = Latencies(memory=500, cached=150, shared=64, vector=4)


_OF = {"CDNA": _CDNA, "RDNA1": _RDNA, "RDNA2": _RDNA, "RDNA3": _RDNA, "RDNA4": _RDNA}


def latencies(target: str) -> Latencies:
    """The row of a target's generation. Raises ValueError for a target without a row."""
    generation = targets.get(target).generation.name
    if generation not in _OF:
        raise ValueError(f"the clock has no latencies for {generation}: add a row to clock/latencies.py")
    return _OF[generation]
