"""Compares the clock with thread traces of GPUs, fact by fact.

    python -m amdgpu_simulator traces DIR

A fact is a number of cycles between the issues of two instructions of a wave. The traces give it for each pair that
they hold; the clock gives it for a few instructions of its own. Public traces: extra/sqtt/examples of tinygrad's
repository, of gfx1100, gfx1200 and gfx950. A trace of CDNA says the kind of an instruction alone.
"""

from __future__ import annotations

import re
from collections import Counter, defaultdict
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path
from typing import Literal

from amdgpu_simulator import thread_trace
from amdgpu_simulator.clock import timeline
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.isa import assembly, machine, targets
from amdgpu_simulator.thread_trace import Issue


@dataclass(frozen=True, kw_only=True)
class Fact:
    """first, second: patterns of two mnemonics.

    pair: `next` if the second instruction follows at once and needs nothing of the first one, `needs` if it reads the
    first one's result and no later result, `jump` if the first one is a branch that jumps, `barrier` if the first one
    is the last barrier instruction of the SIMD. at_least: shorter gaps do not count, because the instruction went into
    a queue. before, after: the instructions of the clock's example up to the first one, and from there to the second
    one. generations: of the example, if others lack its instructions.
    """

    name: str
    first: str
    second: str
    pair: Literal["next", "needs", "jump", "barrier"]
    before: str
    after: str
    at_least: int = 0


_LDS = "v_mov_b32 v8, 0\ns_nop 15\n"
_WAIT = {"RDNA3": "s_waitcnt lgkmcnt(0)", "RDNA4": "s_wait_dscnt 0"}
_BARRIER = {"RDNA3": "s_barrier", "RDNA4": "s_barrier_signal -1\ns_barrier_wait -1"}
_WMMA = "v_wmma_{} v[16:23], v[{a}], v[{b}], v[16:23]"
FACTS = (
    Fact(
        name="vector instruction needs the previous one", first="v_add_f32", second="v_add_f32", pair="needs",
        before="v_add_f32 v4, v5, v6", after="v_add_f32 v7, v4, v6",
    ),
    Fact(
        name="64-bit shift, next vector instruction", first="v_lshlrev_b64", second="v_", pair="next",
        before="v_lshlrev_b64 v[4:5], 2, v[6:7]", after="v_mov_b32 v9, 0",
    ),
    Fact(
        name="64-bit multiply-add, next vector instruction", first="v_mad_co_u64_u32", second="v_", pair="next",
        before="v_mad_u64_u32 v[4:5], null, v6, v7, v[8:9]", after="v_mov_b32 v10, 0",
    ),
    Fact(
        name="transcendental, next transcendental", first="v_rcp_f32", second="v_s_exp_f32", pair="next",
        before="v_rcp_f32 v4, v5", after="v_exp_f32 v6, v7",
    ),
    Fact(
        name="transcendental, next vector instruction", first="v_s_exp_f32", second="v_mov_b32", pair="next",
        before="v_exp_f32 v4, v5", after="v_mov_b32 v6, 0",
    ),
    Fact(
        name="LDS load of 4 bytes, end of the wait for it", first="ds_load_b32", second="s_wait", pair="next",
        before=_LDS + "ds_load_b32 v4, v8", after="{wait}",
    ),
    Fact(
        name="LDS load of 16 bytes, use", first="ds_load_b128", second="v_", pair="needs",
        before=_LDS + "ds_load_b128 v[4:7], v8", after="{wait}\nv_mov_b32 v9, v4",
    ),
    Fact(
        name="vector result, address or data of LDS", first="v_", second="ds_", pair="needs",
        before="v_mov_b32 v8, 0", after="ds_load_b32 v4, v8",
    ),
    Fact(
        name="vector result, data of global memory", first="v_", second="global_store", pair="needs",
        before="v_mov_b32 v8, 0", after="global_store_b32 v8, v8, s[0:1]",
    ),
    Fact(
        name="scalar instruction needs the previous one", first="s_(add|ashr|lshl)", second="s_(ashr|lshl|add_nc)",
        pair="needs", before="s_add_u32 s20, s21, s22", after="s_lshl_b32 s23, s20, 2",
    ),
    Fact(
        name="branch that jumps, next instruction", first="s_cbranch", second="", pair="jump",
        before="s_branch .Lthere\ns_nop 0\n.Lthere:", after="s_mov_b32 s20, 0",
    ),
    Fact(
        name="v_cmpx, branch", first="v_cmpx", second="s_cbranch_exec", pair="next",
        before="v_cmpx_eq_u32 v0, v0", after="s_cbranch_execz .Lend\n.Lend:",
    ),
    Fact(
        name="last arrival at a barrier, next instruction", first="s_barrier", second="", pair="barrier",
        before="", after="{barrier}\ns_mov_b32 s20, 0",
    ),
    Fact(
        name="fp16 product leaves a full queue", first="v_wmma_i32", second="s_", pair="next", at_least=4,
        before=_WMMA.format("f32_16x16x16_f16", a="{a}", b="{b}"), after="v_mov_b32 v60, 0",
    ),
    Fact(
        name="int8 product leaves a full queue", first="v_wmma_f32", second="v_wmma_i32", pair="next", at_least=4,
        before=_WMMA.format("i32_16x16x16_iu8", a="{a8}", b="{b8}"), after="v_mov_b32 v60, 0",
    ),
)  # fmt: skip

