"""Vector instructions that move values between lanes, carry bits, or take two values of a register pair."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import numpy as np

from amdgpu_simulator.isa import floats
from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.mode import Mode
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.vector import moded
from amdgpu_simulator.isa.wave import VCC, Wave, bits, mask, place, put, register, scalar, scalar_place, source, target

_U32, _U64 = np.uint32, np.uint64


def decode(instruction: Instruction, target: Target, mode: Mode) -> Execute | None:
    """The function that executes an instruction of a GPU target, or None for what is not in this file.

    mode: the register at the start of the kernel.
    """
    name = instruction.mnemonic.removeprefix("v_")
    if maker := _MAKERS.get(name):
        return maker(instruction)
    if name.startswith("fma_mix"):
        return _mixed(instruction)
    if name.startswith("pk_"):
        return _packed(instruction, mode.ieee if target.generation.has_ieee_mode else None)
    if name in ("bitop3_b32", "bitop3_b16"):
        return _logic(instruction)
    return None


def _first_lane(instruction: Instruction) -> Execute:
    destination, read = scalar_place(instruction.operands[0]), source(instruction.operands[1], "u")

    def execute(wave: Wave) -> None:
        lane = int(wave.lanes.argmax())
        wave.set_scalar(destination, int(np.broadcast_to(read(wave), wave.count)[lane]))

    return execute


def _read_lane(instruction: Instruction) -> Execute:
    destination, read = scalar_place(instruction.operands[0]), source(instruction.operands[1], "u")
    lane = scalar(instruction.operands[2])
    return lambda wave: wave.set_scalar(destination, int(read(wave)[lane(wave) % wave.count]))


def _write_lane(instruction: Instruction) -> Execute:
    index = place(instruction.operands[0])
    value, lane = (scalar(text) for text in instruction.operands[1:3])

    def execute(wave: Wave) -> None:
        wave.v[index, lane(wave) % wave.count] = value(wave)

    return execute


def _other_row(instruction: Instruction) -> Execute:
    """v_permlanex16_b32: each lane reads a lane of the other row; v_permlane16_b32: of its own row. 4 bits name the
    lane.
    """
    crossed = "x16" in instruction.mnemonic
    index, read = place(instruction.operands[0]), source(instruction.operands[1], "u")
    low, high = (scalar(text) for text in instruction.operands[2:4])
    # Whether an inactive lane can be read, and whether it gives zero where it cannot.
    inactive, zero, *_ = instruction.modifiers.switches("op_sel")

    def execute(wave: Wave) -> None:
        chosen = low(wave) | high(wave) << 32
        lane = np.arange(wave.count)
        inside = np.array([chosen >> 4 * number & 15 for number in range(16)])[lane % 16]
        origin = (lane // 16 * 16 ^ (16 if crossed else 0)) + inside
        value = read(wave)[origin]
        if not inactive and not wave.full:
            value = np.where(wave.lanes[origin], value, np.uint32(0) if zero else wave.v[index])
        put(wave, index, value)

    return execute


def _swap(instruction: Instruction) -> Execute:
    first, second = (place(text) for text in instruction.operands)

    def execute(wave: Wave) -> None:
        kept = wave.v[first].copy()
        put(wave, first, wave.v[second])
        put(wave, second, kept)

    return execute


def _half_swap(instruction: Instruction) -> Execute:
    """v_permlane32_swap_b32: swaps the upper half of the first register with the lower half of the second;
    v_permlane16_swap_b32: the odd rows of the first with the even rows of the second.
    """
    first, second = (place(text) for text in instruction.operands)
    size = 32 if "lane32" in instruction.mnemonic else 16

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        upper, lower = lane[lane // size % 2 == 1], lane[lane // size % 2 == 0]
        wave.v[first, upper], wave.v[second, lower] = wave.v[second, lower].copy(), wave.v[first, upper].copy()

    return execute


def _below(instruction: Instruction) -> Execute:
    """v_mbcnt_lo (hi): the number of bits of the mask's lower (upper) word that belong to lanes below this lane."""
    index, read = place(instruction.operands[0]), source(instruction.operands[1], "u")
    before = source(instruction.operands[2], "u")
    word = 32 if "_hi" in instruction.mnemonic else 0

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        below = np.array([(1 << min(max(int(position) - word, 0), 32)) - 1 for position in lane], np.uint32)
        put(wave, index, np.bitwise_count(read(wave) & below).astype(np.uint32) + before(wave))

    return execute


