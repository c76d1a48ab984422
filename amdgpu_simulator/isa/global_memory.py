"""The global memory of a launch: the address ranges that a kernel may access."""

from __future__ import annotations

import bisect
import ctypes
from collections.abc import Iterable

import numpy as np

from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.isa.order import Order, Store


class MemoryFaultError(RuntimeError):
    """An access outside of the memory that a kernel may access."""


class Memory:
    """The address ranges that a kernel may access."""

    def __init__(self, ranges: Iterable[tuple[int, int]]) -> None:
        """ranges: (address, bytes) of each range."""
        self.accesses: list[tuple[Array, int]] | None = None  # receives accesses for an observer: see `events`
        self.order: Order | None = None  # checks races between waves
        self._starts: list[int] = []
        self._content: list[Array] = []
        for address, size in sorted(set(ranges), key=lambda range_: (range_[0], -range_[1])):
            if size and not (self._starts and self._starts[-1] == address):
                self._starts.append(address)
                view = (ctypes.c_uint8 * size).from_address(address)
                self._content.append(np.frombuffer(memoryview(view), np.uint8))

    def range(self, address: int, size: int) -> tuple[int, Array]:
        """The start and content of the range that holds these bytes. Raises MemoryFaultError if there is none."""
        index = bisect.bisect_right(self._starts, address) - 1
        if index >= 0 and address + size <= self._starts[index] + len(self._content[index]):
            return self._starts[index], self._content[index]
        raise MemoryFaultError(f"the {size} bytes at {address:#x} belong to no tensor")

    def load(self, addresses: Array, size: int, wave: int | None = None) -> Array:
        """Reads (n, size) bytes from n addresses. wave: the number of the reading wave, None to skip the race check."""
        loaded = np.empty((len(addresses), size), np.uint8)
        for lanes, start, content, offsets in self._parts(addresses, size):
            places = offsets[:, None] + np.arange(size)
            if self.order is not None and wave is not None:
                self.order.load(wave, start, places)
            loaded[lanes] = content[places]
        return loaded

    def store(self, addresses: Array, data: Array, wave: int) -> list[Store]:
        """Writes (n, size) bytes at n addresses.

        Returns the stores, which are complete when the wave waits for them.
        """
        stores = []
        for lanes, start, content, offsets in self._parts(addresses, data.shape[1]):
            places = offsets[:, None] + np.arange(data.shape[1])
            if self.order is not None:
                stores.append(self.order.store(wave, start, content, places, data[lanes]))
            content[places] = data[lanes]
        return stores

    def _parts(self, addresses: Array, size: int) -> Iterable[tuple[Array, int, Array, Array]]:
        """Splits the accesses by allocation: (lane indices, start address, allocation bytes, offsets)."""
        if self.accesses is not None:
            self.accesses.append((addresses, size))
        left = np.arange(len(addresses))
        while len(left):
            start, content = self.range(int(addresses[left[0]]), size)
            offsets = addresses[left].astype(np.int64) - start
            here = (offsets >= 0) & (offsets + size <= len(content))
            yield left[here], start, content, offsets[here]
            left = left[~here]
