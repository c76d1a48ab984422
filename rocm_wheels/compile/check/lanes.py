"""The values of registers that depend on the number of a thread and on constants alone: addresses of LDS mostly do.

A value is an array with an element for each thread of a work group. A register keeps its value where it is spilled, to
scratch or to a lane of another register. Nothing is known of what a load or an argument sets.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Callable, Iterator
from functools import partial
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.instructions import Instruction, Kernel

Values = NDArray[np.int64]  # 32-bit numbers without sign
_MASK = (1 << 32) - 1
_MOST_THREADS = 1024
_SCC = 1 << isa.SCALARS + 253
UNDEFINED = -1  # the number of a value that no instruction has set: no path of the source uses it
_MASKS = 256  # a scalar register has a second bit, as many above its own, for a mask of lanes: 1 for each that holds
_FIRST_SLOT = isa.SCALARS + 2 * _MASKS  # the bit of the first place of a spilled register


class Part(NamedTuple):
    """What is known of a result. operands: registers, each as its bit, and complements of constants."""

    result: int
    operation: str
    operands: tuple[int, ...]


class Lanes:
    """What the instructions of a kernel overwrite and compute. Each value has a number."""

    def __init__(self, kernel: Kernel, wave: int) -> None:
        """wave: threads of a wave."""
        threads = kernel.threads or _MOST_THREADS
        self._threads: Values = np.arange(-(-threads // wave) * wave, dtype=np.int64)
        self._wave = wave
        self._values: list[Values] = []
        self._numbers: dict[bytes, int] = {}
        self._results: dict[tuple[str, tuple[int, ...]], int | None] = {}
        self._slots: dict[str, dict[int, int]] = {}  # by register or memory
        self._texts = {instruction.text: instruction for instruction in kernel.instructions}
        self._moves = {text: moves for text, one in self._texts.items() if (moves := self._moved(one))}
        self._parts: dict[str, tuple[Part, ...]] = {}
        overwrites = {text: self._overwritten(one) for text, one in self._texts.items()}
        self.overwrites = [overwrites[instruction.text] for instruction in kernel.instructions]  # by place
        # A wave begins with the numbers of its threads and group in v0 to v2, and with arguments in scalar registers.
        self.start = {1: self._number(self._threads)}
        self.undefined = isa.VGPRS & ~7 | -1 << _FIRST_SLOT

    def value(self, number: int) -> Values:
        return self._values[number]

    def result(self, part: Part, held: dict[int, int]) -> int | None:
        """The number of a result, None if it is not known. held: the number of each register's value."""
        numbers = []
        for operand in part.operands:
            constant = operand < 0
            number = self._number(np.full_like(self._threads, ~operand)) if constant else held.get(operand)
            if number is None or number == UNDEFINED:
                return number
            numbers.append(number)
        key = part.operation, tuple(numbers)
        if key not in self._results:
            found = self._computed(part.operation, [self._values[number] for number in numbers])
            self._results[key] = self._number(found & _MASK)
        return self._results[key]

    def _number(self, values: Values) -> int:
        found = self._numbers.setdefault(values.tobytes(), len(self._values))
        if found == len(self._values):
            self._values.append(values)
        return found

    def _computed(self, operation: str, values: list[Values]) -> Values:
        if operation == _WAVE_NUMBER:
            return self._threads // self._wave
        if operation == "readfirstlane_b32":
            return np.repeat(values[0][:: self._wave], self._wave)
        if operation.startswith("bitop3:"):
            return _by_table(values, int(operation[7:], 0))
        return _OPERATIONS[operation, len(values)](*values)

    def parts(self, one: Instruction) -> tuple[Part, ...]:
        """What is known of the results of an instruction."""
        if one.text not in self._parts:
            moves, halves = self._moves.get(one.text), one.text.split("::")
            parts = (part for half in halves for part in _parts(isa.instruction(half.strip())))
            self._parts[one.text] = moves or tuple(parts)
        return self._parts[one.text]

    def _overwritten(self, one: Instruction) -> int:
        """What an instruction overwrites, as bits of registers and of the places of spilled ones."""
        overwritten = one.writes | one.writes >> isa.SCALARS << isa.SCALARS + _MASKS
        if one.text in self._moves:
            return overwritten | sum(part.result for part in self._moves[one.text] if part.result & ~overwritten)
        for base, slots in self._slots.items():
            at = base.partition(",")[0]
            if one.writes & isa.registers(at) if base[0] == "v" else "_store" in one.mnemonic and at in one.text:
                overwritten |= sum(slots.values())
        return overwritten | _SCC if one.kinds & isa.SALU and not _KEEPS_SCC.match(one.mnemonic) else overwritten

    def _moved(self, one: Instruction) -> tuple[Part, ...]:
        """The results of an instruction that spills registers or takes them back."""
        lane, memory = _LANE.fullmatch(one.text), _MEMORY.fullmatch(one.text)
        if lane:
            spills = lane["kind"] == "write"
            base, register = (lane["to"], lane["source"]) if spills else (lane["source"], lane["to"])
            at, register = int(lane["lane"]), isa.registers(register)
            pairs = [(self._slot(base, at), register), (self._slot(base, at + _MASKS), register << _MASKS)]
        elif memory and "off" in (memory["first"], memory["second"]):
            spills = memory["kind"] == "store"
            registers = isa.registers(memory["first"]) | isa.registers(memory["second"])
            base, first = memory["base"].replace("off", "scratch"), int(memory["offset"] or 0)
            pairs = [(self._slot(base, first + 4 * at), bit) for at, bit in enumerate(bits(registers))]
        else:
            return ()
        moves = pairs if spills else [(register, slot) for slot, register in pairs]
        return tuple(Part(result, "mov_b32", (source,)) for result, source in moves)

    def _slot(self, base: str, place: int) -> int:
        """The bit of a lane of a register, or of a word of scratch."""
        slots = self._slots.setdefault(base, {})
        return slots.setdefault(place, 1 << _FIRST_SLOT + sum(map(len, self._slots.values())))


