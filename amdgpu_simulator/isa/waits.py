"""What a wave has asked of memory and not waited for, and the instructions that wait.

The worst that a GPU may do: an operation is done when a wait says so. Until then the registers that it loads hold NaN,
and what it reads or writes of shared memory counts as touched by it, whatever barriers there are.
"""

from __future__ import annotations

import re
from collections import deque
from collections.abc import Callable
from typing import TYPE_CHECKING, NamedTuple

from amdgpu_simulator.isa.assembly import Instruction

if TYPE_CHECKING:
    from amdgpu_simulator.isa.wave import Array, Wave

_ALL = 0


class Operation(NamedTuple):
    """finish: what happens when the operation ends. touch: marks the shared memory that it touches again, after a
    barrier. reads: the bytes of shared memory that it reads.
    """

    finish: Callable[[], None] | None = None
    touch: Callable[[], None] | None = None
    reads: Array | None = None


# As far as the counter of vector memory counts.
_MOST = 63


class Counted(deque[Operation]):
    """Operations that a counter counts. Where it can count no further, what is begun waits for the oldest."""

    def __init__(self, most: int) -> None:
        super().__init__()
        self._most = most

    def make_room(self) -> None:
        _end(self, self._most - 1)

    def append(self, operation: Operation) -> None:
        self.make_room()
        super().append(operation)


class Queues:
    """The operations of a wave that have not ended.

    The operations of `vector` (global and private memory) end in their order, and so do the operations of `shared`.
    Scalar loads end in any order, so only a wait for all of them is a wait for one.
    """

    def __init__(self, max_shared: int, *, counts_stores: bool) -> None:
        """max_shared, counts_stores: see `targets.Generation`."""
        self.vector = Counted(_MOST)
        self.shared = Counted(max_shared)
        self.scalar: deque[Operation] = deque()
        # Stores to global memory, where they have a counter of their own.
        self.stores = self.vector if counts_stores else Counted(_MOST)

    def touch(self) -> None:
        for operation in (*self.vector, *self.shared):
            if operation.touch is not None:
                operation.touch()


def _end(queue: deque[Operation], left: int) -> None:
    while len(queue) > left:
        if (finish := queue.popleft().finish) is not None:
            finish()


def decode(instruction: Instruction) -> Callable[[Wave], None]:
    """The function that executes a wait."""
    name, _, rest = instruction.text.replace("\t", " ").partition(" ")
    if name == "s_waitcnt":
        found = {counter: int(left, 0) for counter, left in re.findall(r"(\w+)\((\w+)\)", rest)}
        if not found or set(found) - {"vmcnt", "lgkmcnt", "expcnt"}:
            raise NotImplementedError("not known")
        return _wait(found.get("vmcnt"), found.get("lgkmcnt"), found.get("lgkmcnt"))
    left = rest.rpartition(",")[2].strip()
    if name in ("s_waitcnt_vscnt", "s_wait_storecnt"):
        return _wait(None, None, None, int(left, 0))
    if name in ("s_wait_alu", "s_waitcnt_expcnt", "s_wait_expcnt"):
        return _wait(None, None, None)
    if name in ("s_waitcnt_vmcnt", "s_wait_loadcnt"):
        return _wait(int(left, 0), None, None)
    if name == "s_waitcnt_lgkmcnt":
        return _wait(None, int(left, 0), int(left, 0))
    if name == "s_wait_dscnt":
        return _wait(None, int(left, 0), None)
    if name == "s_wait_kmcnt":
        return _wait(None, None, int(left, 0))
    if name == "s_wait_loadcnt_dscnt":
        return _wait(int(left, 0) >> 8, int(left, 0) & 63, None)
    if name == "s_wait_storecnt_dscnt":
        return _wait(None, int(left, 0) & 63, None, int(left, 0) >> 8)
    if name == "s_wait_idle":
        return _wait(_ALL, _ALL, _ALL, _ALL)
    raise NotImplementedError("not known")


def _wait(
    vector: int | None, shared: int | None, scalar: int | None, stores: int | None = None
) -> Callable[[Wave], None]:
    """How many of each kind may be left; None does not wait for that kind."""

    def execute(wave: Wave) -> None:
        queues = wave.queues
        if vector is not None:
            _end(queues.vector, vector)
        if shared is not None:
            _end(queues.shared, shared)
        if scalar == _ALL:
            _end(queues.scalar, _ALL)
        if stores is not None:
            _end(queues.stores, stores)

    return execute
