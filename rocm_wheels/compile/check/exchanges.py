"""Barriers: between a wave's write to LDS and another wave's read of it, and between a read and the next write, all
waves meet.

The pass follows every path from barrier to barrier. It computes the bytes that each wave accesses and compares
the accesses between two barriers. A pair of accesses is not judged where an address is not known, nor where each lane
accesses the same bytes twice. It does not know which lanes are active. It names the barriers across which it could not
judge a pair.
"""

from __future__ import annotations

import re
from collections import Counter
from dataclasses import dataclass, replace
from functools import cache
from typing import NamedTuple

import numpy as np
from numpy.typing import NDArray

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import flow, unfolding
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel
from rocm_wheels.compile.check.lanes import UNDEFINED, Lanes, bits

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
_Waves = NDArray[np.uint32]


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


_Touch = tuple[Access, int | None]  # an access, and the number of the values of its address


class Judged(NamedTuple):
    """findings: accesses without a barrier. unknown: the places of accesses and barriers of which the check cannot tell
    whether a barrier is missing or spare, because it does not know an address.
    """

    findings: list[Finding]
    unknown: list[int]


def judged(kernel: Kernel, target: str) -> Judged:
    """Reads of what another wave may not have written yet, and writes over what another wave may not have read yet.
    Raises ValueError for an unknown target.
    """
    wave = sources.module("kernels.targets").get(target).wavefront
    if kernel.threads is not None and kernel.threads <= wave:
        return Judged([], [])
    accesses = {place: reached for place, one in enumerate(kernel.instructions) if (reached := access(place, one))}
    barriers = {place for place, one in enumerate(kernel.instructions) if one.mnemonic in {*_HALVES, "s_barrier"}}
    lanes = Lanes(kernel, wave)
    steps = unfolding.steps(kernel, lanes, {place: one.address for place, one in accesses.items()}, barriers)
    touches = [
        (accesses[step.place], step.address) if step.place in accesses and step.address != UNDEFINED else None
        for step in steps
    ]
    reach = _Reach(lanes, wave, [*dict.fromkeys(touch for touch in touches if touch)])

    def after(index: int, one: Instruction, state: flow.State) -> flow.State:
        before, since, phase, last = state
        if one.mnemonic == "s_barrier":
            return 0, 0, phase, 1 << index
        if one.mnemonic == "s_barrier_signal":
            return before, 0, _SIGNALLED, last
        if one.mnemonic == "s_barrier_wait":
            return since, 0, _IDLE, 1 << index
        touched = reach.bit(touches[index])
        return before | touched, since | touched, phase, last

    unfolded = replace(
        kernel,
        instructions=tuple(kernel.instructions[step.place] for step in steps),
        followers=tuple(tuple(step.followers) for step in steps),
    )
    found: dict[int, Finding] = {}
    unknown: set[int] = set()
    ahead, behind = Counter[int](), Counter[int]()  # the accesses before and after each barrier
    for index, (before, _, phase, last) in flow.before(unfolded, (0, 0, _IDLE, 0), after).items():
        place, one, touched = steps[index].place, unfolded.instructions[index], reach.bit(touches[index])
        for barrier in bits(last if touched else 0):
            behind[barrier] |= touched
        if one.mnemonic in ("s_barrier", "s_barrier_wait"):
            ahead[1 << index] = before
        if one.mnemonic in _HALVES and phase & ~_HALVES[one.mnemonic][0]:
            found[place] = Finding(kernel.symbol, place, HALF_RULE, f"{one.text}: {_HALVES[one.mnemonic][1]}", 1, "")
        first = reach.meeting(before, touched)
        if first is not None:
            problem = f"{one.text}: no barrier after {kernel.instructions[first.place].text}"
            found[place] = Finding(kernel.symbol, place, RULE, problem, 1, "")
        elif reach.unknown(before, touched):
            unknown.add(place)
    needed = {steps[one.bit_length() - 1].place for one in ahead if reach.meeting(ahead[one], behind[one])}
    unknown |= {steps[one.bit_length() - 1].place for one in ahead if reach.unknown(ahead[one], behind[one])} - needed
    return Judged([found[place] for place in sorted(found)], sorted(unknown))


