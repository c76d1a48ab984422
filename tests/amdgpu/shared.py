"""The shared memory of a work group (LDS) and its instructions."""

from __future__ import annotations

import re

import numpy as np

from amdgpu.assembly import Instruction
from amdgpu.memory import FORMS, MemoryFaultError, from_registers, offset_of, to_registers
from amdgpu.scalar import Execute
from amdgpu.wave import Array, Wave, place, put, source

_U32 = np.uint32
_NOBODY = -1


class Shared:
    """The shared memory of a work group, and who read and wrote what of it since the last barrier: two waves that
    touch the same byte between two barriers, one of them to change it, do so in an order that nobody knows."""

    def __init__(self, size: int) -> None:
        self.content = np.full(size, 0xFF, np.uint8)
        self._writers = np.full(size, _NOBODY, np.int8)
        self._readers = np.zeros(size, np.uint32)

    def barrier(self) -> None:
        self._writers.fill(_NOBODY)
        self._readers.fill(0)

    def load(self, wave: int, places: Array) -> Array:
        """The bytes at some places, for a wave. Raises MemoryFaultError beyond the end and for a race."""
        self._check(places)
        writers = self._writers[places]
        if ((writers != wave) & (writers != _NOBODY)).any():
            self._race(places, writers, wave, "reads what", "wrote")
        self._readers[places] |= _U32(1 << wave)
        return self.content[places]

    def store(self, wave: int, places: Array, data: Array) -> None:
        """Writes some bytes for a wave. Raises as `load`; waves may write the same value to the same place. Of lanes
        that write to one place the last one's value is there, whatever the others'."""
        self._check(places)
        writers, before = self._writers[places], self.content[places]
        self.content[places] = data
        changes = self.content[places] != before
        if ((writers != wave) & (writers != _NOBODY) & changes).any():
            self._race(places, writers, wave, "writes what", "wrote")
        others = self._readers[places] & ~_U32(1 << wave)
        if ((others != 0) & changes).any():
            self._race(places, np.where(others != 0, 0, _NOBODY), wave, "writes what", "read")
        self._writers[places] = wave

    def _check(self, places: Array) -> None:
        if int(places.max()) >= len(self.content) or int(places.min()) < 0:
            raise MemoryFaultError(f"byte {int(places.max())} of {len(self.content)} of shared memory")

    def _race(self, places: Array, writers: Array, wave: int, does: str, did: str) -> None:
        where = int(places[(writers != wave) & (writers != _NOBODY)][0])
        raise MemoryFaultError(f"a race: wave {wave} {does} another one {did} since the last barrier, at byte {where}")


def decode(instruction: Instruction, _target: str) -> Execute | None:
    """The function that executes an instruction of shared memory, or None for another one."""
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
    if found is None or set(instruction.modifiers) - {"offset", "offset0", "offset1"}:
        raise NotImplementedError(instruction.text)
    action, twice, form_name = found.groups()
    form = FORMS[form_name]
    size = form[0]
    if twice:
        step = size * (64 if "st64" in twice else 1)
        offsets = [int(instruction.modifiers.get(f"offset{part}", "0"), 0) * step for part in (0, 1)]
    else:
        offsets = [offset_of(instruction)]
    address = source(operands[1 if action == "read" else 0], "u")
    data = place(operands[0]) if action == "read" else 0
    written = [place(text) for text in operands[1:]] if action == "write" else []

    def execute(wave: Wave) -> None:
        lanes = np.flatnonzero(wave.lanes)
        if not len(lanes):
            return
        base = np.broadcast_to(address(wave), wave.count)[lanes].view(np.int32).astype(np.int64)
        for part, offset in enumerate(offsets):
            places = (base + offset)[:, None] + np.arange(size)
            try:
                if action == "read":
                    to_registers(wave, data + part * size // 4, wave.shared.load(wave.index, places), lanes, form)
                else:
                    content = from_registers(wave, written[part], lanes, form)
                    wave.shared.store(wave.index, places, content)
            except MemoryFaultError as fault:
                raise MemoryFaultError(f"{instruction.text}: {fault}") from None

    return execute


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
        put(wave, index, values[lane])

    return execute


def _transposed(instruction: Instruction) -> Execute:
    """ds_read_b64_tr_b16 (b8): sixteen lanes read four (eight) rows of sixteen; each gets a column."""
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
        rows = wave.shared.load(wave.index, places).view(dtype).reshape(-1, count, 16)  # (group, row, column)
        columns = np.ascontiguousarray(rows.transpose(0, 2, 1)).reshape(wave.count, count)
        wave.v[index : index + 2] = columns.view(np.uint32).T

    return execute


def _swizzle(instruction: Instruction) -> Execute:
    """ds_swizzle_b32 with a named pattern: SWAP changes groups of n lanes, REVERSE and BROADCAST work in groups."""
    found = re.fullmatch(
        r"swizzle\((SWAP|REVERSE|BROADCAST|BITMASK_PERM),\"?([\w,]+)\"?\)", instruction.modifiers["offset"]
    )
    if found is None or found[1] == "BITMASK_PERM":
        raise NotImplementedError(instruction.text)
    pattern, numbers = found[1], [int(number) for number in found[2].split(",")]
    index, read = place(instruction.operands[0]), source(instruction.operands[1], "u")

    def execute(wave: Wave) -> None:
        lane = np.arange(wave.count)
        if pattern == "SWAP":
            lane ^= numbers[0]
        elif pattern == "REVERSE":
            lane ^= numbers[0] - 1
        else:
            lane = lane // numbers[0] * numbers[0] + numbers[1]
        put(wave, index, np.where(wave.lanes, read(wave), _U32(0))[lane])

    return execute
