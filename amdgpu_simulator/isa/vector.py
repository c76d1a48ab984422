"""Vector instructions (VOP1, VOP2, VOP3, VOPC) that work lane by lane, and their SDWA and DPP forms."""

from __future__ import annotations

import re
from collections.abc import Callable, Sequence

import numpy as np

from amdgpu_simulator.isa import floats
from amdgpu_simulator.isa.arithmetic import (
    COMPARISONS,
    EXTREMES,
    FLUSHING,
    HALVES_IN_A_WORD,
    OPERATIONS,
    PAIRS_OF_HALVES,
)
from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.mode import Mode, flushed
from amdgpu_simulator.isa.reading import Modifiers
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
_KINDS = {"f32": "f", "i32": "i", "u32": "u", "b32": "u", "i64": "I", "u64": "U", "f64": "F", "f16": "h", "u16": "w",
          "i16": "s"}  # fmt: skip
_DTYPES = {"f": np.float32, "i": np.int32, "u": np.uint32, "h": np.float16, "w": np.uint16, "s": np.int16}
_SELECTIONS = {
    "BYTE_0": (0, 8),
    "BYTE_1": (8, 8),
    "BYTE_2": (16, 8),
    "BYTE_3": (24, 8),
    "WORD_0": (0, 16),
    "WORD_1": (16, 16),
}

Compute = Callable[..., Array]


def decode(instruction: Instruction, gpu: Target, mode: Mode) -> Execute | None:
    """The function that executes an instruction of a GPU target, or None for what is not in this file.

    mode: the register at the start of the kernel.
    """
    name = _name(instruction)
    if match := re.fullmatch(r"cmp(x?)_(\w+?)_([fiubB]\d\d)", name):
        return _comparison(instruction, match[2], _KINDS[match[3]], bool(match[1]))
    if name == "cndmask_b32":
        return _choice(instruction)
    if name in OPERATIONS or name in EXTREMES:
        return _tabled(instruction, gpu, mode)
    if name.startswith("s_") and name[2:] in OPERATIONS:
        return _of_scalars(instruction, name[2:])
    return None


def _name(instruction: Instruction) -> str:
    """Maps the names of later targets to gfx9's. Later names add that an integer operation has no carry ("_nc") or that
    a float operation ignores NaN ("_num").
    """
    name = instruction.mnemonic.removeprefix("v_").removeprefix("dual_")
    return name.replace("_nc_", "_").replace("_num_", "_")


def _operation(name: str, gpu: Target, mode: Mode) -> tuple[str, Compute]:
    """The kinds and the computation of an operation; see `arithmetic`."""
    if name in EXTREMES:
        kinds, extreme = EXTREMES[name]
        ieee = None if not gpu.generation.has_ieee_mode else mode.ieee  # gfx12 has no IEEE bit
        return kinds, lambda *values: extreme(*values, ieee)
    kinds, compute = OPERATIONS[name]
    if name in FLUSHING:
        plain = compute
        return kinds, lambda *values: flushed("f", plain(*(flushed("f", value) for value in values)))
    return kinds, compute


def _tabled(instruction: Instruction, gpu: Target, mode: Mode) -> Execute:
    name, modifiers, operands = _name(instruction), instruction.modifiers, instruction.operands
    if name.startswith("dot2") and gpu.flushes_subnormals:
        raise NotImplementedError(f"{gpu.name} flushes subnormals in this instruction, which is not implemented")
    kinds, compute = _operation(name, gpu, mode)
    halves = modifiers.switches("op_sel")
    inputs = operands[1:]
    if kinds.endswith("d"):
        kinds = kinds[:-1] + kinds[0]
        inputs = (*inputs, operands[0])
    if len(inputs) != len(kinds) - 1:
        raise NotImplementedError(f"{len(inputs)} operands")
    # The last op_sel bit of VOP3 selects the half of the register that a 16-bit result is written to.
    upper = bool(halves[len(inputs)]) if len(halves) > len(inputs) else False
    if upper and kinds[0] not in "hws":
        raise NotImplementedError("op_sel for a 32-bit result is not implemented")
    read = _readers(modifiers, inputs, kinds[1:], halves)
    if "clamp" in modifiers:
        plain, keeps_nan = compute, mode.clamp_keeps_nan and gpu.generation.has_ieee_mode
        if kinds[0] in "fhF":
            compute = lambda *values: floats.clamp(plain(*values), keeps_nan)  # noqa: E731
        elif name == "sub_u32":
            compute = lambda x, y: np.where(x > y, x - y, 0)  # noqa: E731
        else:
            raise NotImplementedError("clamp of integers")
    if "dpp" in modifiers:
        return _moved(modifiers, operands[0], read, compute, kinds)
    write = target(operands[0] + (".h" if upper else ""), kinds[0], keep=gpu.generation.keeps_half or upper)
    if (part := modifiers.get("dst_sel", "DWORD")) != "DWORD":
        write = _part(operands[0], kinds[0], part, modifiers.get("dst_unused", "UNUSED_PAD"))
    else:
        modifiers.get("dst_unused")  # nothing is unused
    return _execute(read, write, compute, kinds, name)


