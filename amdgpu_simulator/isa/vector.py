"""Vector instructions (VOP1, VOP2, VOP3, VOPC) that work lane by lane, with what SDWA and DPP add to them."""

from __future__ import annotations

import re
from collections.abc import Callable

import numpy as np

from amdgpu_simulator.isa.arithmetic import COMPARISONS, OPERATIONS, classes, half_bits, saturated
from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import (
    Array,
    Read,
    Wave,
    Write,
    bits,
    mask,
    place,
    put,
    register,
    scalar,
    signs,
    source,
    target,
)

_U32 = np.uint32
_KINDS = {"f32": "f", "i32": "i", "u32": "u", "b32": "u", "i64": "I", "u64": "U", "f64": "F", "f16": "h", "u16": "u"}
_SELECTIONS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}


# What SDWA writes of a result where it writes all of it.
_WHOLE = {("dst_sel", "DWORD"), ("dst_unused", "UNUSED_PAD")}


def decode(instruction: Instruction, gpu: Target) -> Execute | None:
    """The function that executes an instruction of a GPU target, or None for what is not in this file."""
    name = _name(instruction)
    if found := re.fullmatch(r"cmp(x?)_(\w+?)_([fiubB]\d\d)", name):
        return _comparison(instruction, found[2], _KINDS[found[3]], bool(found[1]))
    if name == "cndmask_b32":
        return _choice(instruction)
    if name in OPERATIONS:
        return _tabled(instruction, gpu)
    if name.startswith("s_") and name[2:] in OPERATIONS:
        return _of_scalars(instruction, name[2:])
    return None


def _name(instruction: Instruction) -> str:
    """The operation by its name in gfx9. Later targets have names that say: an integer has no carry, a float ignores
    NaN.
    """
    name = instruction.mnemonic.removeprefix("v_").removeprefix("dual_")
    return name.replace("_nc_", "_").replace("_num_", "_")


def _tabled(instruction: Instruction, gpu: Target) -> Execute:
    name = _name(instruction)
    if name.startswith("dot2") and gpu.flushes_subnormals:
        raise NotImplementedError(f"{instruction.text}: {gpu.name} flushes subnormals here, which is not modelled")
    kinds, compute = OPERATIONS[name]
    modifiers = dict(instruction.modifiers)
    halves = [int(bit) for bit in modifiers.pop("op_sel", "").strip("[]").split(",") if bit] or [0] * 4
    operands = instruction.operands
    inputs = operands[1:]
    if kinds.endswith("d"):
        kinds = kinds[:-1] + kinds[0]
        inputs = (*inputs, operands[0])
    read = [source(text, kind, half) for text, kind, half in zip(inputs, kinds[1:], halves, strict=False)]
    if len(read) != len(kinds) - 1:
        raise NotImplementedError(instruction.text)
    part, rest = modifiers.pop("dst_sel", "DWORD"), modifiers.pop("dst_unused", "UNUSED_PAD")
    read = _selected(instruction, read, modifiers)
    if "dpp" in modifiers:
        return _moved(instruction, read, modifiers, compute, kinds)
    # The last of VOP3's switches names the half that a result of 16 bits goes to.
    upper = kinds[0] == "h" and len(halves) > len(read) and bool(halves[len(read)])
    write = target(operands[0] + (".h" if upper else ""), kinds[0], keep=gpu.generation.keeps_half or upper)
    if part != "DWORD":
        write = _part(operands[0], kinds[0], part, rest)
    scale = {"mul": float(modifiers.pop("mul", 1)), "div": 1 / float(modifiers.pop("div", 1))}
    factor = scale["mul"] * scale["div"]
    clamp = modifiers.pop("clamp", None) is not None
    _none_left(instruction, modifiers)
    if clamp and kinds[0] not in "f":
        raise NotImplementedError(instruction.text)

    if clamp or factor != 1:
        plain = compute
        compute = lambda *values: plain(*values) * np.float32(factor)  # noqa: E731
        if clamp:
            return lambda wave: write(wave, saturated(compute(*[one(wave) for one in read])))
    if len(read) == 2:
        left, right = read
        return lambda wave: write(wave, compute(left(wave), right(wave)))
    return lambda wave: write(wave, compute(*[one(wave) for one in read]))


