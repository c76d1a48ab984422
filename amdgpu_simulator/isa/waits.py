"""Wait instructions: they end operations of the queues of a wave (`queues`)."""

from __future__ import annotations

import re
from collections.abc import Callable

from amdgpu_simulator.isa.assembly import Instruction
from amdgpu_simulator.isa.queues import end
from amdgpu_simulator.isa.wave import Wave

_ALL = 0


def decode(instruction: Instruction) -> Callable[[Wave], None]:
    """The function that executes a wait."""
    name, _, rest = instruction.text.replace("\t", " ").partition(" ")
    if name == "s_waitcnt":
        counters = {counter: int(left, 0) for counter, left in re.findall(r"(\w+)\((\w+)\)", rest)}
        if not counters or set(counters) - {"vmcnt", "lgkmcnt", "expcnt"}:
            raise NotImplementedError("not known")
        return _wait(counters.get("vmcnt"), counters.get("lgkmcnt"), counters.get("lgkmcnt"))
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
    """A wait with the number of operations of each kind that may stay outstanding; None does not wait for that kind."""

    def execute(wave: Wave) -> None:
        queues = wave.queues
        if vector is not None:
            end(queues.vector, vector)
        if shared is not None:
            end(queues.shared, shared)
        if scalar == _ALL:
            end(queues.scalar, _ALL)
        if stores is not None:
            end(queues.stores, stores)

    return execute
