"""Floating-point arithmetic of scalar registers, from gfx11.5 on."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from typing import Any

import numpy as np

from amdgpu_simulator.isa import floats
from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.scalar import ORDERS, Execute, signed
from amdgpu_simulator.isa.wave import WORD, Wave, scalar, scalar_place

_OPERATIONS: dict[str, tuple[str, str, Callable[..., Any]]] = {
    "cvt_f32_u32": ("f", "u", float),
    "cvt_f32_i32": ("f", "i", float),
    "cvt_u32_f32": ("u", "f", lambda a: _to_integer(a, 0, WORD)),
    "cvt_i32_f32": ("u", "f", lambda a: _to_integer(a, -(2**31), 2**31 - 1) & WORD),
    "mul_f32": ("f", "ff", lambda a, b: a * b),
    "add_f32": ("f", "ff", lambda a, b: a + b),
    "sub_f32": ("f", "ff", lambda a, b: a - b),
    "min_num_f32": ("f", "ff", lambda a, b: floats.minimum(a, b, None)),
    "max_num_f32": ("f", "ff", lambda a, b: floats.maximum(a, b, None)),
    "fmac_f32": ("f", "fff", floats.fma),
    "fmaak_f32": ("f", "fff", floats.fma),
    "fmamk_f32": ("f", "fff", lambda a, k, b: floats.fma(a, k, b)),
}


def _to_integer(value: Array, low: int, high: int) -> int:
    exact = float(value[0])
    if math.isnan(exact):
        return 0
    return low if exact <= low else high if exact >= high else int(exact)


def _float(content: int) -> Array:
    return np.array([content], np.uint32).view(np.float32)


def decode(instruction: Instruction) -> Execute | None:
    """The function that executes an instruction, or None for an instruction of another module."""
    name, operands = instruction.mnemonic.removeprefix("s_"), instruction.operands
    if match := re.fullmatch(r"cmp_(n?)(eq|lg|gt|ge|lt|le)_f32", name):
        return _float_comparison(bool(match[1]), match[2], [scalar(text) for text in operands])
    if name not in _OPERATIONS:
        return None
    result, kinds, compute = _OPERATIONS[name]
    destination = scalar_place(operands[0])
    inputs = (*operands[1:], operands[0]) if name == "fmac_f32" else operands[1:]
    read = [scalar(text) for text in inputs]

    def execute(wave: Wave) -> None:
        values: list[Any] = []
        for reader, kind in zip(read, kinds, strict=True):
            content = reader(wave)
            value = _float(content) if kind == "f" else signed(content) if kind == "i" else content
            values.append(wave.mode.input("f", value) if kind == "f" else value)
        computed = compute(*values)
        if result == "f":
            computed = int(wave.mode.result("f", np.asarray(computed, np.float32).reshape(1)).view(np.uint32)[0])
        wave.set_scalar(destination, int(computed))

    return execute


def _float_comparison(negated: bool, order: str, read: list[Callable[[Wave], int]]) -> Execute:
    left, right = read
    compare: Callable[[Any, Any], Any] = ORDERS[order]
    if order == "lg":  # false for NaN, as the other orders are
        compare = lambda a, b: (a < b) | (a > b)  # noqa: E731

    def execute(wave: Wave) -> None:
        a, b = (wave.mode.input("f", _float(reader(wave))) for reader in (left, right))
        wave.scc = int(bool(compare(a, b)[0]) != negated)

    return execute
