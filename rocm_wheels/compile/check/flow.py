"""What is known before each instruction of a kernel, over every path to it."""

from __future__ import annotations

import heapq
from collections import Counter
from collections.abc import Callable

from rocm_wheels.compile.check.instructions import Instruction, Kernel

# Sets of registers or flags, each as the bits of a number. Where paths join, they are united.
State = tuple[int, ...]


def before(kernel: Kernel, start: State, after: Callable[[Instruction, State], State]) -> dict[int, State]:
    """The state before each instruction that can be reached, by its index, in the order of the instructions.

    start: the state before the first instruction. after: the state that an instruction leaves.
    """
    joins = Counter(at for following in kernel.followers for at in following)
    joins[0] += 1
    states: dict[int, State] = {0: start} if kernel.instructions else {}
    work = [*states]
    # The first instruction comes first, so that a state is mostly complete before it is passed on.
    while work:
        index = heapq.heappop(work)
        left = after(kernel.instructions[index], states[index])
        for at in kernel.followers[index]:
            known, merged = states.get(at), left
            if known is not None and joins[at] > 1:
                merged = tuple(a | b for a, b in zip(known, left, strict=True))
            if merged != known:
                states[at] = merged
                if at not in work:
                    heapq.heappush(work, at)
    return dict(sorted(states.items()))
