"""Matrix instructions: MFMA of CDNA, WMMA of RDNA.

The layout of operands (lane and register of A[row, k], B[k, column] and D[row, column]) follows AMD's matrix
instruction calculator and the guides.

MI200 flushes subnormals in its products of fp16 and bf16: "MI200 MFMA behavior specifics" in ROCm's documentation of
MIOpen says "input/output data", PyTorch's "Numerical accuracy" says the same about MFMA and V_DOT2, for MI200 alone and
not for fp32 and fp64. MMA-Sim, which was compared with hardware bit by bit, has the details that this file follows:
inputs and the accumulator become +0. An fp32 accumulator or result is subnormal below 1.2e-38. MI200 flushes every
product and partial sum. This file flushes only the result, which differs for bf16 alone, because only bf16 has such
small products.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from amdgpu_simulator.isa import fp8
from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import Wave, number, place, register

_NAME = re.compile(
    r"v_(mfma|wmma)_f32_(\d+)x(\d+)x(\d+)_?(f16|bf16|f32|fp8_fp8|bf8_bf8|fp8_bf8|bf8_fp8|f8f6f4)(?:_1k)?$"
)

# Kind of instruction -> the values of `targets.Generation.matrix` that have it.
_LAYOUTS = {"mfma": ("mfma",), "wmma": ("mirrored", "split")}


def decode(instruction: Instruction, target: Target) -> Callable[[Wave], None] | None:
    """The function that executes a matrix instruction, or None for another instruction."""
    match = _NAME.match(instruction.mnemonic)
    if match is None:
        return None
    rows, columns, depth = (int(match[index]) for index in (2, 3, 4))
    if rows != columns:
        raise NotImplementedError("not known")
    if target.generation.matrix not in _LAYOUTS[match[1]]:
        raise NotImplementedError(f"{target.name} has no such instruction")
    destination, a, b, c = instruction.operands
    # f8f6f4: modifiers select formats other than e4m3, which are not implemented.
    kinds = (match[5].replace("f8f6f4", "fp8").split("_") * 2)[:2]
    if match[1] == "mfma":
        read = [_mfma_operand(text, kind, rows, depth, target) for text, kind in zip((a, b), kinds, strict=True)]
        lanes, registers = _mfma_places(rows)
    else:
        read = [_wmma_operand(text, kind, target) for text, kind in zip((a, b), kinds, strict=True)]
        lanes, registers = wmma_places(target)
    flush = target.flushes_subnormals and not {"f16", "bf16"}.isdisjoint(kinds)
    first = place(destination) + registers
    accumulator = place(c) + registers if register(c) else None
    start = np.array([number(c)], np.uint32).view(np.float32) if accumulator is None else None

    def execute(wave: Wave) -> None:
        # All lanes of a wave take part in a matrix instruction, whatever EXEC is.
        if accumulator is None:
            total = np.broadcast_to(start, (rows, rows)).astype(np.float32)  # type: ignore[arg-type]
        else:
            total = wave.f[accumulator, lanes]
        left, right = (reader(wave) for reader in read)
        if flush:
            wave.f[first, lanes] = _flushed(left @ right.T + _flushed(total))
        else:
            wave.f[first, lanes] = left @ right.T + total

    return execute


def _flushed(values: Array, smallest: float = 2.0**-126) -> Array:
    """The values, with zero in place of subnormals."""
    return np.where(np.abs(values) < np.float32(smallest), np.float32(0), values)


def _mfma_places(rows: int) -> tuple[Array, Array]:
    """Lane and register of D[row, column]: a lane holds four rows of a column, then the next four rows that no other
    lane holds.
    """
    row, column = np.meshgrid(np.arange(rows), np.arange(rows), indexing="ij")
    groups = 64 // rows
    return row // 4 % groups * rows + column, row // (4 * groups) * 4 + row % 4


def wmma_places(target: Target) -> tuple[Array, Array]:
    """Lane and register of D[row, column]."""
    row, column = np.meshgrid(np.arange(16), np.arange(16), indexing="ij")
    if target.generation.matrix == "mirrored":
        return row % 2 * 16 + column, row // 2
    return row // 8 * 16 + column, row % 8


def _mfma_operand(text: str, kind: str, rows: int, depth: int, target: Target) -> Callable[[Wave], Array]:
    """A or B as (rows, depth). Lane l holds n consecutive values of row l % rows, starting at k = l // rows * n."""
    groups = 64 // rows
    each = depth // groups
    index = place(text)
    size = {"f32": 4, "f16": 2, "bf16": 2}.get(kind, 1)
    words = max(each * size // 4, 1)

    smallest = {"f16": 2.0**-14, "bf16": 2.0**-126}.get(kind, 0.0) if target.flushes_subnormals else 0.0

    def read(wave: Wave) -> Array:
        content = np.ascontiguousarray(wave.v[index : index + words].T)
        values = _floats(content, kind, target)[:, :each]
        if smallest:
            values = _flushed(values, smallest)
        return values.reshape(groups, rows, each).transpose(1, 0, 2).reshape(rows, depth)

    return read


def _wmma_operand(text: str, kind: str, target: Target) -> Callable[[Wave], Array]:
    index = place(text)
    if target.generation.matrix == "mirrored":  # lanes 0 to 15 hold whole rows, and the other lanes hold the same rows

        def whole(wave: Wave) -> Array:
            values = _floats(np.ascontiguousarray(wave.v[index : index + 8].T), kind, target)
            if not np.array_equal(values[:16], values[16:], equal_nan=True):
                raise ValueError(f"{text}: the halves of the wave hold different operands")
            return values[:16]

        return whole

    words = 2 if kind == "fp8" else 4

    def halves(wave: Wave) -> Array:
        values = _floats(np.ascontiguousarray(wave.v[index : index + words].T), kind, target)
        return values.reshape(2, 16, 8).transpose(1, 0, 2).reshape(16, 16)

    return halves


def _floats(content: Array, kind: str, target: Target) -> Array:
    """Registers (lanes, words) as float32 (lanes, elements)."""
    if kind == "f32":
        return content.view(np.float32)
    if kind == "f16":
        return content.view(np.float16).astype(np.float32)
    if kind == "bf16":
        return (content.view(np.uint16).astype(np.uint32) << np.uint32(16)).view(np.float32)
    if kind == "fp8":
        return fp8.widen(content.view(np.uint8), target)
    raise NotImplementedError(f"matrix operands of type {kind} are not implemented")
