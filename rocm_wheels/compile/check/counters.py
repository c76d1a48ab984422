"""Waits for memory: each use of a loaded register follows its wait, and no access is under way at a barrier.

A wave counts its accesses that are under way: `s_waitcnt vmcnt(2)` waits until at most two accesses to global memory
are. Accesses of one kind end in the order in which they began, so an access with two younger ones of its kind has ended
then. Scalar loads end in any order: only a wait for all ends one of them. The pass follows every path, loops to a fixed
point. Where two paths meet, an access is as young as on the path on which it is younger.

Sources: the instruction set guides, "Data Dependency Resolution"; LLVM's SIInsertWaitcnts.cpp and memory model.
"""

from __future__ import annotations

import heapq
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import NamedTuple

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import instructions as isa
from rocm_wheels.compile.check.cures import Finding
from rocm_wheels.compile.check.instructions import Instruction, Kernel

WAIT_RULE = "a register is used before the wait for its load; SIInsertWaitcnts"
BARRIER_RULE = "an access of LDS is under way at a barrier; LLVM pull request 220357"
GLOBAL_RULE = "an access of global memory is under way at a barrier that orders it; LLVM issue 163615"

# Counters: global loads (before GFX10, stores too), global stores, LDS, scalar loads and messages, exports; the others
# are GFX12's. Before GFX12, scalar loads share the counter of LDS.
LOADS, STORES, LDS, SCALAR, EXPORTS, SAMPLES, RAYS, ASYNC = range(8)
_NAMES = ("load", "store", "ds", "km", "exp", "sample", "bvh", "async")

# Bits of an access above the bits of its registers.
_READS_LDS, _WRITES_LDS, _READS_GLOBAL, _WRITES_GLOBAL = (1 << isa.SCALARS + 300 + bit for bit in range(4))
_OF_LDS, _OF_GLOBAL = _READS_LDS | _WRITES_LDS, _READS_GLOBAL | _WRITES_GLOBAL
_REGISTERS = _READS_LDS - 1


@dataclass(frozen=True, kw_only=True)
class Generation:
    """How a generation counts.

    most: the largest value of each counter; accesses beyond it count as the oldest one, and end by a wait like it.
    split: whether each counter has a wait of its own (GFX12). stores: the counter of global stores. scalar: the counter
    of scalar loads. one_word: whether a wave has 32 lanes, so that one word of VCC says all. fields: the first bit and
    the number of bits of each counter in the number of `s_waitcnt`.
    """

    most: tuple[int, ...]
    split: bool = False
    stores: int = STORES
    scalar: int = LDS
    one_word: bool = True
    fields: tuple[tuple[int, tuple[tuple[int, int], ...]], ...] = ()


_GFX9 = Generation(
    most=(63, 63, 15, 15, 7, 63, 7, 63), stores=LOADS, one_word=False,
    fields=((LOADS, ((0, 4), (14, 2))), (EXPORTS, ((4, 3),)), (LDS, ((8, 4),))),
)  # fmt: skip
_GFX10 = Generation(
    most=(63, 63, 63, 63, 7, 63, 7, 63),
    fields=((LOADS, ((0, 4), (14, 2))), (EXPORTS, ((4, 3),)), (LDS, ((8, 6),))),
)
_GFX11 = replace(_GFX10, fields=((LOADS, ((10, 6),)), (EXPORTS, ((0, 3),)), (LDS, ((4, 6),))))
_GFX12 = Generation(most=(63, 63, 63, 31, 7, 63, 7, 63), split=True, scalar=SCALAR)
_OF_FAMILY = {"cdna": _GFX9, "rdna2": _GFX10, "rdna3": _GFX11, "rdna4": _GFX12}


