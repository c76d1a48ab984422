"""A kernel as steps: an instruction has a step for each way in which the registers that addresses of LDS depend on hold
known values. So a loop that exchanges two buffers has two rounds.

Nothing is known of what differs between paths where they meet in more than `_MOST_WAYS` ways.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Container, Mapping
from dataclasses import dataclass, field

from rocm_wheels.compile.check.instructions import Kernel
from rocm_wheels.compile.check.lanes import UNDEFINED, Lanes, bits

_MOST_WAYS = 8
_Held = dict[int, int]  # register -> the number of its value


@dataclass
class Step:
    """An instruction. address: the number of the values of its address, None if they are not known. followers: the
    steps that may follow.
    """

    place: int
    address: int | None = None
    followers: list[int] = field(default_factory=list)


def steps(kernel: Kernel, lanes: Lanes, addresses: Mapping[int, int], places: Container[int]) -> list[Step]:
    """The steps of a kernel, from its start on.

    addresses: the register with the address, for the place of each access. places: other instructions that have steps.
    An instruction where paths meet has steps too.
    """
    live, after = _live(kernel, lanes, addresses)
    joins = Counter(at for following in kernel.followers for at in following)
    found: list[Step] = []
    ways: dict[int, dict[frozenset[tuple[int, int]], int]] = {}
    work: list[tuple[int, _Held]] = []

    def begun(place: int, held: _Held) -> int:
        """The step with which a block begins."""
        known = ways.setdefault(place, {})
        way = frozenset((register, number) for register, number in held.items() if register & live[place])
        if way not in known and len(known) >= _MOST_WAYS:
            way = frozenset.intersection(way, *known)
        if way not in known:
            known[way] = len(found)
            found.append(Step(place))
            work.append((known[way], dict(way)))
        return known[way]

    begun(0, lanes.start | dict.fromkeys(bits(live[0] & lanes.undefined), UNDEFINED))
    while work:
        at, held = work.pop()
        place = found[at].place
        while True:
            if place in addresses or place in places:
                if found[at].place != place:
                    found[at].followers.append(len(found))
                    at = len(found)
                    found.append(Step(place))
                found[at].address = held.get(addresses.get(place, 0))
            overwrites = lanes.overwrites[place]
            if overwrites & after[place]:
                parts = [part for part in lanes.parts(kernel.instructions[place]) if part.result & after[place]]
                results = {part.result: lanes.result(part, held) for part in parts}
                held = {register: number for register, number in held.items() if not register & overwrites}
                held |= {register: number for register, number in results.items() if number is not None}
            following = kernel.followers[place]
            if len(following) != 1 or joins[following[0]] > 1:
                break
            place = following[0]
        found[at].followers += [begun(place, held) for place in following]
    return found


def _live(kernel: Kernel, lanes: Lanes, addresses: Mapping[int, int]) -> tuple[list[int], list[int]]:
    """The registers before and after each instruction that an address may depend on."""
    live, after, old = [0] * len(kernel.instructions), [0] * len(kernel.instructions), None
    while live != old:
        old = live[:]
        for place in range(len(live) - 1, -1, -1):
            needed = 0
            for at in kernel.followers[place]:
                needed |= live[at]
            after[place], overwrites = needed, lanes.overwrites[place]
            if overwrites & needed:
                parts = [part for part in lanes.parts(kernel.instructions[place]) if part.result & needed]
                needed &= ~overwrites
                for part in parts:
                    for operand in part.operands:
                        needed |= max(operand, 0)
            live[place] = needed | addresses.get(place, 0)
    return live, after
