"""Scalar instructions (SOP1, SOP2, SOPC, SOPK): a wave executes them once, not per lane."""

from __future__ import annotations

import re
from collections.abc import Callable

from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.wave import WORD, Wave, scalar, scalar_place

Execute = Callable[[Wave], None]


def signed(value: int, size: int = 32) -> int:
    """A value of `size` bits as a two's complement integer."""
    value &= (1 << size) - 1
    return value - (value >> size - 1 << size)


# name -> function of operands of `n` bits that returns (result, new SCC, or None if SCC stays)
_LOGIC: dict[str, Callable[[int, int, int], int]] = {
    "and": lambda a, b, _n: a & b,
    "or": lambda a, b, _n: a | b,
    "xor": lambda a, b, _n: a ^ b,
    "andn2": lambda a, b, n: a & ~b & (1 << n) - 1,
    "and_not1": lambda a, b, n: a & ~b & (1 << n) - 1,
    "andn1": lambda a, b, n: ~a & b & (1 << n) - 1,
    "orn2": lambda a, b, n: a | ~b & (1 << n) - 1,
    "or_not1": lambda a, b, n: a | ~b & (1 << n) - 1,
    "nand": lambda a, b, n: ~(a & b) & (1 << n) - 1,
    "nor": lambda a, b, n: ~(a | b) & (1 << n) - 1,
    "xnor": lambda a, b, n: ~(a ^ b) & (1 << n) - 1,
}
_BITS: dict[str, Callable[[int, int, int], int]] = {
    **_LOGIC,
    "lshl": lambda a, b, n: a << b % n & (1 << n) - 1,
    "lshr": lambda a, b, n: a >> b % n,
    "ashr": lambda a, b, n: signed(a, n) >> b % n & (1 << n) - 1,
}
_NUMBERS: dict[str, Callable[[int, int], tuple[int, int | None]]] = {
    "add_u32": lambda a, b: (a + b, int(a + b > WORD)),
    "sub_u32": lambda a, b: (a - b, int(b > a)),
    "add_i32": lambda a, b: (a + b, int(signed(a) + signed(b) != signed(a + b))),
    "sub_i32": lambda a, b: (a - b, int(signed(a) - signed(b) != signed(a - b))),
    "mul_i32": lambda a, b: (a * b, None),
    "mul_hi_u32": lambda a, b: (a * b >> 32, None),
    "mul_hi_i32": lambda a, b: (signed(a) * signed(b) >> 32, None),
    "min_i32": lambda a, b: (min(a, b, key=signed), int(signed(a) < signed(b))),
    "max_i32": lambda a, b: (max(a, b, key=signed), int(signed(a) > signed(b))),
    "min_u32": lambda a, b: (min(a, b), int(a < b)),
    "max_u32": lambda a, b: (max(a, b), int(a > b)),
    "bfm_b32": lambda a, b: ((1 << a % 32) - 1 << b % 32, None),
    "pack_ll_b32_b16": lambda a, b: (a & 0xFFFF | b << 16, None),
    "pack_lh_b32_b16": lambda a, b: (a & 0xFFFF | b & 0xFFFF0000, None),
    "pack_hh_b32_b16": lambda a, b: (a >> 16 | b & 0xFFFF0000, None),
    **{f"lshl{n}_add_u32": lambda a, b, n=n: ((a << n) + b, int((a << n) + b > WORD)) for n in (1, 2, 3, 4)},  # type: ignore[misc]
}
ORDERS: dict[str, Callable[[int, int], bool]] = {
    "eq": lambda a, b: a == b,
    "lg": lambda a, b: a != b,
    "gt": lambda a, b: a > b,
    "ge": lambda a, b: a >= b,
    "lt": lambda a, b: a < b,
    "le": lambda a, b: a <= b,
}
_ONE: dict[str, Callable[[int, int], int]] = {
    "brev": lambda a, n: int(f"{a:0{n}b}"[::-1], 2),
    "ff1_i32": lambda a, _n: (a & -a).bit_length() - 1 & WORD,
    "ctz_i32": lambda a, _n: (a & -a).bit_length() - 1 & WORD,
    "flbit_i32": lambda a, n: n - a.bit_length() if a else WORD,
    "clz_i32_u32": lambda a, n: n - a.bit_length() if a else WORD,
}


