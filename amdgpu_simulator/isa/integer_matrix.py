"""WMMA of 8-bit integers. The bits of neg_lo say whether A and B are signed; a sum wraps at 32 bits."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.matrix import wmma_places
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import Wave, number, place, register

_NAME = "v_wmma_i32_16x16x16_iu8"


def decode(instruction: Instruction, target: Target) -> Callable[[Wave], None] | None:
    """The function that executes a WMMA of 8-bit integers, or None for another instruction."""
    if instruction.mnemonic != _NAME:
        return None
    if target.generation.matrix not in ("mirrored", "split"):
        raise NotImplementedError(f"{target.name} has no such instruction")
    destination, a, b, c = instruction.operands
    signs = instruction.modifiers.switches("neg_lo")
    read = [_operand(text, bool(signed), target) for text, signed in zip((a, b), signs, strict=False)]
    lanes, registers = wmma_places(target)
    first, accumulator = place(destination), place(c) if register(c) else None
    start = number(c) if accumulator is None else 0

    def execute(wave: Wave) -> None:
        total = start if accumulator is None else wave.v[accumulator + registers, lanes].astype(np.int64)
        left, right = (reader(wave) for reader in read)
        wave.v[first + registers, lanes] = (left @ right.T + total).astype(np.uint32)

    return execute


def _operand(text: str, signed: bool, target: Target) -> Callable[[Wave], Array]:
    """A or B as (16, 16) int64. On RDNA 3 both halves of a wave hold all 16 values of a row, on RDNA 4 eight each."""
    index, mirrored = place(text), target.generation.matrix == "mirrored"
    words, kind = 4 if mirrored else 2, np.int8 if signed else np.uint8

    def values(wave: Wave) -> Array:
        content = np.ascontiguousarray(wave.v[index : index + words].T).view(kind).astype(np.int64)
        if not mirrored:
            return content.reshape(2, 16, 8).transpose(1, 0, 2).reshape(16, 16)
        if not np.array_equal(content[:16], content[16:]):
            raise ValueError(f"{text}: the halves of the wave hold different operands")
        return content[:16]

    return values
