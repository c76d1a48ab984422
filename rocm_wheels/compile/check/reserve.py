"""A kernel reserves the vector registers that its code names, and no more.

With `waves_per_eu`, LLVM schedules for that number of waves and writes a descriptor that keeps more waves away: 257
registers for code that names 145. The hardware holds as many waves as the descriptor leaves room for. Of the two, only
the schedule is wanted, so the descriptor is rewritten.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Kernel

RULE = "the descriptor reserves vector registers that no instruction names"
# Instructions whose registers the text does not show: calls, and moves by an index.
_UNSEEN = re.compile(r"s_(swappc|call|setpc|set_gpr_idx)|v_movrel|s_setreg\w* hwreg\(HW_REG_GPR_ALLOC")


def exact(assembly: str, kernels: Sequence[Kernel], target: str) -> tuple[str, list[Kernel], int]:
    """The text and its kernels with exact descriptors, and the number of rewritten descriptors.

    Raises ValueError for a kernel that reserves more registers than the text shows and has registers that the text does
    not show.
    """
    exact_kernels, rewritten = [], 0
    for kernel in kernels:
        reserved, used = kernel.descriptor.get("next_free_vgpr", 0), named(kernel, target)
        if reserved > used:
            if unseen := next((op for op in kernel.instructions if _UNSEEN.match(op.text)), None):
                raise ValueError(
                    f"{kernel.symbol}: it reserves {reserved} vector registers and names {used}, and the registers of "
                    f"{unseen.text} are not in its text: compile it without waves_per_eu"
                )
            assembly = _described(assembly, kernel.symbol, used)
            kernel = replace(kernel, descriptor={**kernel.descriptor, "next_free_vgpr": used})
            rewritten += 1
        exact_kernels.append(kernel)
    return assembly, exact_kernels, rewritten


def named(kernel: Kernel, target: str) -> int:
    """The number for `next_free_vgpr` by the instructions: one more than the highest register.

    A wave starts with the numbers of its work items in up to three registers. From gfx90a on, accumulators count after
    `accum_offset`; earlier GPUs of CDNA have as many accumulators as vector registers; RDNA has none.
    """
    touched = 0
    for instruction in kernel.instructions:
        touched |= instruction.reads | instruction.writes
    touched &= isa.VGPRS
    start = 1 + kernel.descriptor.get("system_vgpr_workitem_id", 0)
    if sources.module("kernels.targets").get(target).family != "cdna":
        return max(touched.bit_length(), start)
    accumulators = (touched & isa.AGPRS) >> isa.FIRST_AGPR
    vectors = max((touched & ~isa.AGPRS).bit_length(), start)
    if "accum_offset" not in kernel.descriptor:
        return max(vectors, accumulators.bit_length())
    return kernel.descriptor["accum_offset"] + accumulators.bit_length() if accumulators else vectors


def _described(assembly: str, symbol: str, registers: int) -> str:
    """The text with another number of vector registers in the descriptor of a kernel."""
    start = assembly.index(f".amdhsa_kernel {symbol}\n")
    end = assembly.index(".end_amdhsa_kernel", start)
    described = re.sub(r"(\.amdhsa_next_free_vgpr[ \t]+)\d+", rf"\g<1>{registers}", assembly[start:end], count=1)
    return assembly[:start] + described + assembly[end:]