def access(place: int, one: Instruction) -> Access | None:
    """The access of LDS by an instruction, None for an instruction that accesses none."""
    offsets = {which: int(number) for which, number in _OFFSETS.findall(one.text)}
    if isa.is_lds_dma(one.mnemonic, one.text):
        words = re.search(r"(?:dwordx|_b(?=96|128))(\d+)", one.mnemonic)
        size = 4 if words is None else {"96": 12, "128": 16}.get(words[1], 4 * int(words[1]))
        return Access(place, True, (offsets.get("", 0),), size, isa.M0, copies=True)
    match = _ACCESS.match(one.mnemonic)
    if match is None:
        return None
    width = _WIDTH.search(one.mnemonic)
    size = int(width[1]) // 8 if width else 4
    pieces: tuple[int, ...] = (offsets.get("", 0),)
    if _TWICE.search(one.mnemonic):
        step = size * (64 if "st64" in one.mnemonic or "stride64" in one.mnemonic else 1)
        pieces = (offsets.get("0", 0) * step, offsets.get("1", 0) * step)
    return Access(place, match["kind"] in ("write", "store"), pieces, size, one.sources[0] if one.sources else 0)


class _Reach:
    """The bytes of LDS that the accesses of a kernel reach. Sets of accesses are bits."""

    def __init__(self, lanes: Lanes, wave: int, touches: list[_Touch]) -> None:
        self._lanes, self._wave, self._touches = lanes, wave, touches
        self._bits: dict[_Touch | None, int] = {touch: 1 << number for number, touch in enumerate(touches)}
        self._writers = sum(bit for touch, bit in self._bits.items() if touch and touch[0].writes)
        known = {touch for touch in touches if touch[1] is not None and lanes.value(touch[1]).max() < _MOST_BYTES}
        self._unknown = sum(self._bits[touch] for touch in touches if touch not in known)
        self._waves, self._meet = cache(self._reached), cache(self._met)

    def bit(self, touch: _Touch | None) -> int:
        """The set of one access, or of none."""
        return self._bits.get(touch, 0)

    def meeting(self, first: int, second: int) -> Access | None:
        """An access of the first set that reaches a byte in common with one of the second, from another wave."""
        for bit in bits(second & ~self._unknown):
            others = first & ~self._unknown & (-1 if bit & self._writers else self._writers)
            for other in bits(others):
                if self._meet(other, bit):
                    return self._touches[other.bit_length() - 1][0]
        return None

    def unknown(self, first: int, second: int) -> bool:
        """Whether an address of two accesses, of which one writes, is not known."""
        pairs = ((first, second & self._writers), (first & self._writers, second))
        return any(one and other and (one | other) & self._unknown for one, other in pairs)

    def _met(self, first: int, second: int) -> bool:
        pair = [self._touches[one.bit_length() - 1] for one in (first, second)]
        if len({(access.offsets, access.size, address) for access, address in pair}) == 1:
            return False
        one, two = (self._waves(access.offsets, access.size, access.copies, address) for access, address in pair)
        least = min(len(one), len(two))
        one, two = one[:least], two[:least]
        alone = (one == two) & (one & (one - np.uint32(1)) == 0)
        return bool(((one != 0) & (two != 0) & ~alone).any())

    def _reached(self, offsets: tuple[int, ...], size: int, copies: bool, address: int) -> _Waves:
        values = self._lanes.value(address)
        number = np.arange(len(values)) // self._wave
        if copies:
            values = values + np.arange(len(values)) % self._wave * size
        places = values[:, None] + (np.array(offsets)[:, None] + np.arange(size)).ravel()
        found: _Waves = np.zeros(int(places.max()) + 1, np.uint32)
        for wave in range(int(number[-1]) + 1):
            found[places[number == wave].ravel()] |= np.uint32(1 << wave)
        return found