def bits(registers: int) -> Iterator[int]:
    """The bits of a set, the lowest first."""
    while registers:
        yield registers & -registers
        registers &= registers - 1


def _parts(one: Instruction) -> Iterator[Part]:
    """What is known of the results of an instruction."""
    name = re.sub(r"^[vs]_(dual_)?", "", one.mnemonic)
    words = [word.split()[0] for word in one.text.split(None, 1)[-1].split(",")]
    if _PARTLY.search(one.text) and not one.text.endswith(_LOWEST_BYTE):
        return
    if name == "mov_b64" and len(words) == 2:
        for result, source in zip(bits(isa.registers(words[0])), bits(isa.registers(words[1])), strict=False):
            yield Part(result, "mov_b32", (source,))
        return
    result, operands = isa.registers(words[0]), [_operand(word) for word in words[1:]]
    if one.mnemonic.startswith("s_cmp"):
        result, name, operands = _SCC, name.replace("cmpk", "cmp"), [_operand(words[0]), *operands]
    elif one.mnemonic.startswith("v_cmp_"):
        result = _mask(words[0])
    elif name == "cndmask_b32":
        operands = [_mask(words[3] if len(words) > 3 else "vcc_lo"), *operands[:2]]
    elif name == "cselect_b32":
        operands = [_SCC, *operands]
    elif name == "addk_i32":
        operands = [result, *operands]
    elif words[1:] == ["ttmp8", "0x50019"]:
        name, operands = _WAVE_NUMBER, []
    elif table := _TABLE.search(one.text):
        name = table[0]
    known = name == _WAVE_NUMBER or name.startswith("bitop3:") or (name, len(operands)) in _OPERATIONS
    if known and 0 not in operands and result and not result & (result - 1):
        yield Part(result, name, tuple(operands))


def _mask(word: str) -> int:
    """A scalar register, or the first one of a pair, as a mask of lanes."""
    registers = isa.registers(word)
    return (registers & -registers) << _MASKS


def _operand(word: str) -> int:
    """A register as its bit, the complement of a constant, and 0 for another operand."""
    if re.fullmatch(r"-?\d+|0x[0-9a-f]+", word):
        return ~(int(word, 0) & _MASK)
    register = isa.registers(word)
    return 0 if register & (register - 1) else register


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


def _compared(holds: Callable[[Values, Values], NDArray[np.bool_]], signed: bool, a: Values, b: Values) -> Values:
    return holds(*((_signed(value, 32) if signed else value) for value in (a, b))).astype(np.int64)


