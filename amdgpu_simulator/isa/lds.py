"""The shared memory of a work group (LDS), with checks for races and for accesses outside of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.isa.global_memory import MemoryFaultError
from amdgpu_simulator.isa.queues import Operation

_U32 = np.uint32
_NOBODY = -1
_LOADING = 64  # added to the number of a wave whose load from global memory is outstanding


class Shared:
    """The shared memory of a work group, and which wave read or wrote which byte since the last barrier.

    A race: two waves touch the same byte between two barriers and one of them writes it, so their order is undefined.
    """

    def __init__(self, size: int, *, looks_for_races: bool = True) -> None:
        self.content = np.full(size, 0xFF, np.uint8)
        self._looks_for_races = looks_for_races
        self._writers = np.full(size, _NOBODY, np.int8)
        self._readers = np.zeros(size, np.uint32)
        self.accesses: list[Array] | None = None  # receives accesses for an observer: see `events`

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
        """Reads LDS at the given byte addresses for one wave. Raises MemoryFaultError for an address past the end and
        for a race.
        """
        self._check(places)
        if (others := self._written_by_others(wave, places)).any():
            self._race(places[others], wave, "reads what", "wrote")
        self.touch(wave, places, writes=False)
        return self.content[places]

    def store(self, wave: int, places: Array, data: Array) -> None:
        """Writes LDS at the given byte addresses for one wave. Raises as `load`.

        Waves may write equal values to one address. If several lanes write to one address, the last lane wins.
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

    def bring(self, wave: int, places: Array, data: Array, under_way: Iterable[Operation]) -> Operation:
        """Writes bytes that a load of a wave brings from global memory to LDS. Raises as `load`.

        The wave must not access these bytes before it has waited for the load, and other waves not before the next
        barrier. Its own outstanding reads of the old bytes (under_way) must have ended, because nothing orders the load
        after them. Without race checks, the bytes arrive when the wave waits for them.
        """
        if not self._looks_for_races:
            return Operation(lambda: self.store(wave, places, data))
        self._check_reads(wave, places, under_way)
        self.store(wave, places, data)
        self.touch(wave + _LOADING, places, writes=True)

        def finish() -> None:
            here = places[self._writers[places] == wave + _LOADING]
            self.touch(wave, here, writes=True)

        return Operation(finish, lambda: self.touch(wave + _LOADING, places, writes=True))

    def _check_reads(self, wave: int, places: Array, under_way: Iterable[Operation]) -> None:
        bytes_read = [operation.reads for operation in under_way if operation.reads is not None]
        if not bytes_read:
            return
        written = np.zeros(len(self.content), bool)
        written[places[places < len(written)]] = True
        for reads in bytes_read:
            if (hit := written[reads]).any():
                where = int(reads[hit][0])
                raise MemoryFaultError(
                    f"a race: a load brings what wave {wave} still reads: no wait for the read, at byte {where}"
                )

    def _check(self, places: Array) -> None:
        if self.accesses is not None:
            self.accesses.append(places)
        if int(places.max()) >= len(self.content) or int(places.min()) < 0:
            raise MemoryFaultError(f"byte {int(places.max())} is past the {len(self.content)} bytes of shared memory")

    def _written_by_others(self, wave: int, places: Array) -> Array:
        writers = self._writers[places]
        return (writers != wave) & (writers != _NOBODY)

    def _race(self, places: Array, wave: int, does: str, did: str) -> None:
        if not self._looks_for_races:
            return
        where = int(places[0])
        if self._writers[where] >= _LOADING:
            raise MemoryFaultError(f"wave {wave} {does} a load still brings: no wait for it, at byte {where}")
        raise MemoryFaultError(f"a race: wave {wave} {does} another wave {did} since the last barrier, at byte {where}")