def _of_scalars(instruction: Instruction, name: str) -> Execute:
    """v_s_exp_f32 and the like of gfx12: from a scalar register into a scalar register."""
    destination, read, compute = (
        _mask_register(instruction.operands[0])[0],
        source(instruction.operands[1], "f"),
        OPERATIONS[name][1],
    )
    _none_left(instruction, instruction.modifiers)
    return lambda wave: wave.set_scalar(destination, int(compute(read(wave)).view(np.uint32)[0]))


def _none_left(instruction: Instruction, modifiers: dict[str, str]) -> None:
    if modifiers:
        raise NotImplementedError(f"{instruction.text}: modifiers {', '.join(modifiers)}")


def _selected(instruction: Instruction, read: list[Read], modifiers: dict[str, str]) -> list[Read]:
    """Operands of an SDWA instruction, which takes a byte or a half of each register."""
    if modifiers.pop("sdwa", None) is None:
        return read
    found = []
    half = "f16" in instruction.mnemonic.rpartition("_f32_")[2]
    for index, plain in enumerate(read):
        choice = modifiers.pop(f"src{index}_sel", "DWORD")
        text = instruction.operands[index - len(read)]
        extend = text.startswith("sext(")
        if choice == "DWORD" and not extend:
            found.append(plain)
            continue
        bare = text[5:-1] if extend else text.lstrip("-").strip("|")
        start, width = _SELECTIONS.get(choice, (0, 32))
        chosen = _selection(source(bare, "u"), start, width, extend, half)
        found.append(chosen if extend else signs(chosen, text))
    return found


def _selection(whole: Read, start: int, width: int, extend: bool, half: bool) -> Read:
    def read(wave: Wave) -> Array:
        value = whole(wave) << _U32(32 - start - width)
        value = (value.view(np.int32) >> (32 - width)).view(np.uint32) if extend else value >> _U32(32 - width)
        return value.astype(np.uint16).view(np.float16) if half else value

    return read


def _part(text: str, kind: str, part: str, rest: str) -> Write:
    """Writes a byte or half of a register; the rest of it is zero, or kept."""
    start, width = _SELECTIONS[part]
    index = place(text)
    if kind not in "uih" or rest not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise NotImplementedError(f"{part} {rest} of {kind}")
    bits_ = _U32(((1 << width) - 1) << start)

    def write(wave: Wave, value: Array) -> None:
        content = half_bits(value) if kind == "h" else np.ascontiguousarray(value).view(np.uint32)
        content = content << _U32(start) & bits_
        put(wave, index, content | wave.v[index] & ~bits_ if rest == "UNUSED_PRESERVE" else content)

    return write


