"""The order of global memory accesses by different waves, as far as the kernel guarantees it.

A store is complete when its wave waits for it. A barrier after the wait orders the store before later accesses of the
other waves of the work group. Nothing orders the work groups of a launch. Atomics are not checked: they need no order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from amdgpu_simulator.isa.assembly import Array

# Numbers of waves in a work group are below this number, which marks stores that are visible to the whole group.
_GROUP = 63


@dataclass
class Store:
    """A store of one wave to one address range. done: whether its wave has waited for it."""

    writer: int
    range: int
    places: Array
    done: bool = False


def finish(stores: Iterable[Store]) -> None:
    """Marks stores as complete, because their wave has waited for them."""
    for store in stores:
        store.done = True


class Order:
    """The last writer of each byte in a launch."""

    def __init__(self) -> None:
        self._writers: dict[int, Array] = {}  # start of a range -> number of the writer of each byte, 0 for none
        self._stores: list[Store] = []
        self._group = 0

    def begin(self, group: int) -> None:
        """A work group begins."""
        self._group, self._stores = (group + 1) << 6, []

    def barrier(self) -> None:
        """All waves of the group have reached a barrier, so each wave sees the completed stores."""
        left = []
        for store in self._stores:
            if store.done:
                writers = self._writers[store.range]
                mine = writers[store.places] == store.writer
                writers[store.places[mine]] = self._group + _GROUP
            else:
                left.append(store)
        self._stores = left

    def store(self, wave: int, start: int, content: Array, places: Array, data: Array) -> Store:
        """Records a store of a wave. Raises ValueError if another wave may write a different value to the same byte."""
        writers = self._writers.get(start)
        if writers is None:
            writers = self._writers[start] = np.zeros(len(content), np.int32)
        others = self._unordered(wave, writers[places])
        if np.count_nonzero(others) and (changed := others & (content[places] != data)).any():
            self._complain(wave, "writes a different value than", start, places[changed], writers)
        writers[places] = self._group + wave
        store = Store(self._group + wave, start, places)
        self._stores.append(store)
        return store

    def load(self, wave: int, start: int, places: Array) -> None:
        """Raises ValueError if another wave may still write the bytes that a wave reads."""
        if (writers := self._writers.get(start)) is not None:
            others = self._unordered(wave, writers[places])
            if np.count_nonzero(others):
                self._complain(wave, "reads what", start, places[others], writers)

    def _unordered(self, wave: int, writers: Array) -> Array:
        return (writers != 0) & (writers != self._group + wave) & (writers != self._group + _GROUP)

    def _complain(self, wave: int, does: str, start: int, places: Array, writers: Array) -> None:
        place = int(places.flat[0])
        group, other = int(writers[place]) & ~_GROUP, int(writers[place]) & _GROUP
        if group != self._group:
            whose, missing = f"work group {(group >> 6) - 1}", "nothing orders work groups"
        else:
            whose, missing = f"wave {other}", "its wait or a barrier is missing"
        raise ValueError(f"a race: wave {wave} {does} {whose} writes at {start + place:#x}: {missing}")
