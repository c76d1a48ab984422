"""Registers that a kernel uses against its descriptor: registers beyond the allocation; M0 and VCC that are read before
a write.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Kernel


def findings(kernel: Kernel, target: str) -> list[str]:
    """The findings about the registers of a kernel."""
    return [f"{kernel.symbol}: {problem}" for problem in (*_beyond(kernel, target), *_unwritten(kernel))]


def _beyond(kernel: Kernel, target: str) -> Iterator[str]:
    """Uses of registers that the descriptor does not allocate.

    `next_free_vgpr` counts both kinds of registers from gfx90a on: accumulators start at `accum_offset`.
    """
    described = kernel.descriptor
    if "next_free_vgpr" not in described:
        return
    vectors = described.get("accum_offset", described["next_free_vgpr"])
    accumulators = described["next_free_vgpr"] - vectors
    if re.match(r"gfx9(06|08)", target):
        accumulators = vectors
    most = 512 + 106 if target.startswith("gfx1") else 512 + described["next_free_sgpr"]
    for one in kernel.instructions:
        used = one.reads | one.writes
        if (used & isa.VGPRS & ~isa.AGPRS) >> vectors:
            yield f"{one.text}: a VGPR beyond the {vectors} of the kernel descriptor"
        if (used & isa.AGPRS) >> 256 + accumulators:
            yield f"{one.text}: an AGPR beyond the {accumulators} of the kernel descriptor"
        if used & isa.SGPRS & ~isa.VCC & -1 << most:
            yield f"{one.text}: an SGPR beyond the {described['next_free_sgpr']} of the kernel descriptor"


def _unwritten(kernel: Kernel) -> Iterator[str]:
    """Reads of M0 and VCC that some path reaches without a write. EXEC is set when a wave starts."""
    watched = isa.M0 | isa.VCC
    written: dict[int, int] = {0: 0}
    work = [0] if kernel.instructions else []
    while work:
        index = work.pop()
        after = written[index] | kernel.instructions[index].writes & watched
        for at in kernel.followers[index]:
            merged = after & written.get(at, watched)
            if merged != written.get(at):
                written[at] = merged
                work.append(at)
    for index, known in sorted(written.items()):
        one = kernel.instructions[index]
        for name, registers in (("M0", isa.M0), ("VCC", isa.VCC)):
            if one.reads & registers & ~known and not known & registers:
                yield f"{one.text}: reads {name}, which nothing has written on a path to it"
