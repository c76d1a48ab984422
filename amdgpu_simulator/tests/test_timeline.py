"""The timeline of a compute unit: when the instructions of waves begin."""

from __future__ import annotations

from dataclasses import replace

import pytest

from amdgpu_simulator.clock import timeline
from amdgpu_simulator.clock.latencies import Latencies
from amdgpu_simulator.clock.record import Executed, Record
from amdgpu_simulator.isa import machine
from amdgpu_simulator.tests.test_isa import kernel, run

NOTHING = (0, 0, 0)
PLAIN = Latencies(memory=500, cached=500, shared=64, matrix=12, vector=4)
END = Executed("end", 0, (), (), NOTHING)
BARRIER = Executed("barrier", 0, (), (), NOTHING)


def vector(reads: int, writes: int, cycles: int = 4) -> Executed:
    return Executed("vector", cycles, (reads,), (writes,), NOTHING)


def matrix(reads: tuple[int, ...], writes: int) -> Executed:
    return Executed("matrix", 32, (*reads, writes), (writes,), NOTHING)


def play(*waves: list[Executed], resident: int = 1, target: str = "gfx942", latency: int = 500) -> float:
    """Cycles of instructions, without the final instruction of each wave."""
    group = [[*wave, END._replace(left=wave[-1].left if wave else NOTHING)] for wave in waves]
    issue = 4 if target == "gfx942" else 1
    return timeline.play(group, resident, target, replace(PLAIN, memory=latency, cached=latency)) - issue


@pytest.mark.parametrize(
    ("wave", "taken"),
    [
        ([vector(0, 1), vector(2, 3), vector(4, 5)], 12),
        # each instruction needs the result of the previous one
        ([vector(0, 1), vector(1, 2), vector(2, 3)], 4 + 8 + 8),
        ([vector(0, 1, 16), vector(2, 3)], 16 + 4),  # an exponential occupies the unit
        ([matrix((0, 1), 2), matrix((0, 1), 3), vector(4, 5)], 32 + 4 + 4),  # the matrix unit works in the background
        # a product need not wait for its accumulator
        ([matrix((0, 1), 2), matrix((0, 1), 2), vector(4, 5)], 32 + 4 + 4),
        # but it must wait for its other operands
        ([matrix((0, 1), 2), matrix((2, 1), 3), vector(4, 5)], 32 + 12 + 4 + 4),
        ([matrix((0, 1), 2), vector(2, 3)], 32 + 12 + 4),
        ([Executed("", 7, (), (), NOTHING)], 32),  # s_nop 7
    ],
)
def test_cycles_of_a_single_wave(wave: list[Executed], taken: int) -> None:
    assert play(wave) == taken


def test_waves_of_a_simd_take_turns() -> None:
    """Each of four waves has its own SIMD. More waves fill the idle cycles, until the unit is always busy."""
    chain = [vector(register, register + 1) for register in range(100)]
    assert play(chain, resident=1) == play(chain, resident=4) == 8 * 100 - 4
    assert play(chain, resident=8) == 8 * 100
    assert play(chain, resident=16) == pytest.approx(4 * 4 * 100, abs=8)


def test_simds_share_the_shared_memory_of_their_compute_unit() -> None:
    read = [Executed("shared", 16, (), (), (0, left, 0)) for left in range(1, 5)]
    assert play(read) == 4 * 16 - 12
    assert play(read, read, read, read) == 16 * 16 - 12
    assert play([*read, Executed("", 0, (), (), NOTHING)]) == 4 * 16 + 64 + 4
    # Two SIMDs share a path to it. The last of four results has passed after 4 * 24 cycles.
    slow = [one._replace(path=24) for one in read]
    assert play(slow, slow) == 4 * 2 * 24 - 20
    assert play(slow, [], slow) == play(read, [], read)
    assert play([*slow, Executed("", 0, (), (), NOTHING)]) == 4 * 24 + 64 + 4


def test_loads_are_waited_for_in_their_order() -> None:
    two = [Executed("memory", 16, (), (), (left, 0, 0)) for left in (1, 2)]
    first, both = (Executed("", 0, (), (), (left, 0, 0)) for left in (1, 0))
    work = vector(0, 1, 400)
    assert play([*two, first]) == 16 + 500 + 4
    assert play([*two, both]) == 32 + 500 + 4
    assert play([*two, both], latency=900) == 32 + 900 + 4
    assert play([*two, work._replace(left=(2, 0, 0)), both]) == play([*two, both])  # the work is done in the meantime
    assert play([*two, both, work]) == 32 + 500 + 4 + 4


