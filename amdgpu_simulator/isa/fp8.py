"""Conversions of 8-bit floating point: e4m3fnuz or OCP's e4m3fn, depending on the target."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np

from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.reading import Modifiers
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import Wave, place, put, source

_U32 = np.uint32


@cache
def _values(target: Target) -> Array:
    """The value of each of the 256 bytes: a sign, four bits of exponent, three bits of mantissa."""
    magnitudes = np.arange(128)
    exponents, mantissas = magnitudes >> 3, magnitudes & 7
    normal = exponents > 0
    bias = 8 if target.fnuz else 7
    positive = np.ldexp(mantissas + 8.0 * normal, np.maximum(exponents, 1) - bias - 3).astype(np.float32)
    both = np.concatenate([positive, -positive])
    both[[0x80] if target.fnuz else [0x7F, 0xFF]] = np.nan
    return both


@cache
def _midpoints(target: Target) -> Array:
    """The numbers half-way between a magnitude and the next. The magnitude above the largest number means NaN."""
    above = 256.0 if target.fnuz else 480.0
    magnitudes = np.append(_values(target)[: _largest(target) + 1].astype(np.float64), above)
    return (magnitudes[:-1] + magnitudes[1:]) / 2


def _largest(target: Target) -> int:
    """The byte of the largest number."""
    return 0x7F if target.fnuz else 0x7E


def widen(content: Array, target: Target) -> Array:
    """Converts bytes to float32."""
    return _values(target)[content]


def narrow(values: Array, target: Target, saturates: bool = False) -> Array:
    """Converts float32 to bytes, rounding to nearest even.

    saturates: whether too large values become the largest number, not NaN.
    """
    values = np.asarray(values, np.float32)
    midpoints = _midpoints(target)
    with np.errstate(invalid="ignore"):  # a signalling NaN
        magnitudes = np.abs(values).astype(np.float64)
    below = np.searchsorted(midpoints, magnitudes)  # at a midpoint: the lower byte
    ties = midpoints[np.minimum(below, len(midpoints) - 1)] == magnitudes
    content = below + (ties & (below & 1 == 1))
    if saturates:
        content = np.minimum(content, _largest(target))
    nan = 0x80 if target.fnuz else 0x7F
    content = np.where(np.isnan(values) | (content > _largest(target)), nan, content)
    # e4m3fnuz has no negative zero: its byte means NaN.
    signed = np.signbit(values) & (content != 0 if target.fnuz else True)
    return (content | 0x80 * signed).astype(np.uint32)


def decode(instruction: Instruction, target: Target) -> Execute | None:
    """The function that executes a conversion, or None for another instruction."""
    name = instruction.mnemonic.removeprefix("v_cvt_").replace("scalef32_", "")
    maker = {"pk_fp8_f32": _to_fp8, "pk_f32_fp8": _from_fp8, "pk_f16_fp8": _from_fp8, "f32_fp8": _one}.get(name)
    return maker(instruction, target) if maker else None


def _scale(instruction: Instruction, index: int) -> Callable[[Wave], Array]:
    if "scalef32" not in instruction.mnemonic:
        return lambda _wave: np.ones(1, np.float32)
    return source(instruction.operands[index], "f")


def _to_fp8(instruction: Instruction, target: Target) -> Execute:
    """Converts two float32 to one half of a register."""
    index = place(instruction.operands[0])
    read, scale = [source(text, "f") for text in instruction.operands[1:3]], _scale(instruction, 3)
    *others, high = instruction.modifiers.switches("op_sel")
    if any(others):
        raise NotImplementedError("op_sel of operands of 32 bits")

    def execute(wave: Wave) -> None:
        values = [np.broadcast_to(reader(wave) / scale(wave), wave.count) for reader in read]
        low, up = (narrow(value, target, wave.mode.saturates_fp16) for value in values)
        kept = wave.v[index] & _U32(0xFFFF if high else 0xFFFF0000)
        put(wave, index, kept | (low | up << _U32(8)) << _U32(16 * high))

    return execute


def _from_fp8(instruction: Instruction, target: Target) -> Execute:
    """Converts two bytes of a register to two float32, or to two float16 in one register."""
    index, read, scale = place(instruction.operands[0]), source(instruction.operands[1], "u"), _scale(instruction, 2)
    modifiers = instruction.modifiers
    high = _half(modifiers) or modifiers.switches("op_sel")[0]
    half = "f16" in instruction.mnemonic

    def execute(wave: Wave) -> None:
        content = read(wave) >> _U32(16 if high else 0)
        results = [widen(content >> _U32(shift) & _U32(255), target) * scale(wave) for shift in (0, 8)]
        if half:
            low, up = (result.astype(np.float16).view(np.uint16).astype(np.uint32) for result in results)
            put(wave, index, low | up << _U32(16))
            return
        for word, result in enumerate(results):
            put(wave, index + word, result.astype(np.float32).view(np.uint32))

    return execute


def _one(instruction: Instruction, target: Target) -> Execute:
    index, read = place(instruction.operands[0]), source(instruction.operands[1], "u")
    byte = _byte(instruction.modifiers)

    def execute(wave: Wave) -> None:
        put(wave, index, widen(read(wave) >> _U32(8 * byte) & _U32(255), target).view(np.uint32))

    return execute


def _half(modifiers: Modifiers) -> int:
    """The half of a register that SDWA (gfx942) selects; 0 without SDWA."""
    if "sdwa" not in modifiers:
        return 0
    _whole_result(modifiers)
    return {"WORD_0": 0, "WORD_1": 1}[modifiers.get("src0_sel", "WORD_0")]


def _byte(modifiers: Modifiers) -> int:
    """Which byte of a register is read: SDWA, gfx12's byte_sel, or two bits of op_sel select it."""
    if "sdwa" in modifiers:
        _whole_result(modifiers)
        return {f"BYTE_{byte}": byte for byte in range(4)}[modifiers.get("src0_sel", "BYTE_0")]
    switches = modifiers.switches("op_sel")
    return modifiers.integer("byte_sel", switches[0] + 2 * switches[1])


def _whole_result(modifiers: Modifiers) -> None:
    if modifiers.get("dst_sel", "DWORD") != "DWORD" or modifiers.get("dst_unused", "UNUSED_PAD") == "UNUSED_SEXT":
        raise NotImplementedError(f"dst_sel:{modifiers['dst_sel']}")