class Effect(NamedTuple):
    """What an instruction does to the counters.

    touches: registers that it reads, or writes at once. own: registers that it loads.
    counters: the counters of its access. access: the registers that it loads, and bits of the memory. ordered: whether
    it ends after older accesses of the same kind. waits: (counter, number that may stay under way). barrier: whether
    waves meet there.
    """

    touches: int
    own: int
    counters: tuple[int, ...]
    access: int
    ordered: bool
    waits: tuple[tuple[int, int], ...]
    barrier: bool


# The accesses of a counter that are under way: in order, the youngest first; without order; all of them.
_Queue = tuple[tuple[int, ...], int, int]
State = tuple[_Queue, ...]
_NONE: _Queue = ((), 0, 0)


def findings(kernel: Kernel, target: str) -> list[Finding]:
    """The violations in the order of the instructions. Raises ValueError for an instruction whose counter is not
    known, and for a family of GPUs whose counters are not known.
    """
    family = sources.module("kernels.targets").get(target).family
    if family not in _OF_FAMILY:
        raise ValueError(f"{target}: the check does not know the counters of {family}: add a row to counters.py")
    return _Walk(kernel, _OF_FAMILY[family]).findings()


class _Walk:
    """The walk over the paths of a kernel."""

    def __init__(self, kernel: Kernel, generation: Generation) -> None:
        self._kernel, self._generation = kernel, generation
        self._effects = [effect(instruction, generation) for instruction in kernel.instructions]
        self._found: dict[tuple[int, str, int], Finding] = {}

    def findings(self) -> list[Finding]:
        followers = self._kernel.followers
        joins = {at for index, following in enumerate(followers) for at in following if at != index + 1}
        states: dict[int, State] = {0: (_NONE,) * len(_NAMES)} if followers else {}
        work = [*states]
        while work:
            index = heapq.heappop(work)
            state = states[index]
            while True:
                state = self._step(index, state)
                following = followers[index]
                if len(following) != 1 or following[0] in joins:
                    break
                index = following[0]
            for at in following:
                known = states.get(at)
                merged = state if known is None else _merged(known, state)
                if merged != known:
                    states[at] = merged
                    if at not in work:
                        heapq.heappush(work, at)
        return [self._found[key] for key in sorted(self._found)]

    def _step(self, index: int, state: State) -> State:
        """The state after an instruction. Notes its violations."""
        event = self._effects[index]
        touched = event.touches | event.own
        for number, (_, loose, pending) in enumerate(state):
            if not pending:
                continue
            if pending & touched:
                # Before GFX12, a load from global memory may write what an older one still writes: that one ends first.
                follows = number == LOADS and event.ordered and number in event.counters and not self._generation.split
                if pending & event.touches or (loose if follows else pending) & event.own:
                    self._note(index, WAIT_RULE, number)
            if event.barrier and pending >= _READS_LDS:
                if pending & _OF_LDS:
                    self._note(index, BARRIER_RULE, number)
                if pending & _OF_GLOBAL and self._orders_global(index):
                    self._note(index, GLOBAL_RULE, number)
        if event.waits or event.counters:
            return self._counted(event, state)
        return state

    def _counted(self, event: Effect, state: State) -> State:
        changed = list(state)
        for number, left in event.waits:
            ordered, loose, pending = state[number]
            if pending and (not left or len(ordered) > left):
                changed[number] = _queue(ordered[:left], loose if left else 0)
        for number in event.counters:
            ordered, loose, pending = state[number]
            if not event.ordered:
                changed[number] = (ordered, loose | event.access, pending | event.access)
            elif len(ordered) < self._generation.most[number]:
                changed[number] = ((event.access, *ordered), loose, pending | event.access)
            else:
                changed[number] = _queue((event.access, *ordered[:-2], ordered[-2] | ordered[-1]), loose)
        return tuple(changed)

    def _orders_global(self, index: int) -> bool:
        """Whether a barrier orders global memory too: then the wave drops its cache of global memory after it."""
        after = self._kernel.instructions[index + 1 : index + 6]
        return any(_ACQUIRE.match(op.mnemonic) for op in after)

    def _note(self, index: int, rule: str, counter: int) -> None:
        cure = _cure(counter, self._generation)
        problem = f"{self._kernel.instructions[index].text}: without {cure}"
        self._found[index, rule, counter] = Finding(self._kernel.symbol, index, rule, problem, 1, cure)


