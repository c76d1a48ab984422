"""The values of registers that depend on the number of a thread and on constants alone: addresses of LDS mostly do.

Each value is an array with an element for each thread of a work group. Nothing is known of a register that a load, an
argument, a loop or two branches may set.
"""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np
from numpy.typing import NDArray

from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Instruction, Kernel

Values = NDArray[np.int64]  # 32-bit numbers without sign
_MASK = (1 << 32) - 1
_MOST_THREADS = 1024


class Lanes:
    """Values of the registers of a kernel, each computed when it is asked for."""

    def __init__(self, kernel: Kernel, wave: int) -> None:
        """wave: threads of a wave."""
        self._kernel, self._wave = kernel, wave
        threads = kernel.threads or _MOST_THREADS
        self._threads: Values = np.arange(-(-threads // wave) * wave, dtype=np.int64)
        self._earlier: dict[int, list[int]] = {}
        for index, following in enumerate(kernel.followers):
            for at in following:
                self._earlier.setdefault(at, []).append(index)
        self._known: dict[tuple[int, int], Values | None] = {}

    def definitions(self, place: int, register: int) -> frozenset[int]:
        """The instructions whose result a register may hold before an instruction; -1 stands for the start."""
        found, seen, work = set(), set[int](), [place]
        instructions = self._kernel.instructions
        while work:
            at = work.pop()
            if at == 0:
                found.add(-1)
            for index in self._earlier.get(at, ()):
                if index in seen:
                    continue
                seen.add(index)
                if instructions[index].writes & register:
                    found.add(index)
                else:
                    work.append(index)
        return frozenset(found)

    def of(self, place: int, register: int) -> Values | None:
        """The values of a register before an instruction, None if they are not known."""
        definition, *others = self.definitions(place, register) or (-1,)
        return None if others else self._result(definition, register)

    def _result(self, definition: int, register: int) -> Values | None:
        if definition < 0:
            return self._threads if register == 1 else None
        key = definition, register
        if key not in self._known:
            self._known[key] = None  # a value that depends on itself
            halves = self._kernel.instructions[definition].text.split("::")
            parts = [isa.instruction(half.strip()) for half in halves]
            self._known[key] = next((self._computed(definition, one) for one in parts if one.writes == register), None)
        return self._known[key]

    def _computed(self, place: int, one: Instruction) -> Values | None:
        """The result of an instruction that writes one register."""
        name = re.sub(r"^[vs]_(dual_)?", "", one.mnemonic)
        operands = [operand.strip() for operand in one.text.split(None, 1)[1].split(",")][1:]
        operands = operands[-2:] if name.startswith("add_co") else operands
        table = _TABLE.search(one.text)
        operation = _OPERATIONS.get((name, len(operands)))
        if operation is None and table is None:
            return None
        values = [self._operand(place, operand) for operand in operands]
        known = [value for value in values if value is not None]
        if len(known) < len(values) or re.search(r"\b(op_sel|dst_sel|src0_sel|quad_perm|row_)", one.text):
            return None
        if name == "readfirstlane_b32":
            return np.repeat(known[0][:: self._wave], self._wave)
        if table is not None:
            return _by_table(known, int(table[1], 0))
        return operation(*known) & _MASK if operation else None

    def _operand(self, place: int, operand: str) -> Values | None:
        word = operand.split()[0]
        if re.fullmatch(r"-?\d+|0x[0-9a-f]+", word):
            return np.full_like(self._threads, int(word, 0) & _MASK)
        register = isa.registers(word)
        return self.of(place, register) if register and not register & (register - 1) else None


def _by_table(values: list[Values], table: int) -> Values:
    """A function of the bits of three values. Bit 4a + 2b + c of the table is the result for the bits a, b, c."""
    found = np.zeros_like(values[0])
    for row in range(8):
        if table >> row & 1:
            a, b, c = (value if row >> 2 - at & 1 else ~value for at, value in enumerate(values))
            found |= a & b & c
    return found & _MASK


def _signed(a: Values, bits: int | Values) -> Values:
    """The number whose highest bit says its sign."""
    return a - ((a >> bits - 1 & 1) << bits)


def _field(a: Values, first: Values, bits: Values) -> Values:
    return a >> (first & 31) & (1 << (bits & 31)) - 1


def _signed_field(a: Values, first: Values, bits: Values) -> Values:
    return _signed(_field(a, first, bits), bits & 31)


def _left(a: Values, by: Values) -> Values:
    return a << (by & 31)


def _right(a: Values, by: Values) -> Values:
    return a >> (by & 31)


_TABLE = re.compile(r"bitop3:(\w+)")
_MOVES = ("mov_b32", "readfirstlane_b32", "accvgpr_read_b32", "accvgpr_write_b32", "accvgpr_mov_b32")
# By name and number of operands.
_OPERATIONS: dict[tuple[str, int], Callable[..., Values]] = {
    **dict.fromkeys([(name, 1) for name in _MOVES], lambda a: a), ("movk_i32", 1): lambda a: _signed(a & 0xFFFF, 16),
    ("and_b32", 2): lambda a, b: a & b, ("or_b32", 2): lambda a, b: a | b, ("xor_b32", 2): lambda a, b: a ^ b,
    **dict.fromkeys([(f"add_{name}", 2) for name in ("u32", "nc_u32", "i32", "co_i32", "co_u32")], lambda a, b: a + b),
    **dict.fromkeys([(name, 2) for name in ("mul_u32_u24", "mul_i32", "mul_lo_u32")], lambda a, b: a * b),
    ("lshlrev_b32", 2): lambda by, a: _left(a, by), ("lshrrev_b32", 2): lambda by, a: _right(a, by),
    ("lshl_b32", 2): _left, ("lshr_b32", 2): _right, ("bfe_u32", 3): _field, ("bfe_i32", 3): _signed_field,
    ("bfe_u32", 2): lambda a, place: _field(a, place, place >> 16),
    ("bfi_b32", 3): lambda mask, a, b: mask & a | ~mask & b, ("xad_u32", 3): lambda a, b, c: (a ^ b) + c,
    ("lshl_or_b32", 3): lambda a, by, b: _left(a, by) | b, ("lshl_add_u32", 3): lambda a, by, b: _left(a, by) + b,
    ("add_lshl_u32", 3): lambda a, b, by: _left(a + b, by), ("and_or_b32", 3): lambda a, b, c: a & b | c,
    ("or3_b32", 3): lambda a, b, c: a | b | c, ("xor3_b32", 3): lambda a, b, c: a ^ b ^ c,
    ("add3_u32", 3): lambda a, b, c: a + b + c, ("mad_u32_u24", 3): lambda a, b, c: a * b + c,
    ("lshl1_add_u32", 2): lambda a, b: (a << 1) + b, ("lshl2_add_u32", 2): lambda a, b: (a << 2) + b,
    ("lshl3_add_u32", 2): lambda a, b: (a << 3) + b, ("lshl4_add_u32", 2): lambda a, b: (a << 4) + b,
}  # fmt: skip
