"""In which order waves write and read global memory, as far as a kernel settles it.

Stores are done when their wave waits for them. A barrier after the wait puts them before what the other waves of the
work group do next. Nothing orders the work groups of a launch. Atomics are not looked at: they need no order.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

import numpy as np

from amdgpu_simulator.isa.assembly import Array

# Waves of a work group have numbers below this one, which stands for stores that the whole group can see.
_GROUP = 63


@dataclass
class Store:
    """A store of one wave to one range of addresses. done: whether its wave has waited for it."""

    writer: int
    range: int
    places: Array
    done: bool = False


def finish(stores: Iterable[Store]) -> None:
    """Their wave has waited for the stores."""
    for store in stores:
        store.done = True


class Order:
    """Who has written which byte of a launch."""

    def __init__(self) -> None:
        self._writers: dict[int, Array] = {}  # start of a range -> a number for each byte, 0 where nobody wrote
        self._stores: list[Store] = []
        self._group = 0

    def begin(self, group: int) -> None:
        """A work group begins."""
        self._group, self._stores = (group + 1) << 6, []

    def barrier(self) -> None:
        """The waves of the group have met: each sees the stores that are done."""
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
        """Notes that a wave writes. Raises ValueError where another wave may write another value."""
        writers = self._writers.get(start)
        if writers is None:
            writers = self._writers[start] = np.zeros(len(content), np.int32)
        others = self._unordered(wave, writers[places])
        if others.any() and (changed := others & (content[places] != data)).any():
            self._complain(wave, "writes another value than", start, places[changed], writers)
        writers[places] = self._group + wave
        store = Store(self._group + wave, start, places)
        self._stores.append(store)
        return store

    def load(self, wave: int, start: int, places: Array) -> None:
        """Raises ValueError where another wave may still write what a wave reads."""
        if (writers := self._writers.get(start)) is not None:
            others = self._unordered(wave, writers[places])
            if others.any():
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
