"""For how many cycles an instruction occupies its unit of a compute unit. Two tables and its addresses determine them.

A cycle is a cycle of the compute unit's clock. `matrix`, `vector`, `trans` (transcendentals) and `scalar` are units of
a SIMD; `shared` (LDS) and `memory` (the path to the first-level cache) serve the whole compute unit. A bank of shared
memory gives one word in a cycle. If the lanes of an instruction want more words from one bank than from the others, the
instruction takes as long as that bank needs. The cycles beyond an even spread over all banks are `conflicts`. Global
memory is charged for each line that an instruction touches.

Sources: AMD, "CDNA 3" and "CDNA 4" white papers (operations a cycle, banks of shared memory), "RDNA Architecture" and
the guides to RDNA 3 and 4 (caches); for transcendentals and integer products, a quarter of the rate, the instruction
set guides. For RDNA's other units and its wide integers, thread traces: `python -m amdgpu_simulator traces`.
"""

from __future__ import annotations

import functools
import re
from collections.abc import Collection
from dataclasses import dataclass, replace
from typing import NamedTuple

import numpy as np

from amdgpu_simulator.isa import targets
from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.wave import register

MATRIX, VECTOR, SHARED, MEMORY, NONE = "matrix", "vector", "shared", "memory", ""
UNITS = (MATRIX, VECTOR, SHARED, MEMORY)
# Only RDNA has these: a unit for transcendentals beside the vector unit, and a scalar unit in each SIMD. `branch` is a
# branch that is taken, `invalidate` empties the first-level cache.
TRANS, SCALAR, BRANCH, INVALIDATE = "trans", "scalar", "branch", "invalidate"

# Cache line size in bytes (throughput 1 line/cycle).
LINE = 64


@dataclass(frozen=True, kw_only=True)
class Rates:
    """The throughput of a compute unit of a target, per cycle.

    units: compute units that share a work group: two on RDNA, whose kernels run on a work group processor. simds: SIMDs
    of a compute unit. lanes: lanes of a wave. passes: cycles in which a SIMD issues all lanes of a wave. banks: banks
    of shared memory, four bytes wide. path: bytes per cycle between shared memory and a pair of SIMDs, 0 if the path
    never limits. by_8, by_16, by_32: operations of one SIMD's matrix unit on elements of 8, 16 and
    32 bits, 0 without a matrix unit. same_bank: additional cycles of a matrix product if two of its operands begin in
    one of the four banks of vector registers. addresses: lanes of a global access whose addresses are taken per cycle.
    cache: bytes of the first-level cache. fill: bytes per cycle from the
    next level if all compute units request data.
    """

    units: int = 1
    simds: int = 4
    lanes: int = 64
    passes: int = 4
    banks: int = 32
    path: int = 64
    by_8: int = 0
    by_16: int = 0
    by_32: int = 0
    same_bank: int = 0
    addresses: int = 4
    cache: int
    fill: float

    @property
    def rdna(self) -> bool:
        """Whether matrix products occupy the vector unit, and transcendentals have a unit of their own."""
        return self.lanes == 32


# addresses: fitted (`python -m amdgpu_simulator published`).
_RDNA = Rates(units=2, simds=2, lanes=32, passes=1, path=0, addresses=8, cache=32 << 10, fill=32)
# path: gcnasm's microbenchmarks of MI308X move 45 bytes per cycle with one wave, 16 bytes a lane, latency included.
# gfx950 has twice as many banks, so twice the path is assumed.
# The key is a target, or a generation if its targets have equal rates. Fill rates: the level-2 cache of a CDNA die
# gives 2048 bytes per cycle to 32 compute units of gfx950, 38 of gfx942 and 104 of gfx90a. The cache of a shader array
# of RDNA 1, 2 and 3 gives 256 bytes per cycle to ten and to eight compute units. RDNA 4 fills from its level-2 cache.
RATES = {
    "gfx950": Rates(banks=64, path=128, by_8=2048, by_16=1024, by_32=64, cache=32 << 10, fill=64),
    "gfx942": Rates(by_8=1024, by_16=512, by_32=64, cache=32 << 10, fill=54),
    # gfx908 has the row of gfx90a; its cycles were never compared with a measurement.
    **dict.fromkeys(("gfx908", "gfx90a"), Rates(by_8=256, by_16=256, by_32=64, cache=16 << 10, fill=20)),
    **dict.fromkeys(("RDNA1", "RDNA2"), replace(_RDNA, cache=16 << 10, fill=25)),
    # RDNA 3 multiplies INT8 as fast as 16 bits; RDNA 4 multiplies INT8 and FP8 twice as fast. AMD's GPUOpen, "Using the
    # Matrix Cores of AMD RDNA 4 architecture GPUs".
    # same_bank: measured on gfx1151, in a chain of products (llvm-project#204254).
    "RDNA3": replace(_RDNA, by_8=256, by_16=256, same_bank=2),
    "RDNA4": replace(_RDNA, by_8=1024, by_16=512),
}

_PRODUCT = re.compile(r"v_(?:s?mfmac?|wmma)_\w+?_(\d+)x(\d+)x(\d+)_?(\w+)")


class Row(NamedTuple):
    """A row of the instruction table: mnemonic prefix, unit, and cycles as a multiple of a plain vector instruction.

    0: the cycles depend on the shape or on the accessed memory.
    """

    pattern: str
    unit: str
    times: float