def _queue(ordered: tuple[int, ...], loose: int) -> _Queue:
    pending = loose
    for access in ordered:
        pending |= access
    return ordered, loose, pending


def _merged(known: State, other: State) -> State:
    return known if known == other else tuple(_joined(a, b) for a, b in zip(known, other, strict=True))


def _joined(known: _Queue, other: _Queue) -> _Queue:
    if known == other:
        return known
    longer, shorter = (known[0], other[0]) if len(known[0]) >= len(other[0]) else (other[0], known[0])
    both = tuple(a | b for a, b in zip(longer, shorter, strict=False)) + longer[len(shorter) :]
    return both, known[1] | other[1], known[2] | other[2]


def _cure(counter: int, generation: Generation) -> str:
    if generation.split:
        return f"s_wait_{_NAMES[counter]}cnt 0x0"
    if counter == STORES:
        return "s_waitcnt_vscnt null, 0x0"
    return f"s_waitcnt {_OLD_NAMES[counter]}(0)"


_OLD_NAMES = {LOADS: "vmcnt", LDS: "lgkmcnt", EXPORTS: "expcnt"}
_ACQUIRE = re.compile(r"buffer_gl0_inv|buffer_inv|global_inv")
_WAIT_FOR_ONE = re.compile(r"s_wait(?:cnt)?_(?P<first>[a-z]+?)cnt(?:_(?P<second>ds)cnt)?$")
_COUNTERS = {
    **{name: number for number, name in enumerate(_NAMES)}, "vm": LOADS, "vs": STORES, "lgkm": LDS,
}  # fmt: skip
# Waits for other things: results of vector instructions, addresses that are not translated yet.
_OTHER_WAITS = ("s_wait_alu", "s_wait_xcnt", "s_waitcnt_depctr", "s_wait_event")
_SCALAR = re.compile(
    r"s_(buffer_load|load|scratch_load|memtime|memrealtime|sendmsg|atc_probe|atomic|store|buffer_store)"
)
_LDS = re.compile(r"ds_(?P<exchange>bpermute|permute|swizzle|nop)?(?!gws|ordered|param|direct|bvh)")
_GLOBAL = re.compile(
    r"(?P<space>t?buffer|global|flat|scratch|image)_(?P<action>load|store|atomic|sample|gather4|bvh|msaa_load|inv|wb|wbinv)"
)
# Instructions of these names that no counter counts.
_UNCOUNTED = re.compile(
    r"buffer_(gl[01]_inv|inv|wbinvl1|wbl2)|(global|flat|s)_prefetch|s_(dcache|icache|gl1)|s_wait|image_get_resinfo"
)
# Instructions that read VCC without naming it.
_IMPLICIT_VCC = re.compile(r"s_cbranch_vcc|v_div_fmas|v_dual_cndmask")
_VCC_HI = 1 << isa.SCALARS + 107
_UNKNOWN = re.compile(r"exp|lds_|ds_|(t?buffer|global|flat|scratch|image|tensor|cluster)_|s_wait")


