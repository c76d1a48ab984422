"""Barriers: between a wave's write to LDS and another wave's read of it, and between a read and the next write, all
waves meet.

The pass follows every path from barrier to barrier. It computes the bytes that each wave accesses and compares
the accesses between two barriers. A pair of accesses is not judged where an address is not known, as in a loop that
exchanges its buffers, nor where each lane accesses the same bytes twice. It does not know which lanes are active.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from functools import cache

import numpy as np
from numpy.typing import NDArray

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import flow
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel
from rocm_wheels.compile.check.lanes import Lanes

RULE = "waves exchange data through LDS without a barrier; LLVM memory model, workgroup scope"
HALF_RULE = "a barrier of GFX12 is a signal and a wait"

# State of a wave: its last barrier is complete, or it has signalled and not waited yet.
_IDLE, _SIGNALLED = 1, 2
# The state in which each half of a barrier, and the end, may come, and what is wrong in the other state.
_HALVES = {
    "s_barrier_signal": (_IDLE, "no s_barrier_wait after the last signal"),
    "s_barrier_wait": (_SIGNALLED, "no s_barrier_signal before it"),
    "s_endpgm": (_IDLE, "no s_barrier_wait after the last signal"),
}

_ACCESS = re.compile(r"ds_(?P<kind>read|load|write|store)")
_WIDTH = re.compile(r"_[biuf](\d+)")
_TWICE = re.compile(r"2addr|2st64|(read|write)2_")
_MOST_BYTES = 1 << 20
_OFFSETS = re.compile(r"\boffset([01]?):(\d+)")


# The waves that access each byte, as bits.
_Waves = NDArray[np.uint64]


@dataclass(frozen=True)
class Access:
    """An access of LDS. offsets: the places of its pieces relative to the address of a lane. size: bytes of a piece.
    address: its operand. copies: whether it copies from global memory, lane after lane.
    """

    place: int
    writes: bool
    offsets: tuple[int, ...]
    size: int
    address: int
    copies: bool = False


def findings(kernel: Kernel, target: str) -> list[Finding]:
    """Reads of what another wave may not have written yet, and writes over what another wave may not have read yet.
    Raises ValueError for an unknown target.
    """
    lanes = sources.module("kernels.targets").get(target).wavefront
    if kernel.threads is not None and kernel.threads <= lanes:
        return []
    accesses = [touched for place, one in enumerate(kernel.instructions) if (touched := access(place, one))]
    number = {one.place: bit for bit, one in enumerate(accesses)}
    writers = sum(1 << bit for bit, one in enumerate(accesses) if one.writes)

    def after(index: int, one: Instruction, state: flow.State) -> flow.State:
        before, since, phase = state
        if one.mnemonic == "s_barrier":
            return 0, 0, phase
        if one.mnemonic.startswith("s_barrier_signal"):
            return before, 0, _SIGNALLED
        if one.mnemonic == "s_barrier_wait":
            return since, 0, _IDLE
        if index in number:
            bit = 1 << number[index]
            return before | bit, since | bit, phase
        return state

    found: list[Finding] = []
    reach = _Reach(kernel, lanes)
    places = {*number, *(place for place, one in enumerate(kernel.instructions) if one.mnemonic in _HALVES)}
    if not places:
        return []
    for place, (before, _, phase) in flow.before_each(kernel, (0, 0, _IDLE), after, places).items():
        one = kernel.instructions[place]
        if place not in number:
            allowed, problem = _HALVES[one.mnemonic]
            if phase & ~allowed:
                found.append(Finding(kernel.symbol, place, HALF_RULE, f"{one.text}: {problem}", 1, ""))
            continue
        second = accesses[number[place]]
        others = before & (~writers if second.writes else writers)
        while others:
            bit = others & -others
            others ^= bit
            first = accesses[bit.bit_length() - 1]
            if reach.meet(first, second):
                problem = f"{one.text}: no barrier after {kernel.instructions[first.place].text}"
                found.append(Finding(kernel.symbol, place, RULE, problem, 1, ""))
                break
    return found


def access(place: int, one: Instruction) -> Access | None:
    """The access of LDS by an instruction, None for an instruction that accesses none."""
    offsets = {which: int(number) for which, number in _OFFSETS.findall(one.text)}
    if isa.is_lds_dma(one.mnemonic, one.text):
        words = re.search(r"(?:dwordx|_b(?=96|128))(\d+)", one.mnemonic)
        size = 4 if words is None else {"96": 12, "128": 16}.get(words[1], 4 * int(words[1]))
        return Access(place, True, (offsets.get("", 0),), size, isa.M0, copies=True)
    found = _ACCESS.match(one.mnemonic)
    if found is None:
        return None
    width = _WIDTH.search(one.mnemonic)
    size = int(width[1]) // 8 if width else 4
    pieces: tuple[int, ...] = (offsets.get("", 0),)
    if _TWICE.search(one.mnemonic):
        step = size * (64 if "st64" in one.mnemonic or "stride64" in one.mnemonic else 1)
        pieces = (offsets.get("0", 0) * step, offsets.get("1", 0) * step)
    return Access(place, found["kind"] in ("write", "store"), pieces, size, one.sources[0] if one.sources else 0)


class _Reach:
    """The bytes of LDS that the accesses of a kernel reach."""

    def __init__(self, kernel: Kernel, wave: int) -> None:
        self._lanes, self._wave = Lanes(kernel, wave), wave
        self.waves = cache(self._waves)

    def meet(self, first: Access, second: Access) -> bool:
        """Whether two accesses reach a byte in common from different waves, as far as their addresses are known."""
        if (first.address, first.offsets, first.size) == (second.address, second.offsets, second.size) and (
            self._lanes.definitions(first.place, first.address) == self._lanes.definitions(second.place, second.address)
        ):
            return False
        one, two = self.waves(first), self.waves(second)
        if one is None or two is None:
            return False
        least = min(len(one), len(two))
        one, two = one[:least], two[:least]
        alone = (one == two) & (one & (one - np.uint64(1)) == 0)
        return bool(((one != 0) & (two != 0) & ~alone).any())

    def _waves(self, access: Access) -> _Waves | None:
        values = self._lanes.of(access.place, access.address)
        if values is None or values.max() >= _MOST_BYTES:
            return None
        number = np.arange(len(values)) // self._wave
        if access.copies:
            values = values + np.arange(len(values)) % self._wave * access.size
        pieces = np.array(access.offsets)[:, None] + np.arange(access.size)
        places = values[:, None] + pieces.ravel()
        found: _Waves = np.zeros(int(places.max()) + 1, np.uint64)
        for wave in range(int(number[-1]) + 1):
            found[places[number == wave].ravel()] |= np.uint64(1 << wave)
        return found