# The first matching row counts. An instruction without a row occupies no unit.
INSTRUCTIONS = (
    Row(r"ds_", SHARED, 0),
    Row(r"(buffer|global|flat|scratch)_", MEMORY, 0),
    Row(_PRODUCT.pattern, MATRIX, 0),
    Row(r"v_dual_", VECTOR, 0.5),  # half of a dual instruction
    Row(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", VECTOR, 4),
    Row(r"v_mul_(lo|hi)_|v_mad_u64", VECTOR, 4),
    Row(r"v_", VECTOR, 1),
)
# On RDNA these rows come first.
RDNA_INSTRUCTIONS = (
    Row(r"(buffer_gl0|global)_inv", INVALIDATE, 0),
    Row(r"v_(exp|log|rcp|rsq|sqrt|sin|cos)_", TRANS, 4),
    Row(r"v_(lshl|lshr|ashr)rev_[bi]64", VECTOR, 2),
    Row(r"v_mad_(co_)?[iu]64_", VECTOR, 4),
    Row(r"s_(wait|nop|delay|clause|barrier|set|send|sleep|endpgm|load|buffer|c?branch|inst_|trap)", NONE, 0),
    Row(r"s_", SCALAR, 1),
)


class Cost(NamedTuple):
    """The unit of an instruction and the cycles it occupies it.

    conflicts: the cycles that bank conflicts add. path: cycles for which its data occupies the path of its pair of
    SIMDs.
    """

    unit: str
    cycles: float
    conflicts: float = 0
    path: float = 0


@functools.cache
def rates(target: str) -> Rates:
    """The row of a target. Raises ValueError for a target without one."""
    row = RATES.get(target) or RATES.get(targets.get(target).generation.name)
    if row is None:
        raise ValueError(
            f"the clock has no rates for {target}: add a row to RATES in clock/cost.py, which has {', '.join(RATES)}"
        )
    return row


def fixed(parts: tuple[Instruction, ...], target: str) -> Cost:
    """The cost of instructions that issue together, without the part that depends on the memory that they access."""
    own, name = rates(target), parts[0].mnemonic
    rows = (*RDNA_INSTRUCTIONS, *INSTRUCTIONS) if own.rdna else INSTRUCTIONS
    row = next((row for row in rows if re.match(row.pattern, name)), Row("", NONE, 0))
    if row.unit == MATRIX:
        return Cost(MATRIX, _product(name, target) + own.same_bank * _in_one_bank(parts[0]))
    return Cost(row.unit, row.times * own.passes * len(parts))


def _in_one_bank(product: Instruction) -> bool:
    """Whether two of the operands A, B and C of a matrix product begin in the same bank of vector registers."""
    starts = [span[1] % 4 for text in product.operands[1:4] if (span := register(text)) and span[0] == "v"]
    return len(set(starts)) < len(starts)


def shared(touched: list[Array], target: str) -> Cost:
    """The minimum cycles in which the banks serve these bytes, for any order of lanes.

    An instruction that exchanges a word of each lane accesses no bytes and occupies all banks. On RDNA an instruction
    takes a cycle for each word of a lane, even if few lanes are active.
    """
    own = rates(target)
    if not touched:
        cost = Cost(SHARED, -(-own.lanes // own.banks))
    else:
        cost = _of_banks(np.concatenate([places.ravel() for places in touched]).astype(np.int32).tobytes(), own.banks)
    if own.rdna:
        words = sum(places.shape[-1] for places in touched) // 4
        return cost._replace(cycles=max(cost.cycles, words))
    return cost._replace(path=4 * own.banks * (cost.cycles - cost.conflicts) / own.path)


@functools.lru_cache(1 << 14)
def _of_banks(places: bytes, banks: int) -> Cost:
    """`shared` for addresses as 32-bit numbers. Cached, because a loop repeats the same addresses."""
    words = np.unique(np.frombuffer(places, np.int32) // 4)
    taken, least = int(np.bincount(words % banks).max()), -(-len(words) // banks)
    return Cost(SHARED, taken, taken - least)


def memory(lines: Collection[int], target: str) -> Cost:
    """Cycles for the addresses of the lanes or for the cache lines, whichever is larger."""
    return Cost(MEMORY, max(len(lines), rates(target).lanes // rates(target).addresses))


def lines(touched: list[tuple[Array, int]]) -> tuple[int, ...]:
    """The numbers of the cache lines that the accesses touch."""
    numbers: set[int] = set()
    for addresses, size in touched:
        for end in (0, size - 1):
            numbers.update(((addresses.astype(np.int64) + end) // LINE).tolist())
    return tuple(sorted(numbers))


def _product(name: str, target: str) -> float:
    """Cycles of a matrix instruction."""
    match = _PRODUCT.match(name)
    assert match is not None
    rows, columns, depth = (int(match[group]) for group in (1, 2, 3))
    row, kind = rates(target), match[4]
    rate = row.by_32 if kind.startswith("f32") else row.by_8 if "8" in kind else row.by_16
    if not rate:
        raise ValueError(f"{name}: the clock has no rate for it on {target}; see RATES in clock/cost.py")
    return 2 * rows * columns * depth // rate
