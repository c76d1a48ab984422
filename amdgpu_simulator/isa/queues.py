"""The memory operations of a wave that are under way, in one queue for each wait counter of the hardware.

The simulator assumes the worst case that the hardware allows: an operation ends only when a wait instruction covers it
(`waits`). Until then its destination registers hold NaN, and the bytes of shared memory that it reads or writes count
as in use, even after a barrier.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Callable
from typing import NamedTuple

from amdgpu_simulator.isa.assembly import Array


class Operation(NamedTuple):
    """finish: what happens when the operation ends. touch: marks the shared memory that it touches again, after a
    barrier. reads: the bytes of shared memory that it reads.
    """

    finish: Callable[[], None] | None = None
    touch: Callable[[], None] | None = None
    reads: Array | None = None


# The largest value of the counter of vector memory.
_MOST = 63


class Counted(deque[Operation]):
    """Outstanding operations of one wait counter.

    At the counter's largest value, a new operation first waits for the oldest.
    """

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def make_room(self) -> None:
        end(self, self._most - 1)

    def append(self, operation: Operation) -> None:
        self.make_room()
        super().append(operation)


class Queues:
    """The operations of a wave that have not ended.

    The operations of `vector` (global and private memory) end in order, and so do the operations of `shared`. Scalar
    loads end in any order, so waiting for a certain scalar load means waiting for all of them.
    """

    def __init__(self, max_shared: int, *, counts_stores: bool) -> None:
        """max_shared, counts_stores: see `targets.Generation`."""
        self.vector = Counted(_MOST)
        self.shared = Counted(max_shared)
        self.scalar: deque[Operation] = deque()
        # Stores to global memory, on GPUs that count them separately.
        self.stores = self.vector if counts_stores else Counted(_MOST)

    def touch(self) -> None:
        for operation in (*self.vector, *self.shared):
            if operation.touch is not None:
                operation.touch()


def end(queue: deque[Operation], left: int) -> None:
    while len(queue) > left:
        if (finish := queue.popleft().finish) is not None:
            finish()
