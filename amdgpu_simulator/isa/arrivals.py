"""Loads to registers: they arrive when a wait covers them. Until then the registers hold NaN."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.isa.queues import Counted, Operation
from amdgpu_simulator.isa.wave import Wave

_U32 = np.uint32
# (bytes, sign-extend, half of the register for 16 bits that keep the other half, or -1 for the whole register)
Form = tuple[int, bool, int]
_NOT_THERE = {-1: _U32(0xFFFFFFFF), 0: _U32(0xFFFF), 1: _U32(0xFFFF0000)}


class RegisterFaultError(RuntimeError):
    """A register was overwritten before its load arrived."""


def words(data: Array, form: Form) -> Array:
    """Loaded bytes, (lanes, bytes), as registers, (registers, lanes)."""
    size, extend, half = form
    if size >= 4:
        return np.ascontiguousarray(data).view(np.uint32).T
    value = data[:, 0].astype(np.uint32)
    if size == 2:
        value |= data[:, 1].astype(np.uint32) << _U32(8)
    if extend:
        shift = 32 - 8 * size
        value = ((value << _U32(shift)).view(np.int32) >> shift).view(np.uint32)
    return (value << _U32(16) if half == 1 else value)[None]


def arrive(
    wave: Wave,
    queues: tuple[Counted, ...],
    text: str,
    index: int,
    data: Array,
    lanes: Array,
    form: Form,
    touch: Callable[[], None] | None = None,
    reads: Array | None = None,
) -> None:
    """Writes loaded bytes, (lanes, bytes), into registers when the waits for all `queues` cover the load.

    text: the instruction. touch, reads: as in `Operation`. Raises RegisterFaultError, now or when the bytes arrive, if
    another instruction writes the registers before.
    """
    values, mask = words(data, form), _NOT_THERE[form[2]]
    rows, lanes = slice(index, index + len(values)), slice(None) if wave.full else lanes
    newest = wave.newest_load[int(form[2] == 1)]
    wave.loads += 1
    number = wave.loads << 1 | (queues[0] is wave.queues.shared)
    if wave.queues.vector if number & 1 else wave.queues.shared:
        before = newest[rows, lanes]
        if np.count_nonzero((before != 0) & (before & 1 != number & 1) & (wave.v[rows, lanes] & mask == mask)):
            raise RegisterFaultError(f"{text}: v{index} waits for a load of another kind, which may arrive later")
    newest[rows, lanes] = number
    wave.v[rows, lanes] = wave.v[rows, lanes] | mask if form[2] >= 0 else mask
    left = len(queues)

    def finish() -> None:
        nonlocal left
        left -= 1
        if left:
            return
        here, mine = wave.v[rows, lanes], newest[rows, lanes] == number
        if np.count_nonzero(mine & (here & mask != mask)):
            raise RegisterFaultError(f"{text}: v{index} was overwritten before its load arrived: no wait for it")
        new, whole = here & ~mask | values if form[2] >= 0 else values, np.count_nonzero(mine) == mine.size
        wave.v[rows, lanes] = new if whole else np.where(mine, new, here)
        newest[rows, lanes] = 0 if whole else np.where(mine, 0, newest[rows, lanes])

    for queue in queues:
        queue.append(Operation(finish, touch if queue is queues[0] else None, reads))
