"""Vector instructions that move values between lanes, carry bits, or take two values of a register pair."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import (
    Array,
    Wave,
    bits,
    mask,
    place,
    put,
    register,
    scalar,
    scalar_place,
    source,
    target,
)

_U32, _U64 = np.uint32, np.uint64


def decode(instruction: Instruction, _target: Target) -> Execute | None:
    """The function that executes an instruction, or None for what is not in this file."""
    name = instruction.mnemonic.removeprefix("v_")
    if maker := _MAKERS.get(name):
        return maker(instruction)
    if name.startswith("fma_mix"):
        return _mixed(instruction)
    if name.startswith("pk_"):
        return _packed(instruction)
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

    def execute(wave: Wave) -> None:
        chosen = low(wave) | high(wave) << 32
        lane = np.arange(wave.count)
        inside = np.array([chosen >> 4 * number & 15 for number in range(16)])[lane % 16]
        put(wave, index, read(wave)[(lane // 16 * 16 ^ (16 if crossed else 0)) + inside])

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
    """v_mbcnt_lo (hi): how many of a mask's bits lie below the lane, in its lower (upper) word."""
    index, read = place(instruction.operands[0]), source(instruction.operands[1], "u")
    before = source(instruction.operands[2], "u")
    word = 32 if "_hi" in instruction.mnemonic else 0

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        below = np.array([(1 << min(max(int(one) - word, 0), 32)) - 1 for one in lane], np.uint32)
        put(wave, index, np.bitwise_count(read(wave) & below).astype(np.uint32) + before(wave))

    return execute


