"""GFX12 hazard: after a vector instruction has read a scalar register, a later read may get the old value.

LLVM pull requests 100067 and 118750: once a VALU has read an SGPR, VALU and SALU see a later write to it only after
`s_wait_alu`: sa_sdst(0) for a write by SALU, va_sdst(0) for a write by VALU, va_vcc(0) for a write to VCC by VALU.
Registers count in pairs.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from rocm_wheels.compile.check import flow
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel

RULE = "GFX12: SGPR read by VALU, written again, read without s_wait_alu (LLVM pull requests 100067, 118750)"

_EVEN = sum(1 << isa.SCALARS + number for number in range(0, 108, 2))


# Pairs of registers that a VALU has read, and the registers of these pairs that SALU and VALU have written since.
State = flow.State


def findings(kernel: Kernel) -> list[Finding]:
    """The reads of a kernel that may get an old value on some path, in the order of the instructions."""
    return [
        Finding(kernel.symbol, index, RULE, f"{kernel.instructions[index].text}: without {wait}", 1, wait)
        for index, state in flow.before(kernel, (0, 0, 0), _after).items()
        for wait in _missing(kernel.instructions[index], state)
    ]


def _missing(op: Instruction, state: State) -> list[str]:
    if not op.kinds & (isa.VALU | isa.SALU):
        return []
    _, scalar, vector = state
    vector &= op.reads if op.kinds & isa.VALU else 0
    needs: Mapping[str, int] = {
        "depctr_sa_sdst(0)": scalar & op.reads,
        "depctr_va_sdst(0)": vector & ~isa.VCC,
        "depctr_va_vcc(0)": vector & isa.VCC,
    }
    return [f"s_wait_alu {wait}" for wait, registers in needs.items() if registers]


def _after(_: int, op: Instruction, state: State) -> State:
    read, scalar, vector = state
    if op.kinds & isa.SMEM or op.mnemonic.startswith(("buffer_", "image_")):
        return read, 0, 0  # these instructions wait for all scalar results
    if op.mnemonic == "s_wait_alu":
        scalar = 0 if _waits(op, "sa_sdst") else scalar
        vector &= isa.VCC if _waits(op, "va_sdst") else -1
        vector &= ~isa.VCC if _waits(op, "va_vcc") else -1
        return read, scalar, vector
    if op.kinds & isa.SALU:
        # SALU waits for VALU by itself: for all registers, or for VCC.
        used = op.reads & read
        vector &= isa.VCC if used & ~isa.VCC else -1
        vector &= ~isa.VCC if used & isa.VCC else -1
        written = op.writes & read
        return read, scalar | written, vector & ~(written & isa.VCC)
    if op.kinds & isa.VALU:
        written = op.writes & read
        return read | _pairs(op.reads), scalar & ~(written & isa.VCC), vector | written
    return state


def _waits(op: Instruction, counter: str) -> bool:
    return re.search(rf"\b(depctr_)?{counter}\(0\)", op.text) is not None


def _pairs(registers: int) -> int:
    """The registers of a set, each with the other register of its pair."""
    registers &= isa.SGPRS
    return registers | (registers & _EVEN) << 1 | (registers & ~_EVEN) >> 1
