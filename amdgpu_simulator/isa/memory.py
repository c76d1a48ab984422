"""Instructions of global memory (tensors of this process) and of the lanes' private memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable
from functools import partial

import numpy as np

from amdgpu_simulator.isa.arrivals import Form, RegisterFaultError, arrive
from amdgpu_simulator.isa.assembly import Array, Instruction
from amdgpu_simulator.isa.global_memory import MemoryFaultError
from amdgpu_simulator.isa.order import Store, finish
from amdgpu_simulator.isa.queues import Counted, Operation
from amdgpu_simulator.isa.scalar import Execute
from amdgpu_simulator.isa.targets import Target
from amdgpu_simulator.isa.wave import M0, Wave, place, register, scalar, source

_U32, _U64 = np.uint32, np.uint64
_OFF = "off"


def decode(instruction: Instruction, target: Target) -> Execute | None:
    """The function that executes a memory instruction, or None for another instruction."""
    name = instruction.mnemonic
    if name.startswith(("s_load_", "s_buffer_load_")):
        return _scalar_load(instruction)
    match = re.fullmatch(r"(buffer|global|flat|scratch)_(load|store|atomic)_(lds_)?(\w+)", name)
    if match is None:
        return None
    space, action, direct, form = match.groups()
    to_shared = bool(direct) or "lds" in instruction.modifiers
    address = {"buffer": _buffer_address, "scratch": _scratch_address}.get(space, _global_address)
    return _access(instruction, action, form, address(instruction, action, to_shared), space, target, to_shared)


# Form of a load or store: (bytes, sign-extend, half of the register for 16 bits that keep the other half, or -1 for the
# whole register).
FORMS = {
    "dword": (4, False, -1), "dwordx2": (8, False, -1), "dwordx3": (12, False, -1), "dwordx4": (16, False, -1),
    "b32": (4, False, -1), "b64": (8, False, -1), "b96": (12, False, -1), "b128": (16, False, -1),
    "ubyte": (1, False, -1), "u8": (1, False, -1), "byte": (1, False, -1), "b8": (1, False, -1),
    "sbyte": (1, True, -1), "i8": (1, True, -1),
    "ushort": (2, False, -1), "u16": (2, False, -1), "short": (2, False, -1), "b16": (2, False, -1),
    "sshort": (2, True, -1), "i16": (2, True, -1),
    "short_d16": (2, False, 0), "d16_b16": (2, False, 0), "u16_d16": (2, False, 0),
    "short_d16_hi": (2, False, 1), "d16_hi_b16": (2, False, 1), "u16_d16_hi": (2, False, 1),
    "b16_d16_hi": (2, False, 1),
    "b8_d16_hi": (1, False, 1), "byte_d16_hi": (1, False, 1), "d16_hi_b8": (1, False, 1),
}  # fmt: skip
# Cache and coherence hints. Here every access is visible at once.
_HINTS = ("nt", "sc0", "sc1", "glc", "slc", "dlc", "th", "scope")


def _read_hints(instruction: Instruction) -> None:
    for name in _HINTS:
        instruction.modifiers.get(name)


def from_registers(wave: Wave, index: int, lanes: Array, form: Form) -> Array:
    size, _, half = form
    if size >= 4:
        return np.ascontiguousarray(wave.v[index : index + size // 4, lanes].T).view(np.uint8)
    value = wave.v[index, lanes] >> _U32(16 if half == 1 else 0)
    return np.ascontiguousarray(value).view(np.uint8).reshape(-1, 4)[:, :size]


# The stride of the buffer resource that stands for a wave's private memory.
PRIVATE = 0x3FFF

Address = Callable[[Wave, Array], tuple[Array, Array | None]]


def offset_of(instruction: Instruction) -> int:
    return instruction.modifiers.integer("offset")


def _global_address(instruction: Instruction, action: str, to_shared: bool) -> Address:
    """Addresses of the lanes. With a scalar base, a lane provides a 32-bit offset."""
    operands = instruction.operands
    vector = operands[0 if action == "store" or to_shared or _returns_nothing(instruction, action) else 1]
    base = operands[1] if to_shared else operands[2] if len(operands) > 2 else _OFF
    offset = offset_of(instruction)
    if base == _OFF:
        read = source(vector, "U")
        return lambda wave, lanes: ((read(wave)[lanes].astype(np.int64) + offset).astype(np.uint64), None)
    start, more = scalar(base, 2), source(vector, "u")
    return lambda wave, lanes: (
        (np.broadcast_to(more(wave), wave.count)[lanes].astype(np.int64) + (start(wave) + offset)).astype(np.uint64),
        None,
    )


def _returns_nothing(instruction: Instruction, action: str) -> bool:
    return action == "atomic" and not any(name in instruction.modifiers for name in ("sc0", "glc", "th"))


def _buffer_address(instruction: Instruction, _action: str, to_shared: bool) -> Address:
    """The addresses in a buffer resource, and the number of bytes of the resource after each address.

    The size of a resource is a number of bytes, checked word by word. For an instruction with an index it is a number
    of records, and each lane names one record.
    """
    modifiers = instruction.modifiers
    operands = instruction.operands[(0 if to_shared else 1) :]
    vector, resource, more = operands[0], scalar(operands[1], 4), scalar(operands[2])
    if "idxen" in modifiers:
        return _record_address(instruction, vector, resource, more)
    read = source(vector, "u") if "offen" in modifiers else None
    offset = offset_of(instruction)

    def address(wave: Wave, lanes: Array) -> tuple[Array, Array | None]:
        words = resource(wave)
        stride = words >> 48 & 0x3FFF
        places = np.full(wave.count, offset, np.int64)
        if read is not None:
            places = places + read(wave)
        start = more(wave)
        if stride == PRIVATE:  # the words of all lanes are interleaved, so this offset is in bytes of all lanes
            return places[lanes] + start // wave.count, None
        places = places[lanes] + start
        return (places + (words & 0xFFFFFFFFFFFF)).astype(np.uint64), (words >> 64 & 0xFFFFFFFF) - places

    return address


def _record_address(
    instruction: Instruction, vector: str, resource: Callable[[Wave], int], more: Callable[[Wave], int]
) -> Address:
    if "offen" in instruction.modifiers:
        raise NotImplementedError("not known")
    read, offset = source(vector, "u"), offset_of(instruction)

    def address(wave: Wave, lanes: Array) -> tuple[Array, Array | None]:
        words = resource(wave)
        index = np.broadcast_to(read(wave), wave.count)[lanes].astype(np.int64)
        places = (words & 0xFFFFFFFFFFFF) + index * (words >> 48 & 0x3FFF) + offset + more(wave)
        return places.astype(np.uint64), np.where(index < words >> 64 & 0xFFFFFFFF, 1 << 31, 0)

    return address


def _scratch_address(instruction: Instruction, action: str, _to_shared: bool) -> Address:
    operands = instruction.operands
    vector = operands[0 if action == "store" else 1]
    base = operands[2] if len(operands) > 2 else _OFF
    offset = offset_of(instruction)
    read = None if vector == _OFF else source(vector, "u")
    start = None if base == _OFF else scalar(base)

    def address(wave: Wave, lanes: Array) -> tuple[Array, Array | None]:
        places = np.full(wave.count, offset + (start(wave) if start else 0), np.int64)
        return (places + (read(wave) if read else 0))[lanes], None

    return address


def _access(
    instruction: Instruction, action: str, form_name: str, address: Address, space: str, target: Target, to_shared: bool
) -> Execute:
    _read_hints(instruction)
    if action == "atomic":
        return _atomic(instruction, form_name, address, space)
    form = FORMS[form_name]
    data_operand = instruction.operands[0 if action == "load" or space == "buffer" else 1]
    index = -1 if to_shared else place(data_operand)
    size = form[0]
    resource = scalar(instruction.operands[1 if to_shared else 2], 4) if space == "buffer" else None
    shared_mask = (1 << (target.shared_bytes - 1).bit_length()) - 1

    def execute(wave: Wave) -> None:
        lanes = wave.active()
        queues = _queues(wave, action, space)
        for queue in queues:
            queue.make_room()
        if not len(lanes):
            for queue in queues:
                queue.append(Operation())
            return
        addresses, room = address(wave, lanes)
        if space == "scratch" or (resource is not None and resource(wave) >> 48 & 0x3FFF == PRIVATE):
            if int(addresses.max()) + size > wave.private.shape[1]:
                raise MemoryFaultError(
                    f"{instruction.text}: outside of the {wave.private.shape[1]} bytes of private memory"
                )
            if wave.memory.accesses is not None:
                for word in range(0, size, 4):
                    wave.memory.accesses.append((_private_addresses(wave, addresses + word, lanes), min(size, 4)))
            places = addresses[:, None] + np.arange(size)
            if action == "load":
                arrive(wave, queues, instruction.text, index, wave.private[lanes[:, None], places], lanes, form)
            else:
                wave.private[lanes[:, None], places] = from_registers(wave, index, lanes, form)
                queues[0].append(Operation())
            return
        try:
            if action == "load":
                data = np.zeros((len(lanes), size), np.uint8)
                for there, first, width in _pieces(len(lanes), size, room):
                    data[there, first : first + width] = wave.memory.load(
                        addresses[there] + _U64(first), width, wave.index
                    )
                if to_shared:
                    start = (wave.s[M0] & shared_mask) + offset_of(instruction)
                    places = (start + size * lanes)[:, None] + np.arange(size)
                    queues[0].append(wave.shared.bring(wave.index, places, data, wave.queues.shared))
                else:
                    arrive(wave, queues, instruction.text, index, data, lanes, form)
            else:
                data, stores = from_registers(wave, index, lanes, form), list[Store]()
                for there, first, width in _pieces(len(lanes), size, room):
                    piece = data[there, first : first + width]
                    stores += wave.memory.store(addresses[there] + _U64(first), piece, wave.index)
                queues[0].append(Operation(partial(finish, stores)))
                for queue in queues[1:]:
                    queue.append(Operation())
        except (MemoryFaultError, ValueError) as fault:
            raise MemoryFaultError(f"{instruction.text}: {fault}") from None

    return execute


def _queues(wave: Wave, action: str, space: str) -> tuple[Counted, ...]:
    """The queues whose counters count an access. The hardware does not know the destination of a flat address: two
    counters count it.
    """
    queue = wave.queues.vector if action == "load" else wave.queues.stores
    return (queue, wave.queues.shared) if space == "flat" else (queue,)


def _private_addresses(wave: Wave, places: Array, lanes: Array) -> Array:
    """Addresses of private memory for an observer. They are negative, and the lanes of one word are adjacent."""
    inside = (places.astype(np.int64) // 4 * wave.count + lanes) * 4
    return inside - ((wave.index + 1) << 40)


def _pieces(count: int, size: int, room: Array | None) -> Iterable[tuple[Array, int, int]]:
    """Yields (lanes, first byte, bytes) of each part of an access.

    room: bytes up to the end of a buffer. Only words inside of the buffer are accessed; the others read zero and are
    not written.
    """
    if room is None:
        yield np.ones(count, bool), 0, size
        return
    whole = room >= size
    yield whole, 0, size
    if size > 4 and not whole.all():
        for first in range(0, size, 4):
            yield ~whole & (room >= first + 4), first, 4


def _atomic(instruction: Instruction, form: str, address: Address, space: str) -> Execute:
    dtype = {"add_f32": np.float32, "add": np.uint32, "add_u32": np.uint32}.get(form)
    if dtype is None or not _returns_nothing(instruction, "atomic"):
        raise NotImplementedError("not known")
    index = place(instruction.operands[0 if space == "buffer" else 1])

    def execute(wave: Wave) -> None:
        for queue in _queues(wave, "atomic", space):
            queue.append(Operation())
        lanes = wave.active()
        addresses, room = address(wave, lanes)
        inside = np.ones(len(lanes), bool) if room is None else room >= 4
        if wave.memory.accesses is not None:
            wave.memory.accesses.append((addresses[inside], 4))
        for lane, where in zip(lanes[inside], addresses[inside], strict=True):
            start, content = wave.memory.range(int(where), 4)
            old = content[int(where) - start : int(where) - start + 4].view(dtype)
            old += wave.v[index, lane : lane + 1].view(dtype)

    return execute


def _scalar_load(instruction: Instruction) -> Execute:
    operands = instruction.operands
    size = instruction.mnemonic.rpartition("_")[2]
    words = int(size[1:]) // 32 if size.startswith("b") else int(size.partition("x")[2] or 1)
    _read_hints(instruction)
    destination = register(operands[0])
    if destination is None or instruction.mnemonic.startswith("s_buffer"):
        raise NotImplementedError("not known")
    base, more, offset = scalar(operands[1], 2), scalar(operands[2]), offset_of(instruction)
    first = destination[1]

    def execute(wave: Wave) -> None:
        address = (base(wave) + more(wave) + offset) & ~3
        start, content = wave.memory.range(address, 4 * words)
        value = int.from_bytes(content[address - start : address - start + 4 * words].tobytes(), "little")
        wave.set_scalar(first, -1, words)

        def finish() -> None:
            if wave.scalar(first, words) != (1 << 32 * words) - 1:
                raise RegisterFaultError(f"{instruction.text}: s{first} was overwritten before its load arrived")
            wave.set_scalar(first, value, words)

        wave.queues.scalar.append(Operation(finish))

    return execute
