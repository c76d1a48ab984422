"""What is known before each instruction of a kernel, over every path to it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from rocm_wheels.compile.check.instructions import Instruction, Kernel

# Sets of registers or flags, each as the bits of a number. Where paths join, they are united.
State = tuple[int, ...]


def before(kernel: Kernel, start: State, after: Callable[[int, Instruction, State], State]) -> dict[int, State]:
    """The state before each instruction that can be reached, by its index, in the order of the instructions.

    start: the state before the first instruction. after: the state that an instruction, with its index, leaves.
    """
    instructions, followers = kernel.instructions, kernel.followers
    joins = Counter(at for following in followers for at in following)
    joins[0] += 1
    states: dict[int, State] = {0: start} if instructions else {}
    found: dict[int, State] = {}
    work = [*states]
    # The first instruction comes first, so that a state is mostly complete before it is passed on.
    while work:
        index = heapq.heappop(work)
        state = states[index]
        while True:
            found[index] = state
            state = after(index, instructions[index], state)
            following = followers[index]
            if len(following) != 1 or joins[following[0]] > 1:
                break
            index = following[0]
        for at in following:
            known, merged = states.get(at), state
            if known is not None:
                merged = tuple(a | b for a, b in zip(known, state, strict=True))
            if merged != known:
                states[at] = merged
                if at not in work:
                    heapq.heappush(work, at)
    return dict(sorted(found.items()))
