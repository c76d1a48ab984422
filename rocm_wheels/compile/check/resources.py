"""Registers that a kernel uses against its descriptor: registers beyond the allocation; M0 and VCC that are read before
a write.
"""

from __future__ import annotations

from collections.abc import Iterator

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Kernel


def findings(kernel: Kernel, target: str) -> list[str]:
    """The findings about the registers of a kernel."""
    return [f"{kernel.symbol}: {problem}" for problem in (*_beyond(kernel, target), *_unwritten(kernel))]


def _beyond(kernel: Kernel, target: str) -> Iterator[str]:
    """Uses of registers that the descriptor does not allocate.

    From gfx90a on, `next_free_vgpr` counts both kinds of registers, and accumulators start at `accum_offset`. Earlier
    GPUs have as many accumulators as vector registers.
    """
    described = kernel.descriptor
    if "next_free_vgpr" not in described:
        return
    vectors = described.get("accum_offset", described["next_free_vgpr"])
    accumulators = described["next_free_vgpr"] - vectors if "accum_offset" in described else vectors
    scalars = sources.module("kernels.targets").get(target).scalar_registers or described["next_free_sgpr"]
    for instruction in kernel.instructions:
        used = instruction.reads | instruction.writes
        if (used & isa.VGPRS & ~isa.AGPRS) >> vectors:
            yield f"{instruction.text}: a VGPR beyond the {vectors} of the kernel descriptor"
        if (used & isa.AGPRS) >> 256 + accumulators:
            yield f"{instruction.text}: an AGPR beyond the {accumulators} of the kernel descriptor"
        if used & isa.SGPRS & ~isa.VCC & -1 << isa.SCALARS + scalars:
            yield f"{instruction.text}: an SGPR beyond the {scalars} of the kernel descriptor"


def _unwritten(kernel: Kernel) -> Iterator[str]:
    """Reads of M0 or VCC without a write before them on every path. EXEC is set when a wave starts."""
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
        op = kernel.instructions[index]
        for name, registers in (("M0", isa.M0), ("VCC", isa.VCC)):
            if op.reads & registers & ~known and not known & registers:
                yield f"{op.text}: reads {name}, which nothing has written on a path to it"