def decode(instruction: Instruction) -> Execute | None:
    """The function that executes an instruction, or None for an instruction of another module."""
    # gfx12 names the carry output in additions.
    name = re.sub(r"^(addk?|sub)_co_([iu]32)$", r"\1_\2", instruction.mnemonic.removeprefix("s_"))
    for maker in (_two, _one, _compare, _constant, _bitset, _saveexec):
        instruction.forget()
        if (function := maker(name, instruction.operands)) is not None:
            return function
    return None


def _words(name: str) -> int:
    return 2 if name.endswith(("64", "b64_e64")) else 1


def _two(name: str, operands: tuple[str, ...]) -> Execute | None:
    if len(operands) != 3:
        return None
    operation, _, form = name.rpartition("_")
    words = 2 if form in ("b64", "u64", "i64") else 1
    size = 32 * words
    destination = scalar_place(operands[0])
    left, right = scalar(operands[1], words), scalar(operands[2], words)
    if form in ("b32", "b64", "i32", "i64", "u64") and operation in _BITS:
        compute = _BITS[operation]
        if operation in ("lshl", "lshr", "ashr"):
            right = scalar(operands[2])

        def bitwise(wave: Wave) -> None:
            result = compute(left(wave), right(wave), size)
            wave.set_scalar(destination, result, words)
            wave.scc = int(result != 0)

        return bitwise
    if name in ("addc_u32", "add_co_ci_u32", "subb_u32", "sub_co_ci_u32"):
        sign = 1 if name.startswith("add") else -1

        def carried(wave: Wave) -> None:
            result = left(wave) + sign * (right(wave) + wave.scc)
            wave.set_scalar(destination, result & WORD)
            wave.scc = int(not 0 <= result <= WORD)

        return carried
    if operation == "cselect":
        return lambda wave: wave.set_scalar(destination, left(wave) if wave.scc else right(wave), words)
    if operation == "bfe":
        return _field(destination, left, scalar(operands[2]), form, words)
    if name in ("add_u64", "add_nc_u64", "sub_u64", "sub_nc_u64", "mul_u64"):
        kind = name[:3]

        def wide(wave: Wave) -> None:
            a, b = left(wave), right(wave)
            wave.set_scalar(destination, (a + b if kind == "add" else a - b if kind == "sub" else a * b) % (1 << 64), 2)

        return wide
    number = _NUMBERS.get(name)
    if number is None:
        return None

    def arithmetic(wave: Wave) -> None:
        result, carry = number(left(wave), right(wave))
        wave.set_scalar(destination, result & WORD)
        if carry is not None:
            wave.scc = carry

    return arithmetic


def _field(
    destination: int, left: Callable[[Wave], int], right: Callable[[Wave], int], form: str, words: int
) -> Execute:
    def extract(wave: Wave) -> None:
        control = right(wave)
        width = control >> 16 & 0x7F
        result = left(wave) >> (control & (31 if words == 1 else 63)) & (1 << width) - 1
        if form.startswith("i") and width:
            result = signed(result, width)
        wave.set_scalar(destination, result & (1 << 32 * words) - 1, words)
        wave.scc = int(result != 0)

    return extract