# Facts about kinds of instructions: the first instruction of a stretch of `first`, and the next `second` after it.
CDNA_FACTS = (
    Fact(
        name="LDS write of 4 bytes, end of the wait for it", first="LDS", second="", pair="next",
        before=_LDS + "v_mov_b32 v4, 0\nds_write_b32 v8, v4", after="s_waitcnt lgkmcnt(0)",
    ),
    Fact(
        name="first of four LDS loads of 16 bytes, use of its result", first="LDS", second="VALU_32", pair="needs",
        before=_LDS + "ds_read_b128 v[4:7], v8",
        after="ds_read_b128 v[10:13], v8\nds_read_b128 v[14:17], v8\nds_read_b128 v[18:21], v8\ns_waitcnt lgkmcnt(3)\n"
        "v_mov_b32 v9, v4",
    ),
)  # fmt: skip


# Operands of a matrix product in different banks of registers.
_PRODUCTS = {
    "RDNA3": {"a": "25:32", "b": "34:41", "a8": "25:28", "b8": "34:37"},
    "RDNA4": {"a": "25:28", "b": "34:37", "a8": "25:26", "b8": "34:35"},
}
_KERNEL = """
\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"
kernel:

{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_group_segment_fixed_size 1024
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_next_free_vgpr 64
\t\t.amdhsa_next_free_sgpr 32
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
"""


def table(directory: Path) -> Iterator[str]:
    """Yields the lines of a Markdown table, then the traces without an instruction. Raises ValueError for a directory
    without traces, for a target or a generation whose traces are not known, and without tinygrad.
    """
    seen: dict[str, dict[str, Counter[int]]] = defaultdict(lambda: defaultdict(Counter))
    silent = []
    for path in thread_trace.files(directory):
        target = path.parent.name
        generation = targets.get(target).generation.name
        if generation not in (*_PRODUCTS, "CDNA"):
            raise ValueError(f"{path}: traces of {generation} are not known: add its waits and products to traces.py")
        issued = 0
        if generation == "CDNA":
            for wave in thread_trace.operations(path):
                issued += len(wave)
                for fact in CDNA_FACTS:
                    seen[target][fact.name].update(_of_kinds(fact, wave))
        else:
            for waves in thread_trace.waves(path):
                issued += sum(map(len, waves))
                for fact in FACTS:
                    seen[target][fact.name].update(gaps(fact, waves))
        if not issued:
            silent.append(f"{target}/{path.name}")
    yield "| fact, cycles from issue to issue | target | GPU | clock | events within 1 cycle of the clock |"
    yield "|-|-|-|-|-|"
    for fact in (*FACTS, *CDNA_FACTS):
        for target, facts in seen.items():
            if tally := facts[fact.name]:
                ours = clock(fact, target)
                near = sum(count for cycles, count in tally.items() if abs(cycles - ours) <= 1)
                yield f"| {fact.name} | {target} | {_most(tally)} | {ours:.0f} | {near} of {tally.total()} |"
    if silent:
        yield ""
        yield f"No instruction of a traced wave is in {', '.join(silent)}."