_TABLE = re.compile(r"bitop3:\w+")
_PARTLY = re.compile(r"\b(op_sel|dst_sel|src0_sel|quad_perm|row_)")
_LOWEST_BYTE = "dst_sel:DWORD dst_unused:UNUSED_PAD src0_sel:DWORD src1_sel:BYTE_0"
_LANE = re.compile(r"v_(?P<kind>read|write)lane_b32\s+(?P<to>\w+), (?P<source>\w+), (?P<lane>\d+)")
_MEMORY = re.compile(
    r"(?:scratch|buffer)_(?P<kind>load|store)_(?:dword|b(?:32|64|96|128))(?:x\d)?\s+(?P<first>\S+), (?P<second>\S+), "
    r"(?P<base>off|s\[\d+:\d+\], 0)(?: offset:(?P<offset>\d+))?(?: th:\w+| glc| nt)*"
)
_KEEPS_SCC = re.compile(
    r"s_(c?mov|movk|cselect|mul_|mulk|pack|brev|bfm|sext|barrier|c?branch|wait|nop|set|sleep|delay|clause)"
)
_WAVE_NUMBER = "the number of a wave"  # GFX12 has it in ttmp8
_MOVES = ("mov_b32", "readfirstlane_b32", "accvgpr_read_b32", "accvgpr_write_b32", "accvgpr_mov_b32")
# By name and number of operands.
_OPERATIONS: dict[tuple[str, int], Callable[..., Values]] = {
    **dict.fromkeys([(name, 1) for name in _MOVES], lambda a: a), ("movk_i32", 1): lambda a: _signed(a & 0xFFFF, 16),
    ("and_b32", 2): lambda a, b: a & b, ("or_b32", 2): lambda a, b: a | b, ("xor_b32", 2): lambda a, b: a ^ b,
    **dict.fromkeys([(f"add_{name}", 2) for name in ("u32", "nc_u32", "i32", "co_i32", "co_u32")], lambda a, b: a + b),
    **dict.fromkeys([(name, 2) for name in ("mul_u32_u24", "mul_i32", "mul_lo_u32")], lambda a, b: a * b),
    ("lshlrev_b32_sdwa", 2): lambda by, a: _left(a & 0xFF, by),
    ("lshlrev_b32", 2): lambda by, a: _left(a, by), ("lshrrev_b32", 2): lambda by, a: _right(a, by),
    ("lshl_b32", 2): _left, ("lshr_b32", 2): _right, ("bfe_u32", 3): _field, ("bfe_i32", 3): _signed_field,
    ("bfe_u32", 2): lambda a, at: _field(a, at, at >> 16), ("bfe_i32", 2): lambda a, at: _signed_field(a, at, at >> 16),
    ("bfi_b32", 3): lambda mask, a, b: mask & a | ~mask & b, ("xad_u32", 3): lambda a, b, c: (a ^ b) + c,
    ("lshl_or_b32", 3): lambda a, by, b: _left(a, by) | b, ("lshl_add_u32", 3): lambda a, by, b: _left(a, by) + b,
    ("add_lshl_u32", 3): lambda a, b, by: _left(a + b, by), ("and_or_b32", 3): lambda a, b, c: a & b | c,
    ("or3_b32", 3): lambda a, b, c: a | b | c, ("xor3_b32", 3): lambda a, b, c: a ^ b ^ c,
    ("add3_u32", 3): lambda a, b, c: a + b + c, ("mad_u32_u24", 3): lambda a, b, c: a * b + c,
    ("lshl1_add_u32", 2): lambda a, b: (a << 1) + b, ("lshl2_add_u32", 2): lambda a, b: (a << 2) + b,
    ("addk_i32", 2): lambda a, b: a + _signed(b & 0xFFFF, 16),
    ("cselect_b32", 3): lambda scc, a, b: a * (scc != 0) + b * (scc == 0),
    ("cndmask_b32", 3): lambda mask, a, b: a * (mask == 0) + b * (mask != 0),
    **{
        (f"cmp_{name}_{kind}32", 2): partial(_compared, getattr(operator, {"lg": "ne"}.get(name, name)), kind == "i")
        for name in ("eq", "ne", "lg", "lt", "le", "gt", "ge") for kind in "iu"
    },
    ("lshl3_add_u32", 2): lambda a, b: (a << 3) + b, ("lshl4_add_u32", 2): lambda a, b: (a << 4) + b,
}  # fmt: skip