def test_a_barrier_waits_for_the_last_wave() -> None:
    late = [vector(0, 1, 400), vector(2, 3)]
    assert play([*late, BARRIER], [BARRIER, vector(0, 1)]) == 404 + 4 + 4
    # Only waves of its own group count.
    assert play([BARRIER, vector(0, 1)], [BARRIER, vector(0, 1)], resident=2) == 8


def test_a_barrier_that_a_wave_never_reaches_is_an_error() -> None:
    with pytest.raises(ValueError, match="1 of 2 waves wait at a barrier"):
        play([BARRIER], [])


WAIT = Executed("", 0, (), (), NOTHING)


def test_a_wave_of_higher_priority_goes_first() -> None:
    """Two waves of a SIMD need the vector unit at the same cycle. Without s_setprio the older wave goes first."""
    work = [vector(row, row + 1, 40) for row in range(0, 8, 2)]
    loads = [*work, Executed("memory", 16, (), (), (1, 0, 0)), WAIT]
    others = [work, [], [], []]
    assert play(*others, loads) == 7 * 40 + 4 + 16 + 500 + 4
    # The priority takes effect from the second instruction of the older wave on.
    assert play(*others, [Executed("", 0, (), (), NOTHING, priority=1), *loads]) == 4 * 40 + 4 + 16 + 500 + 4


def load(*lines: int, loads: bool = True) -> Executed:
    return Executed("memory", 16, (), (), (1, 0, 0), lines, loads)


def cached(*wave: Executed, resident: int = 1, target: str = "gfx942", apart: int = 0) -> float:
    """Cycles of a wave that waits for its loads at the end. A cached line takes 100 cycles, another line 500."""
    return timeline.play([[*wave, WAIT, END]], resident, target, replace(PLAIN, cached=100), apart=apart) - 8


def test_a_cached_line_arrives_sooner() -> None:
    far, near = 16 + 500, 16 + 100
    assert cached(load(1)) == far
    assert cached(load(1), WAIT, load(1)) == far + 4 + near
    assert cached(load(1), WAIT, load(1, 2)) == far + 4 + far
    assert cached(load(1, loads=False), WAIT, load(1)) == far + 4 + far  # a store does not fill the cache
    assert cached(load(1), WAIT, load(1, loads=False)) == far + 4 + far
    # A copy of the group hits the lines that the other copy loaded, except lines of private memory.
    assert cached(load(1), resident=2, apart=1000) == 1000 + near
    assert cached(load(-1), resident=2, apart=1000) == 1000 + far


@pytest.mark.parametrize(("others", "last"), [(511, 100), (512, 500)])
def test_the_cache_evicts_the_least_recently_used_line(others: int, last: int) -> None:
    """The cache has 32 KiB in lines of 64 bytes."""
    rest = [one for line in range(2, 2 + others) for one in (load(line), WAIT)]
    before = cached(load(1), WAIT, *rest[:-1])
    assert cached(load(1), WAIT, *rest, load(1)) == before + 4 + 16 + last


def test_cache_misses_are_limited_by_bandwidth() -> None:
    lines = range(1000)
    assert cached(load(*lines)) == pytest.approx(len(lines) * 64 / 54 + 500)
    assert cached(load(*lines), target="gfx950") == pytest.approx(len(lines) + 500)


def test_a_work_group_processor_is_two_compute_units() -> None:
    """Waves 0 and 1 run on the first compute unit, waves 2 and 3 on the second.

    Each unit has its own path to shared memory.
    """
    read = [Executed("shared", 16, (), (), (0, left, 0)) for left in range(1, 5)]
    assert play(read, target="gfx1100") == 4 * 16 - 15
    assert play(*[read] * 4, target="gfx1100") == 8 * 16 - 15
    chain = [vector(row, row + 1, 1) for row in range(100)]
    assert play(*[chain] * 4, target="gfx1100") == play(chain, target="gfx1100") == 5 * 100 - 4