def _most(tally: Counter[int]) -> str:
    """The most frequent numbers of cycles, and how often they occur."""
    return ", ".join(f"{cycles} ({count})" for cycles, count in tally.most_common(3))


def gaps(fact: Fact, waves: Sequence[Sequence[Issue]]) -> list[int]:
    """The cycles between the instructions of each pair of the waves of a SIMD."""
    if fact.pair == "barrier":
        return _after_barriers(fact, waves)
    distances = []
    for wave in waves:
        writer: dict[int, Issue] = {}
        for index, second in enumerate(wave):
            if first := _first(fact, wave, index, writer):
                distances.append(second.time - first.time)
            writer.update(dict.fromkeys(second.writes, second))
    return [cycles for cycles in distances if cycles >= fact.at_least]


def _of_kinds(fact: Fact, wave: Sequence[tuple[int, str]]) -> list[int]:
    """The cycles of a fact about kinds. A stretch of one access of LDS is a write, of four the loads of a product."""
    kinds = [kind for _, kind in wave]
    cycles = []
    for start, kind in enumerate(kinds):
        if kind != fact.first or (start and kinds[start - 1] == fact.first):
            continue
        end = next((at for at in range(start, len(kinds)) if kinds[at] != fact.first), len(kinds))
        use = next((at for at in range(end, len(kinds)) if kinds[at] == fact.second or not fact.second), None)
        if use is not None and end - start == (4 if fact.pair == "needs" else 1):
            cycles.append(wave[use][0] - wave[start][0])
    return cycles


def _first(fact: Fact, wave: Sequence[Issue], index: int, writer: dict[int, Issue]) -> Issue | None:
    """The first instruction of a pair whose second one is wave[index]."""
    second, previous = wave[index], wave[index - 1] if index else None
    if not re.match(fact.second, second.name):
        return None
    if fact.pair == "needs":
        first = max((writer[row] for row in second.reads if row in writer), key=lambda issue: issue.time, default=None)
    else:
        first = previous
        if first and fact.pair == "next" and first.writes & second.reads and "v_cmpx" not in fact.first:
            return None
    if first is None or not re.match(fact.first, first.name) or (fact.pair == "jump" and not first.taken):
        return None
    return first


def _after_barriers(fact: Fact, waves: Sequence[Sequence[Issue]]) -> list[int]:
    """From the last arrival at the n-th barrier of the SIMD's waves to the first instruction after it."""
    crossings = [
        [(wait.time, after.time) for wait, after in pairwise(wave) if re.match(fact.first, wait.name)] for wave in waves
    ]
    return [
        min(after for _, after in crossing) - max(time for time, _ in crossing)
        for crossing in zip(*crossings, strict=False)
    ]


def clock(fact: Fact, target: str) -> float:
    """The cycles between the two instructions of the clock's example."""
    generation = targets.get(target).generation.name
    names = {"wait": _WAIT.get(generation), "barrier": _BARRIER.get(generation), **_PRODUCTS.get(generation, {})}
    before, after = (text.format(**names) for text in (fact.before, fact.after))
    code = "\n".join(line if line.startswith(".") else f"\t{line}" for line in f"{before}\n{after}".splitlines())
    kernel = assembly.parse(_KERNEL.format(target=target, code=code))
    record = Record(kernel)
    machine.launch(machine.Program(kernel, record), (1, 1, 1), kernel.wave, bytes(8), [])
    issued: dict[int, list[float]] = {}
    timeline.play(record.groups[0], 1, target, issued=issued)
    begins = issued[0][:-1]  # without s_endpgm
    steps = sum(not line.startswith(".") for line in after.splitlines())
    if fact.pair == "barrier":
        steps -= 1
    return begins[-1] - begins[-1 - steps]
