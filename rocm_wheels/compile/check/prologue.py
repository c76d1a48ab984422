"""gfx1250: every kernel begins with a fixed sequence, because of an issue of the hardware.

The first access of a wave to memory must be in no clause, and its first vector instruction must be a safe one. LLVM
pull requests 208467, 209517, 210874 and 215450 (July and August 2026, after Triton 3.7.1's LLVM); rocm-libraries pull
request 10776 names the registers, which the hardware never sets when a wave starts.
"""

from __future__ import annotations

from rocm_wheels.compile.assembly_text import KernelText, code_of, kernel_texts
from rocm_wheels.compile.check import hazards

RULE = "gfx1250: a kernel begins with an access outside of a clause; LLVM pull requests 208467, 215450"
SEQUENCE = ("s_mov_b64 s[64:65], 0", "v_nop", "global_prefetch_b8 v0, s[64:65] scope:SCOPE_SE")


def begun(assembly: str, target: str) -> tuple[str, int]:
    """The text with the sequence at the start of each kernel of a target that needs it, and the number of kernels that
    lacked it. Raises ValueError as `hazards.of`.
    """
    if "entry" not in hazards.of(target):
        return assembly, 0
    lacking = [kernel for kernel in kernel_texts(assembly) if not _begins(kernel)]
    lines = assembly.split("\n")
    for number in sorted((kernel.lines[0][0] for kernel in lacking), reverse=True):
        lines[number:number] = [f"\t{code}" for code in SEQUENCE]
    return "\n".join(lines), len(lacking)


def _begins(kernel: KernelText) -> bool:
    return tuple(code_of(code).replace("\t", " ") for _, code in kernel.lines[: len(SEQUENCE)]) == SEQUENCE
