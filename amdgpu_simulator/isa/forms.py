"""Instruction forms, and the record of the forms that this process has executed.

A form is a mnemonic with the kinds of its operands and its modifiers: `v_add_f32 v,v,literal clamp`. If the variable
AMDGPU_SIMULATOR_FORMS names a file, each process adds its executed forms to the file.
"""

from __future__ import annotations

import atexit
import os
import re
from pathlib import Path

from amdgpu_simulator.isa.assembly import Instruction, Kernel
from amdgpu_simulator.isa.wave import register

VARIABLE = "AMDGPU_SIMULATOR_FORMS"
# Modifiers whose value does not change how the instruction is implemented.
_NUMBERS = {"offset", "offset0", "offset1", "row_mask", "bank_mask"}
_executed: dict[int, tuple[Kernel, bytearray]] = {}


def form(instruction: Instruction) -> str:
    """The form of an instruction. Its operands keep their sign modifiers (`-`, `|`)."""
    operands = ",".join(map(_operand, tuple(instruction.operands)))
    modifiers = " ".join(
        name if name in _NUMBERS or not value else f"{name}:{value}"
        for name, value in ((name, instruction.modifiers[name]) for name in instruction.modifiers)
    )
    return " ".join(filter(None, (instruction.mnemonic, operands, modifiers)))


def _operand(text: str) -> str:
    bare = re.sub(r"^(sext\()?-?\|?|\|?\)?$", "", text)
    if span := register(bare):
        if bare[0] not in "vas" or bare.startswith("vcc"):  # a named register: vcc, exec, m0, off
            return text
        return text.replace(bare, span[0] + (str(span[2]) if span[2] > 1 else ""))
    return "literal" if bare[:1].isdigit() or text[:1] == "-" else "other"


def note(kernel: Kernel) -> bytearray:
    """The array in which a program of the kernel marks executed instructions; written to the file when the process
    ends.
    """
    if not _executed:
        atexit.register(write)
    return _executed.setdefault(id(kernel), (kernel, bytearray(len(kernel.instructions))))[1]


def write() -> None:
    """Adds the executed forms of this process to the file."""
    forms = {
        form(part)
        for kernel, seen in _executed.values()
        for parts, done in zip(kernel.instructions, seen, strict=True)
        if done
        for part in parts
    }
    if path := os.environ.get(VARIABLE):
        with Path(path).open("a", encoding="utf-8") as file:
            file.writelines(f"{name}\n" for name in sorted(forms))