def _carry(instruction: Instruction) -> Execute:
    """Additions and subtractions of 32 bits that give and take a carry for each lane."""
    name, operands = instruction.mnemonic, instruction.operands
    read = [source(text, "u") for text in operands[2:4]]
    if "subrev" in name:
        read.reverse()
    taken = scalar(operands[4], 2) if len(operands) > 4 else None
    taken32 = scalar(operands[4]) if len(operands) > 4 else None
    destination, out, sign = place(operands[0]), scalar_place(operands[1]), -1 if "sub" in name else 1

    def execute(wave: Wave) -> None:
        left, right = (np.broadcast_to(one(wave), wave.count).astype(np.int64) for one in read)
        result = left + sign * right
        if taken is not None and taken32 is not None:
            lanes = bits(taken(wave) if wave.count == 64 else taken32(wave), wave.count)
            result = result + sign * lanes.astype(np.int64)
        carried = (result < 0) | (result > 0xFFFFFFFF)
        wave.set_scalar(out, mask(carried & wave.lanes), wave.count // 32)
        put(wave, destination, (result & 0xFFFFFFFF).astype(np.uint32))

    return execute


def _mad_wide(instruction: Instruction) -> Execute:
    """v_mad_u64_u32 (i64_i32): a product of 64 bits and a sum; nobody reads its carry."""
    operands, signed = instruction.operands, "i64" in instruction.mnemonic
    left, right = (source(text, "i" if signed else "u") for text in operands[2:4])
    more, write = source(operands[4], "I" if signed else "U"), target(operands[0], "I" if signed else "U")
    dtype = np.int64 if signed else np.uint64
    return lambda wave: write(wave, left(wave).astype(dtype) * right(wave).astype(dtype) + more(wave))


def _divisor(instruction: Instruction) -> Execute:
    """v_div_scale: scales nothing here, see div_fixup in the table of `vector`."""
    kind = "F" if "f64" in instruction.mnemonic else "f"
    out, write = scalar_place(instruction.operands[1]), target(instruction.operands[0], kind)
    read = source(instruction.operands[2], kind)

    def execute(wave: Wave) -> None:
        write(wave, read(wave).copy())
        wave.set_scalar(out, 0, wave.count // 32)

    return execute


def _logic(instruction: Instruction) -> Execute:
    """v_bitop3: any function of three bits, by its truth table."""
    index, read = place(instruction.operands[0]), [source(text, "u") for text in instruction.operands[1:4]]
    table = int(instruction.modifiers.get("bitop3", "0"), 0)
    kept = _U32(0xFFFF if instruction.mnemonic.endswith("b16") else 0xFFFFFFFF)

    def execute(wave: Wave) -> None:
        result = np.zeros(1, np.uint32)
        for row in range(8):
            if table >> row & 1:
                a, b, c = (
                    one(wave) if row >> bit & 1 else ~one(wave) for one, bit in zip(read, (2, 1, 0), strict=True)
                )
                result = result | (a & b & c)
        put(wave, index, result & kept)

    return execute


def _switches(instruction: Instruction, name: str, default: int) -> list[int]:
    text = instruction.modifiers.get(name)
    return [int(bit) for bit in text.strip("[]").split(",")] if text else [default] * 3


def _mixed(instruction: Instruction) -> Execute:
    """v_fma_mix: fp32 arithmetic. Each operand is fp32 or one half of a register."""
    operands = instruction.operands
    halves, narrow = _switches(instruction, "op_sel", 0), _switches(instruction, "op_sel_hi", 0)
    if set(instruction.modifiers) - {"op_sel", "op_sel_hi", "clamp"} or "clamp" in instruction.modifiers:
        raise NotImplementedError(instruction.text)
    read = [source(t, "h" if n else "f", h) for t, h, n in zip(operands[1:], halves, narrow, strict=True)]
    index, name = place(operands[0]), instruction.mnemonic

    def execute(wave: Wave) -> None:
        a, b, c = (one(wave).astype(np.float64) for one in read)
        result = np.broadcast_to(a * b + c, wave.count)
        if name.endswith("_f32"):
            put(wave, index, result.astype(np.float32).view(np.uint32))
            return
        content = result.astype(np.float16).view(np.uint16).astype(np.uint32)
        low = name.endswith("mixlo_f16")
        kept = wave.v[index] & _U32(0xFFFF0000 if low else 0xFFFF)
        put(wave, index, kept | (content if low else content << _U32(16)))

    return execute


_PACKED: dict[str, Callable[..., Array]] = {
    "mul": lambda a, b: a * b,
    "add": lambda a, b: a + b,
    "fma": lambda a, b, c: (a.astype(np.float64) * b + c).astype(a.dtype),
    "max": np.fmax,
    "min": np.fmin,
    "mov": lambda a, b: (a, b),
}


def _packed(instruction: Instruction) -> Execute:
    """v_pk_*: two fp32 in a register pair, or two fp16 in a register."""
    operation, _, kind = instruction.mnemonic.removeprefix("v_pk_").rpartition("_")
    operands = instruction.operands
    if set(instruction.modifiers) - {"op_sel", "op_sel_hi", "neg_lo", "neg_hi"} or operation not in _PACKED:
        raise NotImplementedError(instruction.text)
    chosen = _switches(instruction, "op_sel", 0), _switches(instruction, "op_sel_hi", 1)
    if operation == "mov":  # op_sel alone says which word of either operand
        chosen = chosen[0], chosen[0]
    signs = _switches(instruction, "neg_lo", 0), _switches(instruction, "neg_hi", 0)
    wide = kind in ("f32", "b32")
    read = [
        [
            (
                _word(text, half[index], "u" if kind == "b32" else "f") if wide else source(text, "h", half[index]),
                negate[index],
            )
            for index, text in enumerate(operands[1:])
        ]
        for half, negate in zip(chosen, signs, strict=True)
    ]
    index, compute = place(operands[0]), _PACKED[operation]

    def execute(wave: Wave) -> None:
        inputs = [[-one(wave) if negative else one(wave) for one, negative in part] for part in read]
        if operation == "mov":  # the low word from the first operand, the high one from the second
            results = [inputs[0][0].copy(), inputs[1][1].copy()]
        else:
            results = [compute(*part) for part in inputs]
        if wide:
            for word, result in enumerate(results):
                put(wave, index + word, np.ascontiguousarray(result).view(np.uint32))
            return
        low, high = (np.ascontiguousarray(result).view(np.uint16).astype(np.uint32) for result in results)
        put(wave, index, low | high << _U32(16))

    return execute


def _word(text: str, half: int, kind: str) -> Callable[[Wave], Array]:
    """One of the two words of a register pair; a constant is both."""
    negative, text = text.startswith("-v"), text.removeprefix("-") if text.startswith("-v") else text
    if found := register(text):
        text = f"{found[0]}{found[1] + half}"
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
    "div_scale_f32": _divisor,
    "div_scale_f64": _divisor,
    **dict.fromkeys(
        ("add_co_u32", "addc_co_u32", "sub_co_u32", "subb_co_u32", "subrev_co_u32", "subbrev_co_u32",
         "add_co_ci_u32", "sub_co_ci_u32", "subrev_co_ci_u32"), _carry),
}  # fmt: skip