def _execute(read: Sequence[Read], write: Write, compute: Compute, kinds: str, name: str) -> Execute:
    """Returns the function that executes an operation. Under a MODE that flushes fp16 subnormals, an operation on
    two fp16 numbers in one word raises NotImplementedError when it is executed.
    """
    if set(kinds).isdisjoint("fhF"):  # no floating-point kind: MODE has no effect
        if len(read) == 2:
            left, right = read
            return lambda wave: write(wave, compute(left(wave), right(wave)))
        return lambda wave: write(wave, compute(*[reader(wave) for reader in read]))

    def execute(wave: Wave) -> None:
        values = [reader(wave) for reader in read]
        if wave.mode.plain:
            write(wave, compute(*values))
        elif name in HALVES_IN_A_WORD and not wave.mode.keeps_subnormal_halves:
            raise NotImplementedError("a MODE that flushes fp16 subnormals is not implemented for two fp16 in one word")
        elif name in PAIRS_OF_HALVES:
            inputs = tuple(wave.mode.input(kind, value) for kind, value in zip(kinds[1:], values, strict=True))
            write(wave, wave.mode.pair(compute(*inputs), inputs))
        else:
            write(wave, moded(wave.mode, compute, kinds, values))

    return execute


def moded(mode: Mode, compute: Compute, kinds: str, values: Sequence[Array]) -> Array:
    """The computation under a MODE that differs from numpy's arithmetic."""
    inputs = tuple(mode.input(kind, value) for kind, value in zip(kinds[1:], values, strict=True))
    return mode.result(kinds[0], compute(*inputs), inputs)


def _of_scalars(instruction: Instruction, name: str) -> Execute:
    """gfx12's v_s_exp_f32 and similar: the operand and the result are scalar registers."""
    destination, read = _mask_register(instruction.operands[0])[0], source(instruction.operands[1], "f")
    kinds, plain = OPERATIONS[name]
    compute = (lambda x: flushed("f", plain(flushed("f", x)))) if name in FLUSHING else plain

    def execute(wave: Wave) -> None:
        value = moded(wave.mode, compute, kinds, (read(wave),))
        wave.set_scalar(destination, int(value.view(np.uint32)[0]))

    return execute


def _readers(modifiers: Modifiers, operands: Sequence[str], kinds: str, halves: Sequence[int]) -> list[Read]:
    """A function for each operand that reads it as its kind.

    SDWA selects a byte or a half of a register, op_sel a half.
    """
    if "sdwa" not in modifiers:
        return [source(text, kind, half) for text, kind, half in zip(operands, kinds, halves, strict=False)]
    readers = []
    for index, (text, kind) in enumerate(zip(operands, kinds, strict=True)):
        choice = modifiers.get(f"src{index}_sel", "DWORD")
        extend = text.startswith("sext(")
        if choice == "DWORD" and not extend:
            readers.append(source(text, kind))
            continue
        if kind not in _DTYPES or (kind == "f" and choice != "DWORD"):
            raise NotImplementedError(f"{choice} is not implemented for an operand of kind {kind}")
        start, width = _SELECTIONS.get(choice, (0, 32))
        chosen = _selection(source(_bare(text), "u"), start, width, extend, kind)
        readers.append(signs(chosen, text) if kind in "fh" else chosen)
    return readers


def _bare(text: str) -> str:
    """The register of an operand, without its sign, absolute value or extension."""
    return text.removeprefix("sext(").removesuffix(")").lstrip("-").strip("|")


def _selection(whole: Read, start: int, width: int, extend: bool, kind: str) -> Read:
    dtype = _DTYPES[kind]

    def read(wave: Wave) -> Array:
        value = whole(wave) << _U32(32 - start - width)
        value = (value.view(np.int32) >> (32 - width)).view(np.uint32) if extend else value >> _U32(32 - width)
        return value.astype(np.uint16).view(dtype) if kind in "hws" else value.view(dtype)

    return read


