"""The shared memory of a work group (LDS), with checks for races and for accesses outside of it."""

from __future__ import annotations

from collections.abc import Iterable

import numpy as np

from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.isa.global_memory import MemoryFaultError
from amdgpu_simulator.isa.queues import Operation

_U32 = np.uint32
_NOBODY = -1
_ALL_ONES = 0xFFFFFFFF  # of a word of `_NOBODY`, and what memory holds at first
_LOADING = 64  # added to the number of a wave whose load from global memory is outstanding


def _words(places: Array) -> Array | None:
    """The numbers of the words that the bytes, (lanes, bytes), are, or None if a lane has no whole words."""
    if places.ndim != 2 or places.shape[1] % 4:
        return None
    first = places[:, ::4]
    return None if np.count_nonzero(first & 3) else first >> 2


def _bytes(content: Array, places: Array, words: Array | None) -> Array:
    """The bytes at these addresses in an array of words; words: `_words` of the addresses."""
    return content.view(np.uint8)[places] if words is None else content[words].view(np.uint8)


class Shared:
    """The shared memory of a work group, and which wave read or wrote which byte since the last barrier.

    A race: two waves touch the same byte between two barriers and one of them writes it, so their order is undefined.
    """

    def __init__(self, size: int, *, looks_for_races: bool = True) -> None:
        words = -(-size // 4)
        # By words: a lane accesses whole words most of the time, and numpy finds a word as fast as a byte.
        self._content = np.full(words, _ALL_ONES, np.uint32)
        self.content = self._content.view(np.uint8)[:size]
        self._looks_for_races = looks_for_races
        self._writers = np.full(words, _ALL_ONES, np.uint32)
        self._readers = np.zeros((words, 4), np.uint32)
        self.accesses: list[Array] | None = None  # receives accesses for an observer: see `events`

    def barrier(self) -> None:
        self._writers.fill(_ALL_ONES)
        self._readers.fill(0)

    def touch(self, wave: int, places: Array, *, writes: bool) -> None:
        """Marks bytes as read or written by a wave since the last barrier."""
        words = _words(places)
        if writes and words is None:
            self._writers.view(np.int8)[places] = wave
        elif writes:
            self._writers[words] = wave * 0x01010101
        elif words is None:
            self._readers.reshape(-1)[places] |= _U32(1 << wave)
        else:
            self._readers[words] |= _U32(1 << wave)

    def load(self, wave: int, places: Array) -> Array:
        """Reads LDS at the given byte addresses for one wave. Raises MemoryFaultError for an address past the end and
        for a race.
        """
        self._check(places)
        words = _words(places)
        if np.count_nonzero(others := self._written_by_others(wave, places, words)):
            self._race(places[others], wave, "reads what", "wrote")
        self.touch(wave, places, writes=False)
        return _bytes(self._content, places, words)

    def store(self, wave: int, places: Array, data: Array) -> None:
        """Writes LDS at the given byte addresses for one wave. Raises as `load`.

        Waves may write equal values to one address. If several lanes write to one address, the last lane wins.
        """
        self._check(places)
        words = _words(places)
        before = _bytes(self._content, places, words)
        if words is None:
            self.content[places] = data
        else:
            self._content[words] = np.ascontiguousarray(data).view(np.uint32)
        changes = _bytes(self._content, places, words) != before
        if np.count_nonzero(others := self._written_by_others(wave, places, words) & changes):
            self._race(places[others], wave, "writes what", "wrote")
        readers = self._readers.reshape(-1)[places] if words is None else self._readers[words].reshape(places.shape)
        if np.count_nonzero(others := (readers & ~_U32(1 << wave) != 0) & changes):
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
            here = places[self._writers.view(np.int8)[places] == wave + _LOADING]
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
        if int(places.view(np.uint64).max()) >= len(self.content):  # a negative one is a large number
            raise MemoryFaultError(f"byte {int(places.max())} is past the {len(self.content)} bytes of shared memory")

    def _written_by_others(self, wave: int, places: Array, words: Array | None) -> Array:
        writers = _bytes(self._writers, places, words).view(np.int8)
        return (writers != wave) & (writers != _NOBODY)

    def _race(self, places: Array, wave: int, does: str, did: str) -> None:
        if not self._looks_for_races:
            return
        where = int(places[0])
        if self._writers.view(np.int8)[where] >= _LOADING:
            raise MemoryFaultError(f"wave {wave} {does} a load still brings: no wait for it, at byte {where}")
        raise MemoryFaultError(f"a race: wave {wave} {does} another wave {did} since the last barrier, at byte {where}")
