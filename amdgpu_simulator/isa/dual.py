"""The VOPD hazard of GFX11: a dual instruction may read a VGPR before the last write to that VGPR has finished.

A dual instruction (VOPD) issues two operations, X and Y. On GFX11 the hazard exists if X and Y read VGPRs of the same
parity in the same source slot. Sources: LLVM pull request 220348; RDNA 3 instruction set guide, "Dual Issue VALU".

`flash_attn/kernels/vopd.py` has the same rule, because the wheels rewrite such pairs and do not ship the simulator. A
test compares the two, so neither can go wrong unnoticed.
"""

from __future__ import annotations

import re
from collections.abc import Sequence

from amdgpu_simulator.isa.assembly import Instruction

RULE = "VOPD: X and Y read VGPRs of the same parity in one source slot (LLVM pull request 220348)"
# The operations of GFX11's VOPD, with the slot that each operand is read in: 0 to 2, "-" for a literal and for a
# destination that is not read.
_SLOTS = {
    **dict.fromkeys(("dot2acc_f32_bf16", "dot2acc_f32_f16", "fmac_f32"), "201"),
    **dict.fromkeys(("add_f32", "max_f32", "min_f32", "mul_dx9_zero_f32", "mul_f32", "sub_f32", "subrev_f32"), "-01"),
    **dict.fromkeys(("add_nc_u32", "and_b32", "cndmask_b32", "lshlrev_b32"), "-01"),
    "fmaak_f32": "-01-",
    "fmamk_f32": "-0-2",
    "mov_b32": "-0",
}
_VGPR = re.compile(r"v(\d+)")


def conflict(parts: Sequence[Instruction]) -> str | None:
    """The first source slot in which the operations of a dual instruction have the hazard, such as SRC0, or None.

    Raises NotImplementedError for an operation that GFX11 does not have in a dual instruction.
    """
    first, second = map(_reads, parts)
    slots = (slot for slot in first if slot in second and (first[slot] - second[slot]) % 2 == 0)
    return next((f"SRC{slot}" for slot in slots), None)


def _reads(operation: Instruction) -> dict[str, int]:
    """Maps the source slots of an operation that hold a VGPR to the number of the VGPR."""
    slots = _SLOTS.get(operation.mnemonic.removeprefix("v_dual_"))
    if slots is None or len(slots) != len(operation.operands):
        raise NotImplementedError(f"{operation.text} is not an operation of a dual instruction on GFX11")
    registers = (_VGPR.fullmatch(operand) for operand in operation.operands)
    pairs = zip(slots, registers, strict=True)
    return {slot: int(register[1]) for slot, register in pairs if slot != "-" and register is not None}