def _part(text: str, kind: str, part: str, rest: str) -> Write:
    """Writes a byte or half of a register. The other bits become zero or are kept."""
    start, width = _SELECTIONS[part]
    index = place(text)
    if kind not in "uihws" or rest not in ("UNUSED_PAD", "UNUSED_PRESERVE"):
        raise NotImplementedError(f"{part} {rest} of {kind}")
    bits_ = _U32(((1 << width) - 1) << start)

    def write(wave: Wave, value: Array) -> None:
        content = np.ascontiguousarray(value).view(np.uint16 if kind in "hws" else np.uint32).astype(np.uint32)
        content = content << _U32(start) & bits_
        put(wave, index, content | wave.v[index] & ~bits_ if rest == "UNUSED_PRESERVE" else content)

    return write


_CONTROLS = ("quad_perm", "row_ror", "row_shr", "row_shl", "row_mirror", "row_half_mirror", "row_share", "row_newbcast",
             "row_xmask", "row_bcast")  # fmt: skip


def _moved(modifiers: Modifiers, destination: str, read: list[Read], compute: Compute, kinds: str) -> Execute:
    """A DPP instruction: its first operand comes from another lane of a row of 16."""
    if set(kinds) - set("fiu"):
        raise NotImplementedError("DPP is implemented for 32-bit operands only")
    rows, banks = (modifiers.integer(name, 0xF) for name in ("row_mask", "bank_mask"))
    bound = "bound_ctrl" in modifiers  # its value is ignored
    controls = [name for name in _CONTROLS if name in modifiers]
    if len(controls) != 1:
        raise NotImplementedError("DPP without exactly one known control")
    control, value = controls[0], modifiers[controls[0]]
    write_index, dtype = place(destination), _DTYPES[kinds[0]]

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        origin = _origin(control, value, lane)
        inside = (origin >= 0) & (origin < wave.count)
        inside &= wave.lanes[np.where(inside, origin, 0)]  # an inactive lane cannot be read either
        active = wave.lanes & (np.array(rows) >> lane // 16 & 1 > 0) & (np.array(banks) >> lane % 16 // 4 & 1 > 0)
        if not bound:
            active &= inside
        inputs = [np.broadcast_to(reader(wave), wave.count) for reader in read]
        inputs[0] = np.where(inside, inputs[0][np.where(inside, origin, 0)], np.zeros(1, inputs[0].dtype))
        result = compute(*inputs) if wave.mode.plain else moded(wave.mode, compute, kinds, inputs)
        np.copyto(wave.v[write_index], result.astype(dtype).view(np.uint32), where=active)

    return execute


def _origin(control: str, value: str, lane: Array) -> Array:
    """For each lane, the number of the lane that it reads. A number outside of the wave means that it reads none."""
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
    span = register(text)
    if span is None or span[0] != "s":
        raise NotImplementedError(f"{text} holds no lane mask")
    return span[1], span[2]


def _comparison(instruction: Instruction, order: str, kind: str, to_exec: bool) -> Execute:
    operands = instruction.operands
    destination = _mask_register("exec" if to_exec and len(operands) == 2 else operands[0])
    inputs = operands[-2:]
    compare = floats.classes if order == "class" else COMPARISONS[order]
    kinds = kind + ("u" if order == "class" else kind)
    left, right = _readers(instruction.modifiers, inputs, kinds, instruction.modifiers.switches("op_sel"))
    floating = kind in "fhF" and order != "class"

    def execute(wave: Wave) -> None:
        values = left(wave), right(wave)
        if floating and not wave.mode.plain:
            values = wave.mode.input(kind, values[0]), wave.mode.input(kind, values[1])
        result = mask(compare(*values) & wave.lanes)
        if to_exec:
            wave.set_exec(result)
        else:
            wave.set_scalar(destination[0], result, wave.count // 32)

    return execute


def _choice(instruction: Instruction) -> Execute:
    modifiers, operands = instruction.modifiers, instruction.operands
    # A dual instruction does not name the mask, which is always VCC.
    lanes_of = operands[3] if len(operands) > 3 else "vcc_lo"
    chosen, wide = scalar(lanes_of, 1), scalar(lanes_of, 2)
    inputs = operands[1:3]
    kind = "f" if any(text.startswith(("-v", "|", "-|", "-s")) for text in inputs) else "u"
    no, yes = _readers(modifiers, inputs, kind * 2, [0] * 2)
    if modifiers.get("dst_sel", "DWORD") != "DWORD":
        raise NotImplementedError(f"dst_sel:{modifiers['dst_sel']}")
    modifiers.get("dst_unused")  # nothing is unused
    write = target(operands[0], kind)

    def execute(wave: Wave) -> None:
        lanes = bits(wide(wave) if wave.count == 64 else chosen(wave), wave.count)
        write(wave, np.where(lanes, yes(wave), no(wave)))

    return execute