@lru_cache(1 << 16)
def effect(one: Instruction, generation: Generation) -> Effect:
    """Raises ValueError for an access whose counter is not known."""
    name = one.mnemonic
    if name in ("s_barrier", "s_barrier_signal", "s_barrier_signal_isfirst"):
        return Effect(one.reads, 0, (), 0, ordered=False, waits=(), barrier=True)
    if name.startswith("s_wait"):
        return Effect(0, 0, (), 0, ordered=False, waits=_waits(one, generation), barrier=False)
    if name.startswith("s_") and _SCALAR.match(name):
        return _access(one, (generation.scalar,), 0, ordered=False)
    if not one.kinds & (isa.VALU | isa.SALU) and not _UNCOUNTED.match(name):
        if (match := _LDS.match(name)) and name.startswith("ds_"):
            return _access(one, (LDS,), 0 if match["exchange"] else _lds(name), ordered=True)
        if match := _GLOBAL.match(name):
            return _access(one, *_global(one, match["space"], match["action"], generation))
        if _UNKNOWN.match(name):
            raise ValueError(f"{one.text}: the check does not know which wait ends it: add it to counters.py")
    touches = one.reads | one.writes
    if generation.one_word and _IMPLICIT_VCC.match(name):
        touches &= ~_VCC_HI
    return Effect(touches, 0, (), 0, ordered=False, waits=(), barrier=False)


def _access(op: Instruction, counters: tuple[int, ...], memory: int, ordered: bool) -> Effect:
    """An access. Its address and data are uses, but not the other half of a register that it loads a half of."""
    used = op.reads if not op.writes else 0
    for source in op.sources:
        used |= source
    access = op.writes & _REGISTERS | memory
    return Effect(used, op.writes, counters, access, ordered, (), barrier=False)


def _lds(name: str) -> int:
    if name.startswith(("ds_read", "ds_load")):
        return _READS_LDS
    return _WRITES_LDS if name.startswith(("ds_write", "ds_store")) else _OF_LDS


def _global(op: Instruction, space: str, action: str, generation: Generation) -> tuple[tuple[int, ...], int, bool]:
    """The counters of an access of global memory, the bits of the memory, and whether it ends in order."""
    name = op.mnemonic
    if "async_to_lds" in name:
        return (ASYNC,), _WRITES_LDS, True
    if "async_from_lds" in name:
        return (ASYNC,), _READS_LDS, True
    returns = action in ("load", "msaa_load", "sample", "gather4", "bvh", "inv") or bool(op.writes)
    counter = LOADS if returns else generation.stores
    if generation.split and space == "image":
        counter = SAMPLES if action in ("sample", "gather4", "msaa_load") else RAYS if action == "bvh" else counter
    memory = 0 if space == "scratch" or action in ("inv", "wb", "wbinv") else _OF_GLOBAL
    if memory and action in ("load", "store"):
        memory = _READS_GLOBAL if action == "load" else _WRITES_GLOBAL
    if isa.is_lds_dma(name, op.text):
        memory |= _WRITES_LDS
    if space == "flat":
        return (counter, LDS), memory | _OF_LDS, False
    return (counter,), memory, True


def _waits(op: Instruction, generation: Generation) -> tuple[tuple[int, int], ...]:
    """(counter, number that may stay under way) of a wait. Raises ValueError for an unknown wait."""
    name, operand = op.mnemonic, op.text.split()[-1]
    if name in _OTHER_WAITS:
        return ()
    if name == "s_wait_idle":
        return tuple((number, 0) for number in range(len(_NAMES)))
    if name == "s_waitcnt":
        named = re.findall(r"(\w+)cnt\((\w+)\)", op.text)
        if named:
            return tuple((_COUNTERS[counter], int(left, 0)) for counter, left in named)
        return tuple(_of_fields(int(operand, 0), generation))
    match = _WAIT_FOR_ONE.match(name)
    if match is None or match["first"] not in _COUNTERS:
        raise ValueError(f"{op.text}: the check does not know this wait: add it to counters.py")
    left = int(operand, 0)
    if match["second"]:
        return (_COUNTERS[match["first"]], left >> 8), (LDS, left & 0x3F)
    return ((_COUNTERS[match["first"]], left),)


def _of_fields(number: int, generation: Generation) -> Iterator[tuple[int, int]]:
    """The waits of a number of `s_waitcnt`."""
    for counter, fields in generation.fields:
        left = shift = 0
        for first, bits in fields:
            left |= (number >> first & (1 << bits) - 1) << shift
            shift += bits
        yield counter, left
