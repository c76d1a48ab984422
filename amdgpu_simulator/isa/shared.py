"""Instructions of the shared memory of a work group (`lds`)."""

from __future__ import annotations

import re

import numpy as np

from amdgpu_simulator.isa.arrivals import Form, arrive
from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.global_memory import MemoryFaultError
from amdgpu_simulator.isa.memory import FORMS, from_registers, offset_of
from amdgpu_simulator.isa.queues import Operation
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import Wave, place, source

_U32 = np.uint32


def decode(instruction: Instruction, _target: Target) -> Execute | None:
    """The function that executes an instruction of shared memory, or None for another instruction."""
    if not instruction.mnemonic.startswith("ds_"):
        return None
    name = instruction.mnemonic.removeprefix("ds_").replace("load", "read").replace("store", "write")
    name = name.replace("_2addr_stride64", "2st64").replace("_2addr", "2")
    operands = instruction.operands
    if name in ("bpermute_b32", "permute_b32"):
        return _permute(instruction, name)
    if name in ("read_b64_tr_b16", "read_b64_tr_b8"):
        return _transposed(instruction)
    if name == "swizzle_b32":
        return _swizzle(instruction)
    found = re.fullmatch(r"(read|write)(2(?:st64)?)?_(\w+)", name)
    if found is None:
        raise NotImplementedError("not known")
    action, twice, form_name = found.groups()
    form = FORMS[form_name]
    size = form[0]
    whole = (2 * size, False, -1) if twice else form
    if twice:
        step = size * (64 if "st64" in twice else 1)
        offsets = [instruction.modifiers.integer(f"offset{part}") * step for part in (0, 1)]
    else:
        offsets = [offset_of(instruction)]
    steps = np.concatenate([offset + np.arange(size) for offset in offsets])
    address = source(operands[1 if action == "read" else 0], "u")
    data = place(operands[0]) if action == "read" else 0
    written = [place(text) for text in operands[1:]] if action == "write" else []

    def execute(wave: Wave) -> None:
        lanes = wave.active()
        if not len(lanes):
            wave.queues.shared.append(Operation())
            return
        found = address(wave)
        base = (found[lanes] if len(found) > 1 else np.repeat(found, len(lanes))).view(np.int32).astype(np.int64)
        places = base[:, None] + steps
        try:
            if action == "read":
                _read(wave, instruction.text, data, places, lanes, whole)
                return
            for part, index in enumerate(written):
                content = from_registers(wave, index, lanes, form)
                wave.shared.store(wave.index, places[:, part * size : (part + 1) * size], content)
        except MemoryFaultError as fault:
            raise MemoryFaultError(f"{instruction.text}: {fault}") from None
        wave.queues.shared.append(Operation(touch=lambda: wave.shared.touch(wave.index, places, writes=True)))

    return execute


def _read(wave: Wave, text: str, index: int, places: Array, lanes: Array, form: Form) -> None:
    """Loads bytes of shared memory, (lanes, bytes), into registers."""
    shared = wave.shared
    data = shared.load(wave.index, places)
    touch = lambda: shared.touch(wave.index, places, writes=False)  # noqa: E731
    arrive(wave, (wave.queues.shared,), text, index, data, lanes, form, touch, places)


def _exchange(wave: Wave, text: str, index: int, values: Array) -> None:
    """ds_bpermute_b32 and similar: each lane reads a word of another lane.

    The unit of shared memory moves the words, and accesses no memory.
    """
    lanes = wave.active()
    data = np.ascontiguousarray(values[lanes]).view(np.uint8).reshape(-1, 4)
    arrive(wave, (wave.queues.shared,), text, index, data, lanes, FORMS["b32"])


def _permute(instruction: Instruction, name: str) -> Execute:
    destination, address, data = instruction.operands
    index, where, read = place(destination), source(address, "u"), source(data, "u")
    offset = offset_of(instruction)

    def execute(wave: Wave) -> None:
        lane = ((np.broadcast_to(where(wave), wave.count) + _U32(offset)) // _U32(4)).astype(np.int64) % wave.count
        values = np.where(wave.lanes, read(wave), _U32(0))
        if name == "permute_b32":
            moved = np.zeros(wave.count, np.uint32)
            moved[lane[wave.lanes]] = values[wave.lanes]
            values, lane = moved, np.arange(wave.count)
        _exchange(wave, instruction.text, index, values[lane])

    return execute


def _transposed(instruction: Instruction) -> Execute:
    """ds_read_b64_tr_b16 (b8): 16 lanes read 4 (8) rows of 16 elements, and each lane gets a column."""
    index, address, offset = (
        place(instruction.operands[0]),
        source(instruction.operands[1], "u"),
        offset_of(instruction),
    )
    dtype, count = (np.uint16, 4) if instruction.mnemonic.endswith("16") else (np.uint8, 8)

    def execute(wave: Wave) -> None:
        if not wave.full:
            raise NotImplementedError(f"{instruction.text} with inactive lanes")
        places = (address(wave).astype(np.int64) + offset)[:, None] + np.arange(8)
        shared = wave.shared
        rows = shared.load(wave.index, places).view(dtype).reshape(-1, count, 16)  # (group, row, column)
        columns = np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(wave.count, count).view(np.uint8)
        lanes = np.arange(wave.count)
        arrive(
            wave, (wave.queues.shared,), instruction.text, index, columns, lanes, FORMS["b64"],
            lambda: shared.touch(wave.index, places, writes=False), places,
        )  # fmt: skip

    return execute


def _swizzle(instruction: Instruction) -> Execute:
    """ds_swizzle_b32 with a named pattern, on groups of n lanes: SWAP exchanges groups; REVERSE and BROADCAST act
    within a group.
    """
    match = re.fullmatch(
        r"swizzle\((SWAP|REVERSE|BROADCAST|BITMASK_PERM),\"?([\w,]+)\"?\)", instruction.modifiers["offset"]
    )
    if match is None or match[1] == "BITMASK_PERM":
        raise NotImplementedError("not known")
    pattern, numbers = match[1], [int(number) for number in match[2].split(",")]
    index, read = place(instruction.operands[0]), source(instruction.operands[1], "u")

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        if pattern == "SWAP":
            lane ^= numbers[0]
        elif pattern == "REVERSE":
            lane ^= numbers[0] - 1
        else:
            lane = lane // numbers[0] * numbers[0] + numbers[1]
        _exchange(wave, instruction.text, index, np.where(wave.lanes, read(wave), _U32(0))[lane])

    return execute