def _one(name: str, operands: tuple[str, ...]) -> Execute | None:
    if len(operands) != 2 or name.startswith(("cmp", "bitcmp")):
        return None
    words = 2 if re.search(r"[biu]64$", name) else 1
    operation = re.sub(r"_[bi](32|64)$", "", name)
    if operation not in ("mov", "not", "abs", "bcnt1_i32", "sext_i32_i8", "sext_i32_i16", "wqm") and (
        operation not in _ONE and name not in _ONE
    ):
        return None
    destination, read = scalar_place(operands[0]), scalar(operands[1], words)
    if operation == "mov":
        return lambda wave: wave.set_scalar(destination, read(wave), words)
    if operation.startswith("sext"):
        size = int(name.rpartition("i")[2])
        return lambda wave: wave.set_scalar(destination, signed(read(wave), size) & WORD)
    if operation in ("not", "abs", "bcnt1_i32", "wqm"):
        written = 1 if operation == "bcnt1_i32" else words

        def changed(wave: Wave) -> None:
            value = read(wave)
            if operation == "not":
                result = ~value & (1 << 32 * words) - 1
            elif operation == "abs":
                result = abs(signed(value)) & WORD
            elif operation == "wqm":
                result = sum(0xF << quad for quad in range(0, 32 * words, 4) if value >> quad & 0xF)
            else:
                result = value.bit_count()
            wave.set_scalar(destination, result, written)
            wave.scc = int(result != 0)

        return changed
    compute = _ONE.get(operation) or _ONE[name]
    size, written = 32 * words, words if operation == "brev" else 1
    return lambda wave: wave.set_scalar(destination, compute(read(wave), size), written)


def _compare(name: str, operands: tuple[str, ...]) -> Execute | None:
    match = re.fullmatch(r"cmp_(eq|lg|gt|ge|lt|le)_([iu])(32|64)", name)
    if match is None:
        found_bit = re.fullmatch(r"bitcmp([01])_b(32|64)", name)
        if found_bit is None:
            return None
        value, place = scalar(operands[0], int(found_bit[2]) // 32), scalar(operands[1])
        expected, size = int(found_bit[1]), int(found_bit[2])

        def bit(wave: Wave) -> None:
            wave.scc = int((value(wave) >> place(wave) % size & 1) == expected)

        return bit
    compare, size = ORDERS[match[1]], int(match[3])
    left, right = (scalar(operand, size // 32) for operand in operands)
    if match[2] == "i":
        return lambda wave: setattr(wave, "scc", int(compare(signed(left(wave), size), signed(right(wave), size))))
    return lambda wave: setattr(wave, "scc", int(compare(left(wave), right(wave))))


def _bitset(name: str, operands: tuple[str, ...]) -> Execute | None:
    match = re.fullmatch(r"bitset([01])_b32", name)
    if match is None:
        return None
    destination, place, value = scalar_place(operands[0]), scalar(operands[1]), int(match[1])

    def execute(wave: Wave) -> None:
        bit = 1 << place(wave) % 32
        wave.set_scalar(destination, wave.s[destination] | bit if value else wave.s[destination] & ~bit)

    return execute


def _constant(name: str, operands: tuple[str, ...]) -> Execute | None:
    """Instructions with an immediate of 16 bits."""
    match = re.fullmatch(r"(mov|add|mul|cmov)k_i32|cmpk_(eq|lg|gt|ge|lt|le)_([iu])32", name)
    if match is None:
        return None
    constant = int(operands[1], 0)
    if match[2]:
        compare, read = ORDERS[match[2]], scalar(operands[0])
        if match[3] == "u":
            return lambda wave: setattr(wave, "scc", int(compare(read(wave), constant & 0xFFFF)))
        return lambda wave: setattr(wave, "scc", int(compare(signed(read(wave)), signed(constant, 16))))
    destination, operation, value = scalar_place(operands[0]), match[1], signed(constant, 16)

    def execute(wave: Wave) -> None:
        old = signed(wave.s[destination])
        if operation == "add":
            wave.scc = int(signed(old + value) != old + value)
        if operation != "cmov" or wave.scc:
            result = {"add": old + value, "mul": old * value}.get(operation, value)
            wave.set_scalar(destination, result & WORD)

    return execute


def _saveexec(name: str, operands: tuple[str, ...]) -> Execute | None:
    match = re.fullmatch(r"(\w+)_saveexec_b(32|64)", name)
    if match is None:
        return None
    size = int(match[2])
    compute, destination, read = _LOGIC[match[1]], scalar_place(operands[0]), scalar(operands[1], size // 32)

    def execute(wave: Wave) -> None:
        old, value = wave.exec(), read(wave)
        wave.set_scalar(destination, old, size // 32)
        result = compute(value, old, size)
        wave.set_exec(result)
        wave.scc = int(result != 0)

    return execute
