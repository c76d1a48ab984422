"""The events of a launch for an observer: each work group that begins, each instruction that a wave executes."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.isa.wave import Wave


class Event(NamedTuple):
    """An instruction that a wave has executed.

    place: its index in `Kernel.instructions`. status: "end" or "barrier" if the wave stops, else None. shared: for each
    access of shared memory the byte addresses, [lanes, bytes]. memory: for each access of global memory the addresses
    of its lanes and the number of bytes at each. Addresses of private memory are negative.
    """

    wave: Wave
    place: int
    status: str | None
    shared: list[Array]
    memory: list[tuple[Array, int]]


class Observer(Protocol):
    """Receives the events of a launch, in the order in which the simulator executes."""

    def begin(self) -> None:
        """A work group begins. The following events belong to it."""

    def step(self, event: Event) -> None:
        """An instruction was executed. The observer may read the lists of the event until this method returns."""
