"""The MODE register of a wave: how its floating-point instructions round and treat subnormals.

A kernel starts with the values in its descriptor, or with LLVM's defaults ("Kernel Descriptor" in LLVM's guide to
AMDGPU). s_setreg_b32, s_setreg_imm32_b32, s_denorm_mode and s_round_mode change it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping

import numpy as np

from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.wave import Array, Wave, scalar

# First bits of the fields. A subnormal field has two bits: one keeps subnormal inputs, the other subnormal results. The
# fp32 field comes first, then the field of fp16 and fp64.
_ROUND, _SUBNORMALS, _DX10_CLAMP, _IEEE, _FP16_OVERFLOW = 0, 4, 8, 9, 23
_KEEPS_ALL = 0xF << _SUBNORMALS
# The bits that an instruction may change here: rounding, subnormals, FP16_OVFL. The simulator reads the other bits when
# it decodes the kernel, so they must not change later.
_WRITABLE = 0xFF | 1 << _FP16_OVERFLOW
_DEFAULTS = {
    "float_round_mode_32": 0,
    "float_round_mode_16_64": 0,
    "float_denorm_mode_32": 0,
    "float_denorm_mode_16_64": 3,
    "dx10_clamp": 1,
    "ieee_mode": 1,
    "fp16_overflow": 0,
}
_TINY = {"f": np.finfo(np.float32).tiny, "h": np.finfo(np.float16).tiny, "F": np.finfo(np.float64).tiny}


class Mode:
    """The MODE register.

    plain: whether arithmetic is numpy's, in which fp16 overflows to infinity and subnormals are kept.
    """

    def __init__(self, descriptor: Mapping[str, int]) -> None:
        """The initial value, from a kernel descriptor. Raises NotImplementedError unless it rounds to nearest even."""
        fields = _DEFAULTS | {name: value for name, value in descriptor.items() if name in _DEFAULTS}
        self.write(
            fields["float_round_mode_32"] << _ROUND
            | fields["float_round_mode_16_64"] << _ROUND + 2
            | fields["float_denorm_mode_32"] << _SUBNORMALS
            | fields["float_denorm_mode_16_64"] << _SUBNORMALS + 2
            | fields["dx10_clamp"] << _DX10_CLAMP
            | fields["ieee_mode"] << _IEEE
            | fields["fp16_overflow"] << _FP16_OVERFLOW
        )

    def write(self, value: int) -> None:
        if value & 0xF:
            raise NotImplementedError(f"round mode {value & 0xF:#x}: only rounding to nearest even is modelled")
        self.value = value
        self.plain = value & (_KEEPS_ALL | 1 << _FP16_OVERFLOW) == _KEEPS_ALL
        self.keeps_subnormal_halves = self._keeps("h", 0) and self._keeps("h", 1)
        self.saturates_fp16 = bool(value >> _FP16_OVERFLOW & 1)
        self.ieee = bool(value >> _IEEE & 1)
        self.clamp_keeps_nan = not value >> _DX10_CLAMP & 1

    def input(self, kind: str, value: Array) -> Array:
        """An operand of a kind of `wave.source`, with zero in place of subnormal inputs if the mode flushes them."""
        return value if self._keeps(kind, 0) else flushed(kind, value)

    def result(self, kind: str, value: Array, inputs: tuple[Array, ...] = ()) -> Array:
        """A result, with subnormals flushed and fp16 overflow saturated if the mode says so."""
        if kind == "h" and self.saturates_fp16:
            exact = np.isinf(inputs[0]) if inputs else False
            for other in inputs[1:]:
                exact = exact | np.isinf(other)
            largest = np.copysign(np.finfo(np.float16).max, value).astype(np.float16)
            value = np.where(np.isinf(value) & ~np.asarray(exact), largest, value)
        return value if self._keeps(kind, 1) else flushed(kind, value)

    def pair(self, word: Array, inputs: tuple[Array, ...]) -> Array:
        """A word of two fp16 results, with overflow saturated if the mode says so.

        inputs: the operand of each result.
        """
        low, high = (self.result("h", np.ascontiguousarray(half).astype(np.uint16).view(np.float16), (operand,))
                     for half, operand in zip((word, word >> np.uint32(16)), inputs, strict=True))  # fmt: skip
        return low.view(np.uint16) | high.view(np.uint16).astype(np.uint32) << np.uint32(16)

    def _keeps(self, kind: str, result: int) -> bool:
        if kind not in _TINY:
            return True
        return bool(self.value >> _SUBNORMALS + (0 if kind == "f" else 2) + result & 1)


def flushed(kind: str, value: Array) -> Array:
    """Replaces subnormal values by zeros of the same sign."""
    return np.where(np.abs(value) < _TINY[kind], value * value.dtype.type(0), value)


def decode(instruction: Instruction) -> Callable[[Wave], None] | None:
    """The function that executes a change of the register, or None for another instruction."""
    name, operands = instruction.mnemonic, instruction.operands
    if name in ("s_denorm_mode", "s_round_mode"):
        first, bits, text = _SUBNORMALS if name == "s_denorm_mode" else _ROUND, 4, operands[0]
    elif name in ("s_setreg_b32", "s_setreg_imm32_b32"):
        match = re.fullmatch(r"hwreg\((\w+)(?:,\s*(\d+),\s*(\d+))?\)", operands[0])
        if match is None or match[1] not in ("HW_REG_MODE", "HW_REG_WAVE_MODE", "1"):
            raise NotImplementedError(f"{operands[0]} is not modelled")
        first, bits, text = int(match[2] or 0), int(match[3] or 32), operands[1]
    else:
        return None
    read, field = scalar(text), (1 << bits) - 1 << first

    def execute(wave: Wave) -> None:
        new = wave.mode.value & ~field | read(wave) << first & field
        if (new ^ wave.mode.value) & ~_WRITABLE:
            raise NotImplementedError(f"{instruction.text}: sets bits of MODE that are not modelled")
        wave.mode.write(new)

    return execute