def _moved(
    instruction: Instruction, read: list[Read], modifiers: dict[str, str], compute: Callable[..., Array], kinds: str
) -> Execute:
    """A DPP instruction: its first operand comes from another lane of a row of 16."""
    modifiers.pop("dpp")
    rows, banks = (int(modifiers.pop(name, "0xf"), 0) for name in ("row_mask", "bank_mask"))
    bound = modifiers.pop("bound_ctrl", None) is not None  # its number says nothing: it is there or not
    (control, value) = modifiers.popitem()
    _none_left(instruction, modifiers)
    write_index = place(instruction.operands[0])

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        origin = _origin(control, value, lane)
        inside = (origin >= 0) & (origin < wave.count)
        inside &= wave.lanes[np.where(inside, origin, 0)]  # a lane that is not active cannot be read either
        active = wave.lanes & (np.array(rows) >> lane // 16 & 1 > 0) & (np.array(banks) >> lane % 16 // 4 & 1 > 0)
        if not bound:
            active &= inside
        inputs = [np.broadcast_to(one(wave), wave.count) for one in read]
        inputs[0] = np.where(inside, inputs[0][np.where(inside, origin, 0)], np.zeros(1, inputs[0].dtype))
        result = compute(*inputs).astype({"f": np.float32, "i": np.int32}.get(kinds[0], np.uint32)).view(np.uint32)
        np.copyto(wave.v[write_index], result, where=active)

    return execute


def _origin(control: str, value: str, lane: Array) -> Array:
    """The lane that a lane reads, outside of the wave where there is none."""
    row, inside = lane // 16 * 16, lane % 16
    if control == "quad_perm":
        chosen = np.array([int(number) for number in value.strip("[]").split(",")])
        return lane // 4 * 4 + chosen[lane % 4]
    if control == "row_ror":
        return row + (inside - int(value)) % 16
    if control in ("row_shr", "row_shl"):
        moved = inside + (-int(value) if control == "row_shr" else int(value))
        return np.where((moved >= 0) & (moved < 16), row + moved, -1)
    if control in ("row_mirror", "row_half_mirror"):
        size = 16 if control == "row_mirror" else 8
        return lane // size * size + size - 1 - lane % size
    if control == "row_share" or control == "row_newbcast":
        return row + int(value)
    if control == "row_xmask":
        return row + (inside ^ int(value))
    if control == "row_bcast":
        step = int(value) + 1
        return np.where(lane >= step, lane // step * step - 1, -1)
    raise NotImplementedError(f"DPP control {control}")


def _mask_register(text: str) -> tuple[int, int]:
    found = register(text)
    if found is None or found[0] != "s":
        raise NotImplementedError(f"{text} holds no lane mask")
    return found[1], found[2]


def _comparison(instruction: Instruction, order: str, kind: str, to_exec: bool) -> Execute:
    modifiers = dict(instruction.modifiers)
    operands = instruction.operands
    inputs = operands[-2:]
    destination = _mask_register("exec" if to_exec and len(operands) == 2 else operands[0])
    compare = classes if order == "class" else COMPARISONS[order]
    kinds = (kind, "u") if order == "class" else (kind, kind)
    read = _selected(instruction, [source(text, one) for text, one in zip(inputs, kinds, strict=True)], modifiers)
    if "u16" in instruction.mnemonic:
        read = [_selection(one, 0, 16, False, False) for one in read]
    _none_left(instruction, modifiers)
    left, right = read

    def execute(wave: Wave) -> None:
        result = mask(np.broadcast_to(compare(left(wave), right(wave)), wave.count) & wave.lanes)
        if to_exec:
            wave.set_exec(result)
        else:
            wave.set_scalar(destination[0], result, wave.count // 32)

    return execute


def _choice(instruction: Instruction) -> Execute:
    modifiers = {name: value for name, value in instruction.modifiers.items() if (name, value) not in _WHOLE}
    operands = instruction.operands
    # In a dual instruction the mask is not written down: it is VCC.
    chosen = scalar(operands[3] if len(operands) > 3 else "vcc_lo", 1)
    wide = scalar(operands[3], 2) if len(operands) > 3 else chosen
    kind = "f" if any(text.startswith(("-v", "|", "-|", "-s")) for text in operands[1:3]) else "u"
    read = [source(text, kind) for text in operands[1:3]]
    shortened = Instruction(instruction.mnemonic, operands[:3], instruction.modifiers, instruction.text)
    no, yes = _selected(shortened, read, modifiers)
    write = target(operands[0], kind)
    if "dpp" in modifiers:
        raise NotImplementedError(instruction.text)
    _none_left(instruction, modifiers)

    def execute(wave: Wave) -> None:
        lanes = bits(wide(wave) if wave.count == 64 else chosen(wave), wave.count)
        write(wave, np.where(lanes, yes(wave), no(wave)))

    return execute