def _carry(instruction: Instruction) -> Execute:
    """32-bit additions and subtractions with a carry in and a carry out for each lane."""
    name, operands = instruction.mnemonic, instruction.operands
    read = [source(text, "u") for text in operands[2:4]]
    if "subrev" in name:
        read.reverse()
    taken = scalar(operands[4], 2) if len(operands) > 4 else None
    taken32 = scalar(operands[4]) if len(operands) > 4 else None
    destination, out, sign = place(operands[0]), scalar_place(operands[1]), -1 if "sub" in name else 1

    def execute(wave: Wave) -> None:
        left, right = (np.broadcast_to(reader(wave), wave.count).astype(np.int64) for reader in read)
        result = left + sign * right
        if taken is not None and taken32 is not None:
            lanes = bits(taken(wave) if wave.count == 64 else taken32(wave), wave.count)
            result = result + sign * lanes.astype(np.int64)
        carried = (result < 0) | (result > 0xFFFFFFFF)
        wave.set_scalar(out, mask(carried & wave.lanes), wave.count // 32)
        put(wave, destination, (result & 0xFFFFFFFF).astype(np.uint32))

    return execute


def _mad_wide(instruction: Instruction) -> Execute:
    """v_mad_u64_u32 (i64_i32): a 64-bit product plus an addend, and the carry of the sum."""
    operands, signed = instruction.operands, "i64" in instruction.mnemonic
    left, right = (source(text, "i" if signed else "u") for text in operands[2:4])
    more, write = source(operands[4], "I" if signed else "U"), target(operands[0], "I" if signed else "U")
    dtype, out = (np.int64 if signed else np.uint64), scalar_place(operands[1])

    def execute(wave: Wave) -> None:
        product, addend = left(wave).astype(dtype) * right(wave).astype(dtype), more(wave)
        total = product + addend
        over = (total ^ product) & (total ^ addend) < 0 if signed else total < product
        write(wave, total)
        wave.set_scalar(out, mask(np.broadcast_to(over, wave.count) & wave.lanes), wave.count // 32)

    return execute


def _div_scale(instruction: Instruction) -> Execute:
    operands, kind = instruction.operands, "F" if "f64" in instruction.mnemonic else "f"
    out, write = scalar_place(operands[1]), target(operands[0], kind)
    read = [source(text, kind) for text in operands[2:5]]

    def execute(wave: Wave) -> None:
        result, scaled = floats.div_scale(*(wave.mode.input(kind, reader(wave)) for reader in read))
        write(wave, result)
        wave.set_scalar(out, mask(np.broadcast_to(scaled, wave.count) & wave.lanes), wave.count // 32)

    return execute


def _div_fmas(instruction: Instruction) -> Execute:
    operands, kind = instruction.operands, "F" if "f64" in instruction.mnemonic else "f"
    write, read = target(operands[0], kind), [source(text, kind) for text in operands[1:4]]

    def execute(wave: Wave) -> None:
        scaled = bits(wave.scalar(VCC, 2) if wave.count == 64 else wave.s[VCC], wave.count)
        a, b, c = (wave.mode.input(kind, reader(wave)) for reader in read)
        write(wave, wave.mode.result(kind, floats.div_fmas(a, b, c, scaled)))

    return execute


def _logic(instruction: Instruction) -> Execute:
    """v_bitop3: any function of three bits, by its truth table."""
    index, read = place(instruction.operands[0]), [source(text, "u") for text in instruction.operands[1:4]]
    table = instruction.modifiers.integer("bitop3")
    kept = _U32(0xFFFF if instruction.mnemonic.endswith("b16") else 0xFFFFFFFF)

    def execute(wave: Wave) -> None:
        result = np.zeros(1, np.uint32)
        for row in range(8):
            if table >> row & 1:
                a, b, c = (
                    term(wave) if row >> bit & 1 else ~term(wave) for term, bit in zip(read, (2, 1, 0), strict=True)
                )
                result = result | (a & b & c)
        put(wave, index, result & kept)

    return execute


def _mixed(instruction: Instruction) -> Execute:
    """v_fma_mix: fp32 arithmetic. Each operand is fp32 or one half of a register."""
    operands, name = instruction.operands, instruction.mnemonic
    halves, narrow = (instruction.modifiers.switches(switch)[:3] for switch in ("op_sel", "op_sel_hi"))
    kinds = ["h" if one else "f" for one in narrow]
    read = [source(text, kind, half) for text, kind, half in zip(operands[1:], kinds, halves, strict=True)]
    index = place(operands[0])

    def execute(wave: Wave) -> None:
        inputs = [one(wave) for one in read]
        if not wave.mode.plain:
            inputs = [wave.mode.input(kind, value) for kind, value in zip(kinds, inputs, strict=True)]
        a, b, c = (value.astype(np.float32) for value in inputs)
        result = wave.mode.result("f", np.broadcast_to(floats.fma(a, b, c), wave.count))
        if name.endswith("_f32"):
            put(wave, index, np.ascontiguousarray(result).view(np.uint32))
            return
        content = wave.mode.result("h", result.astype(np.float16), (a, b, c)).view(np.uint16).astype(np.uint32)
        low = name.endswith("mixlo_f16")
        kept = wave.v[index] & _U32(0xFFFF0000 if low else 0xFFFF)
        put(wave, index, kept | (content if low else content << _U32(16)))

    return execute


# What v_pk_* compute for each of the two values. The key is a kind of `wave.source`. Minimum and maximum also take
# MODE.IEEE.
_PACKED: dict[str, tuple[str, Callable[..., Array]]] = {
    "mul_f32": ("f", lambda a, b: a * b),
    "add_f32": ("f", lambda a, b: a + b),
    "fma_f32": ("f", floats.fma),
    "mul_f16": ("h", lambda a, b: a * b),
    "add_f16": ("h", lambda a, b: a + b),
    "fma_f16": ("h", floats.fma16),
    "add_u16": ("w", lambda a, b: a + b),
    "add_i16": ("s", lambda a, b: a + b),
    "sub_u16": ("w", lambda a, b: a - b),
    "sub_i16": ("s", lambda a, b: a - b),
    "mul_lo_u16": ("w", lambda a, b: a * b),
    "max_u16": ("w", np.maximum),
    "min_u16": ("w", np.minimum),
    "max_i16": ("s", np.maximum),
    "min_i16": ("s", np.minimum),
    "mad_u16": ("w", lambda a, b, c: a * b + c),
    "mad_i16": ("s", lambda a, b, c: a * b + c),
    "lshlrev_b16": ("w", lambda a, b: b << (a & np.uint16(15))),
    "lshrrev_b16": ("w", lambda a, b: b >> (a & np.uint16(15))),
    "ashrrev_i16": ("s", lambda a, b: b >> (a & np.int16(15))),
}
_PACKED_EXTREMES: dict[str, Callable[..., Array]] = {
    "max_f16": floats.maximum,
    "min_f16": floats.minimum,
    "max_num_f16": floats.maximum,
    "min_num_f16": floats.minimum,
}


def _packed(instruction: Instruction, ieee: bool | None) -> Execute:
    """v_pk_*: two fp32 in a register pair, or two values of 16 bits in a register. ieee: as in `floats.maximum`."""
    name, modifiers, operands = instruction.mnemonic.removeprefix("v_pk_"), instruction.modifiers, instruction.operands
    if name == "mov_b32":
        return _packed_move(instruction)
    compute: Callable[..., Array]
    if extreme := _PACKED_EXTREMES.get(name):
        kind, compute = "h", partial(extreme, ieee=ieee)
    elif name in _PACKED:
        kind, compute = _PACKED[name]
    else:
        raise NotImplementedError("not known")
    wide, inputs = kind == "f", operands[1:]
    halves = modifiers.switches("op_sel"), modifiers.switches("op_sel_hi", 1)
    # Only floating-point kinds use these two.
    signs = [modifiers.switches(f"neg_{part}") if kind in "fh" else [0] * 4 for part in ("lo", "hi")]
    take = _word if wide else source
    read = [
        [(take(text, kind, half), negate) for text, half, negate in zip(inputs, half_of, negated, strict=False)]
        for half_of, negated in zip(halves, signs, strict=True)
    ]
    index, kinds = place(operands[0]), kind * (1 + len(inputs))

    def execute(wave: Wave) -> None:
        parts = [[-reader(wave) if negative else reader(wave) for reader, negative in part] for part in read]
        if wave.mode.plain or kind in "ws":
            results = [compute(*part) for part in parts]
        else:
            results = [moded(wave.mode, compute, kinds, part) for part in parts]
        if wide:
            for word, result in enumerate(results):
                put(wave, index + word, np.ascontiguousarray(result).view(np.uint32))
            return
        low, high = (np.ascontiguousarray(result).view(np.uint16).astype(np.uint32) for result in results)
        put(wave, index, low | high << _U32(16))

    return execute


def _packed_move(instruction: Instruction) -> Execute:
    """v_pk_mov_b32: the low word from the first operand, the high word from the second.

    Only op_sel selects the word of an operand.
    """
    operands, chosen = instruction.operands, instruction.modifiers.switches("op_sel")
    instruction.modifiers.get("op_sel_hi")
    index, read = place(operands[0]), [_word(text, "u", chosen[at]) for at, text in enumerate(operands[1:3])]

    def execute(wave: Wave) -> None:
        low, high = (reader(wave).copy() for reader in read)
        put(wave, index, low)
        put(wave, index + 1, high)

    return execute


def _word(text: str, kind: str, half: int) -> Callable[[Wave], Array]:
    """One of the two words of a register pair. For a constant, both words are the constant."""
    negative, text = text.startswith("-v"), text.removeprefix("-") if text.startswith("-v") else text
    if span := register(text):
        text = f"{span[0]}{span[1] + half}"
    read = source(text, kind)
    return (lambda wave: -read(wave)) if negative else read


_MAKERS: dict[str, Callable[[Instruction], Execute]] = {
    "readfirstlane_b32": _first_lane,
    "readlane_b32": _read_lane,
    "writelane_b32": _write_lane,
    "permlanex16_b32": _other_row,
    "permlane16_b32": _other_row,
    "permlane32_swap_b32": _half_swap,
    "permlane16_swap_b32": _half_swap,
    "swap_b32": _swap,
    "mbcnt_lo_u32_b32": _below,
    "mbcnt_hi_u32_b32": _below,
    "mad_u64_u32": _mad_wide,
    "mad_i64_i32": _mad_wide,
    "mad_co_u64_u32": _mad_wide,
    "mad_co_i64_i32": _mad_wide,
    "div_scale_f32": _div_scale,
    "div_scale_f64": _div_scale,
    "div_fmas_f32": _div_fmas,
    "div_fmas_f64": _div_fmas,
    **dict.fromkeys(
        ("add_co_u32", "addc_co_u32", "sub_co_u32", "subb_co_u32", "subrev_co_u32", "subbrev_co_u32",
         "add_co_ci_u32", "sub_co_ci_u32", "subrev_co_ci_u32"), _carry),
}  # fmt: skip