def test_work_groups_follow_each_other() -> None:
    """A place of a work group is taken again when all of its waves have ended."""
    short, long = ([vector(0, 1, cycles), vector(1, 2)] for cycles in (10, 100))
    group = [[*short, END], [*long, END]]
    assert timeline.play(group, 1, "gfx942", PLAIN, rounds=3) == 3 * timeline.play(group, 1, "gfx942", PLAIN)


def test_rdna_has_one_path_to_both_kinds_of_memory() -> None:
    both = [Executed("shared", 16, (), (), (0, 1, 0)), Executed("memory", 16, (), (), (1, 1, 0), (1,), loads=True)]
    waits = [*both, WAIT]
    assert play(waits, target="gfx1100") - play(waits, target="gfx942") == 12 - 3
    # In CU mode four waves share a path, in WGP mode two.
    read = [[Executed("shared", 16, (), (), (0, 1, 0)), END]] * 4
    one, two = (timeline.play(read, 1, "gfx1100", PLAIN, units=units) for units in (1, 2))
    assert one - two == 2 * 16


def test_registers_in_private_memory() -> None:
    """A spill of four bytes per lane accesses four cache lines for 64 lanes."""
    code = "scratch_store_dwordx2 off, v[0:1], off\n scratch_load_dword v9, off, off offset:4\n s_waitcnt vmcnt(0)"
    record = Record(kernel(code, "gfx942"))
    run("", program=machine.Program(record.kernel, record))
    store, load = (group for group in record.groups[0][0] if group.lines and group.lines[0] < 0)
    assert (len(store.lines), len(load.lines)) == (8, 4)
    assert set(load.lines) < set(store.lines)


CODE = """
v_cvt_f32_u32_e32 v4, v0
v_lshlrev_b32_e32 v5, 2, v0
ds_write_b32 v5, v4
s_waitcnt lgkmcnt(0)
s_barrier
s_nop 3
v_mfma_f32_32x32x8_bf16 v[16:31], v[4:5], v[4:5], v[16:31]
v_fmac_f32_e32 v4, v16, v5
v_cmp_eq_u32_e32 vcc, v4, v5
global_load_dword v9, v[2:3], off
s_waitcnt vmcnt(0)
"""


def test_the_record_of_each_instruction() -> None:
    record = Record(kernel(CODE, "gfx942"))
    run("", threads=128, program=machine.Program(record.kernel, record))
    (group,) = record.groups
    assert len(group) == 2
    assert [len(wave) for wave in group] == [len(record.kernel.instructions)] * 2
    start = next(index for index, one in enumerate(group[0]) if one.writes == (4,))
    numbers = tuple(range(16, 32))
    load, store = (one for one in group[0][start:] if one.unit == "memory")
    assert (load.loads, store.loads) == (True, False)
    assert len(store.lines) in (4, 5)  # 256 bytes, which may start inside a line
    assert set(store.lines) <= set(load.lines)
    assert [one._replace(lines=(), loads=False) for one in group[0][start:]] == [
        Executed("vector", 4, (0,), (4,), (0, 0, 0)),
        Executed("vector", 4, (0,), (5,), (0, 0, 0)),
        Executed("shared", 2, (5, 4), (), (0, 1, 0), path=4),
        Executed("", 0, (), (), (0, 0, 0)),
        BARRIER,
        Executed("", 3, (), (), (0, 0, 0)),
        Executed("matrix", 32, (4, 5, 4, 5, *numbers), numbers, (0, 0, 0)),
        Executed("vector", 4, (4, 16, 5), (4,), (0, 0, 0)),
        Executed("vector", 4, (4, 5), (), (0, 0, 0)),
        Executed("memory", 16, (9, 2, 3), (), (1, 0, 0)),
        Executed("", 0, (), (), (0, 0, 0)),
        Executed("memory", 16, (2, 3, 9), (), (1, 0, 0)),
        END._replace(left=(1, 0, 0)),
    ]


def test_rdna_multiplies_in_its_vector_units() -> None:
    record = Record(kernel("v_wmma_f32_16x16x16_f16 v[16:23], v[5:12], v[6:13], v[16:23]", "gfx1100"))
    run("", threads=32, program=machine.Program(record.kernel, record))
    (one,) = (group for group in record.groups[0][0] if len(group.writes) == 8)
    assert (one.unit, one.cycles, record.cycles["matrix"]) == ("matrix", 32, 32)
