"""Wait states around the matrix instructions of gfx90a, gfx94x and gfx950.

They grow with the passes of the first instruction. A pass is four cycles.
"""

from __future__ import annotations

import re
from collections.abc import Callable
from functools import cache

from rocm_wheels.compile.check import hazards
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Instruction

_SHAPE = re.compile(r"v_s?mfmac?_(?:scale_)?[a-z]+\d+_(\d+)x(\d+)x(\d+)_?(\w+)")
# Number of passes by the rows of a tile, up to gfx90a. Sources: LLVM's SISchedule.td; the MI100, MI200 and MI300
# guides.
_PASSES_90A = {4: 2, 16: 8, 32: 16}


@cache
def passes(mnemonic: str, target: str) -> int:
    """Number of passes of a matrix instruction. Raises ValueError for an instruction that is not in the table."""
    match = _SHAPE.match(mnemonic)
    if match is None or match[4].startswith("f64"):
        raise ValueError(f"{mnemonic}: the check has no passes for it on {target}")
    rows, depth, kind = int(match[1]), int(match[3]), match[4]
    if "gfx940" not in hazards.of(target):
        return _PASSES_90A[rows]
    if rows == 4:
        return 2
    if "f8f6f4" in kind:  # the slowest of its formats, FP8
        return 8 if rows == 16 else 16
    eight = "8" in kind and not kind.startswith("bf16")
    deep = depth >= (32 if eight else 16) if rows == 16 else depth >= (16 if eight else 8)
    deep = deep or ("xf32" in kind)
    return {16: 4, 32: 8}[rows] if deep else {16: 8, 32: 16}[rows]


def _is_xdl(mnemonic: str) -> bool:
    """Whether the matrix core executes the instruction. gfx94x executes fp32 products elsewhere, one wait state
    faster.
    """
    match = _SHAPE.match(mnemonic)
    return match is None or match[4] not in ("f32", "1k_f32")


def reads_accumulator(one: Instruction) -> int:
    """The registers of C of a matrix instruction."""
    return one.sources[2] & isa.VGPRS if one.kinds & isa.MFMA and len(one.sources) > 2 else 0


def distance(what: str) -> Callable[[Instruction, Instruction, str], int]:
    """The wait states that a use needs after a matrix instruction.

    what: how the result is used: "source" (A or B of another one), "accumulator", "use" (anything else) or "overwrite"
    of its accumulator. On gfx908, which has results only in accumulators: "read of gfx908", "write of gfx908",
    "overwrite of gfx908".
    """

    def need(first: Instruction, second: Instruction, target: str) -> int:
        count = passes(first.mnemonic, target)
        groups = hazards.of(target)
        new = "gfx940" in groups
        extra = int("gfx950" in groups and count != 2)
        xdl = _is_xdl(first.mnemonic)
        if what.endswith("gfx908"):
            return max(0, count + {"read": 2, "write": -1, "overwrite": -3}[what.split()[0]])
        if what == "overwrite":
            if new and not xdl:
                return 0
            return {2: 1, 4: 3, 8: 7}.get(count, 15)
        if what == "accumulator":
            # The hardware forwards the result to the same kind of instruction on exactly the same registers.
            if first.writes == reads_accumulator(second) and first.mnemonic == second.mnemonic:
                return 2 if new and count == 2 else 0
            if not new:
                return count
            if not xdl:
                return 0 if _is_xdl(second.mnemonic) else count
            return count + 1 + extra
        if not new:
            return count + 3
        return count + 3 + extra if xdl else count + 2

    return need
