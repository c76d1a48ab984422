"""The shared memory of a work group (LDS) and its instructions."""

from __future__ import annotations

import re

import numpy as np

from amdgpu_simulator.isa.arrivals import Form, arrive
from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.memory import FORMS, MemoryFaultError, from_registers, offset_of
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.waits import Operation
from amdgpu_simulator.isa.wave import Array, Wave, place, source

_U32 = np.uint32
_NOBODY = -1
_LOADING = 64  # added to the number of the wave whose load from global memory is under way


class Shared:
    """The shared memory of a work group, and which wave read or wrote which byte since the last barrier.

    A race: two waves touch the same byte between two barriers and one of them writes it, so nobody knows the order.
    """

    def __init__(self, size: int, *, looks_for_races: bool = True) -> None:
        self.content = np.full(size, 0xFF, np.uint8)
        self._looks_for_races = looks_for_races
        self._writers = np.full(size, _NOBODY, np.int8)
        self._readers = np.zeros(size, np.uint32)
        self.accesses: list[Array] | None = None  # where an observer wants them: see `events`

    def barrier(self) -> None:
        self._writers.fill(_NOBODY)
        self._readers.fill(0)

    def touch(self, wave: int, places: Array, *, writes: bool) -> None:
        """Marks bytes as read or written by a wave since the last barrier."""
        if writes:
            self._writers[places] = wave
        else:
            self._readers[places] |= _U32(1 << wave)

    def load(self, wave: int, places: Array) -> Array:
        """The bytes at some places, for a wave. Raises MemoryFaultError beyond the end and for a race."""
        self._check(places)
        if (others := self._written_by_others(wave, places)).any():
            self._race(places[others], wave, "reads what", "wrote")
        self.touch(wave, places, writes=False)
        return self.content[places]

    def store(self, wave: int, places: Array, data: Array) -> None:
        """Writes some bytes for a wave. Raises as `load`.

        Waves may write the same value to the same place. Where several lanes write to one place, the last lane wins.
        """
        self._check(places)
        before = self.content[places]
        self.content[places] = data
        changes = self.content[places] != before
        if (others := self._written_by_others(wave, places) & changes).any():
            self._race(places[others], wave, "writes what", "wrote")
        if (others := (self._readers[places] & ~_U32(1 << wave) != 0) & changes).any():
            self._race(places[others], wave, "writes what", "read")
        self.touch(wave, places, writes=True)

    def bring(self, waiting: Wave, places: Array, data: Array) -> Operation:
        """Writes bytes that a load of a wave brings from global memory. Raises as `load`.

        The wave itself must not touch them before it has waited for the load, and other waves not before the next
        barrier. Its own reads of the old bytes must be done, because nothing orders them and the load. Where no races
        are looked for, the bytes arrive when the wave waits for them.
        """
        wave = waiting.index
        if not self._looks_for_races:
            return Operation(lambda: self.store(wave, places, data))
        self._check_reads(waiting, places)
        self.store(wave, places, data)
        self.touch(wave + _LOADING, places, writes=True)

        def finish() -> None:
            here = places[self._writers[places] == wave + _LOADING]
            self.touch(wave, here, writes=True)

        return Operation(finish, lambda: self.touch(wave + _LOADING, places, writes=True))

    def _check_reads(self, wave: Wave, places: Array) -> None:
        under_way = [operation.reads for operation in wave.queues.shared if operation.reads is not None]
        if not under_way:
            return
        written = np.zeros(len(self.content), bool)
        written[places[places < len(written)]] = True
        for reads in under_way:
            if (hit := written[reads]).any():
                where = int(reads[hit][0])
                raise MemoryFaultError(
                    f"a race: a load brings what wave {wave.index} still reads: no wait for the read, at byte {where}"
                )

    def _check(self, places: Array) -> None:
        if self.accesses is not None:
            self.accesses.append(places)
        if int(places.max()) >= len(self.content) or int(places.min()) < 0:
            raise MemoryFaultError(f"byte {int(places.max())} of {len(self.content)} of shared memory")

    def _written_by_others(self, wave: int, places: Array) -> Array:
        writers = self._writers[places]
        return (writers != wave) & (writers != _NOBODY)

    def _race(self, places: Array, wave: int, does: str, did: str) -> None:
        if not self._looks_for_races:
            return
        where = int(places[0])
        if self._writers[where] >= _LOADING:
            raise MemoryFaultError(f"wave {wave} {does} a load still brings: no wait for it, at byte {where}")
        raise MemoryFaultError(f"a race: wave {wave} {does} another one {did} since the last barrier, at byte {where}")


def decode(instruction: Instruction, _target: Target) -> Execute | None:
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
    address = source(operands[1 if action == "read" else 0], "u")
    data = place(operands[0]) if action == "read" else 0
    written = [place(text) for text in operands[1:]] if action == "write" else []

    def execute(wave: Wave) -> None:
        lanes = np.flatnonzero(wave.lanes)
        if not len(lanes):
            wave.queues.shared.append(Operation())
            return
        base = np.broadcast_to(address(wave), wave.count)[lanes].view(np.int32).astype(np.int64)
        places = np.concatenate([(base + offset)[:, None] + np.arange(size) for offset in offsets], axis=1)
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
    """Bytes of shared memory, (lanes, bytes), to registers."""
    shared = wave.shared
    data = shared.load(wave.index, places)
    touch = lambda: shared.touch(wave.index, places, writes=False)  # noqa: E731
    arrive(wave, (wave.queues.shared,), text, index, data, lanes, form, touch, places)


def _exchange(wave: Wave, text: str, index: int, values: Array) -> None:
    """ds_bpermute_b32 and the like: each lane reads a word of another lane through the hardware of shared memory."""
    lanes = np.flatnonzero(wave.lanes)
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
    """ds_swizzle_b32 with a named pattern: SWAP changes groups of n lanes, REVERSE and BROADCAST work in groups."""
    found = re.fullmatch(
        r"swizzle\((SWAP|REVERSE|BROADCAST|BITMASK_PERM),\"?([\w,]+)\"?\)", instruction.modifiers["offset"]
    )
    if found is None or found[1] == "BITMASK_PERM":
        raise NotImplementedError("not known")
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
        _exchange(wave, instruction.text, index, np.where(wave.lanes, read(wave), _U32(0))[lane])

    return execute
