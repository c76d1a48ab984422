"""The simulator reports races and missing waits that a GPU may tolerate."""

from __future__ import annotations

import pytest

from amdgpu_simulator.isa.arrivals import RegisterFaultError
from amdgpu_simulator.isa.global_memory import MemoryFaultError
from amdgpu_simulator.tests.test_floats import moded
from amdgpu_simulator.tests.test_isa import BRING, run

WAIT = "s_waitcnt vmcnt(0) lgkmcnt(0)\n"


@pytest.mark.parametrize(
    "code",
    [
        "global_load_dword v9, v[2:3], off\n v_mov_b32_e32 v9, 5\n",
        "global_load_dwordx2 v[8:9], v[2:3], off\n v_mov_b32_e32 v9, 5\n",
        "global_load_ubyte v9, v[2:3], off\n v_mov_b32_e32 v9, 5\n",
        "global_load_short_d16_hi v9, v[2:3], off\n v_mov_b32_e32 v9, 5\n",
        "ds_write_b32 v1, v1\n ds_read_b32 v9, v1\n v_mov_b32_e32 v9, 5\n",
        "ds_bpermute_b32 v9, v1, v0\n v_add_u32_e32 v9, 1, v9\n",
        "ds_read_b32 v9, v1\n v_mfma_f32_32x32x8_f16 v[0:15], v[20:21], v[20:21], 0\n",
        "s_load_dword s6, s[4:5], 0x0\n s_mov_b32 s6, 5\n",
        "s_load_dwordx2 s[6:7], s[4:5], 0x0\n s_mov_b32 s7, 5\n",
        "s_load_dword s6, s[4:5], 0x0\n s_load_dword s6, s[0:1], 0x0\n",
    ],
)
def test_a_register_must_not_be_overwritten_before_its_load_arrives(code: str) -> None:
    with pytest.raises(RegisterFaultError, match="was overwritten before its load arrived"):
        run("v_mov_b32_e32 v9, 0\n v_mov_b32_e32 v20, 0\n v_mov_b32_e32 v21, 0\n" + code + WAIT, room=2)


def test_loads_of_one_kind_arrive_in_order() -> None:
    later = "global_load_dword v9, v[2:3], off\n"
    assert set(run(later * 2 + "s_waitcnt vmcnt(1)\n")) == {0xFFFFFFFF}
    assert set(run(later * 2 + WAIT)) == {0xABABABAB}
    with pytest.raises(RegisterFaultError, match="ds_read_b32 v9, v1: v9 waits for a load of another kind"):
        run(later + "ds_read_b32 v9, v1\n" + WAIT)


def test_lanes_take_turns_with_a_register() -> None:
    """Both branches load into the same register, and one wait covers both loads."""
    code = """v_mov_b32_e32 v8, 7
    ds_write_b32 v1, v8
    s_waitcnt lgkmcnt(0)
    s_mov_b64 s[6:7], exec
    s_mov_b64 exec, 0xffffffff
    global_load_dword v9, v[2:3], off
    s_not_b64 exec, exec
    global_load_dword v9, v[2:3], off offset:-4
    s_mov_b64 exec, s[6:7]
    """
    assert set(run(code + WAIT)) == {0xABABABAB}
    halves = "global_load_short_d16 v9, v[2:3], off\n global_load_short_d16_hi v9, v[2:3], off\n"
    assert set(run(halves + WAIT)) == {0xABABABAB}


def test_a_flat_load_needs_both_counters() -> None:
    load = "flat_load_dword v9, v[2:3]\n"
    assert set(run(load + "s_waitcnt vmcnt(0)")) == {0xFFFFFFFF}
    assert set(run(load + "s_waitcnt lgkmcnt(0)")) == {0xFFFFFFFF}
    assert set(run(load + WAIT)) == {0xABABABAB}


# Each lane stores its number and reads the number of the same lane of the other wave.
STORE = "global_store_dword v[2:3], v0, off\n"
OTHER = """s_barrier
v_xor_b32_e32 v8, 0x100, v1
global_load_dword v9, v8, s[4:5]
s_waitcnt vmcnt(0)
s_barrier
"""


def test_a_store_that_another_wave_reads_needs_a_wait_and_a_barrier() -> None:
    assert list(run(STORE + "s_waitcnt vmcnt(0)\n" + OTHER, threads=128)) == [lane ^ 64 for lane in range(128)]
    with pytest.raises(MemoryFaultError, match=r"a race: wave 0 reads what wave 1 writes at .* its wait or a barrier"):
        run(STORE + OTHER, threads=128)
    with pytest.raises(MemoryFaultError, match="a race: wave 1 reads what wave 0 writes"):
        run(STORE + "s_waitcnt vmcnt(0)\n" + OTHER.replace("s_barrier\n", "", 1), threads=128)


@pytest.mark.parametrize(
    ("target", "wait", "late"),
    [
        ("gfx1100", "s_waitcnt_vscnt null, 0x0\n", "s_waitcnt vmcnt(0)\n"),
        ("gfx1201", "s_wait_storecnt 0x0\n", "s_wait_loadcnt 0x0\n"),
        ("gfx1201", "s_wait_storecnt_dscnt 0x0\n", "s_wait_loadcnt_dscnt 0x0\n"),
    ],
)
def test_stores_have_a_counter_of_their_own_from_gfx10_on(target: str, wait: str, late: str) -> None:
    other = OTHER.replace("0x100", "0x80")
    assert list(run(STORE + wait + other, target, threads=64)) == [lane ^ 32 for lane in range(64)]
    with pytest.raises(MemoryFaultError, match="reads what wave 1 writes"):
        run(STORE + late + other, target, threads=64)


def test_two_waves_must_not_write_different_values_to_a_word() -> None:
    same = "v_mov_b32_e32 v8, {}\n v_mov_b32_e32 v7, 0\n global_store_dword v7, v8, s[4:5]\n"
    run(same.format(7) + "s_waitcnt vmcnt(0)\n s_barrier\n v_mov_b32_e32 v9, 7", threads=128, room=2)
    with pytest.raises(MemoryFaultError, match="a race: wave 1 writes a different value than wave 0 writes"):
        run("v_lshrrev_b32_e32 v6, 6, v0\n" + same.format("v6"), threads=128)
    after = "s_waitcnt vmcnt(0)\n s_barrier\n" + same.format("v6")
    run(
        "v_lshrrev_b32_e32 v6, 6, v0\n v_mov_b32_e32 v9, v6\n" + same.format(5) + after.replace("v6\n", "9\n"),
        threads=64,
    )


def test_a_load_to_shared_memory_must_not_overtake_a_read() -> None:
    run("ds_read_b32 v8, v1\n s_waitcnt lgkmcnt(0)\n" + BRING)
    with pytest.raises(MemoryFaultError, match="a load brings what wave 0 still reads: no wait for the read, at byte"):
        run("ds_read_b32 v8, v1\n" + BRING)


@pytest.mark.parametrize(
    ("target", "code", "problem"),
    [
        ("gfx942", "v_mov_b32_e32 v16, 0", "v16: the kernel allocates 16"),
        ("gfx942", "v_mov_b64_e32 v[15:16], 0", "v16: the kernel allocates 16"),
        ("gfx942", "v_accvgpr_write_b32 a8, v0", "a8: the kernel allocates 8"),
        ("gfx942", "s_mov_b32 s20, 0", "s20: the kernel allocates 20"),
        ("gfx908", "v_accvgpr_write_b32 a24, v0", "a24: the kernel allocates 24"),
        ("gfx1100", "v_mov_b32_e32 v24, 0", "v24: the kernel allocates 24"),
        ("gfx1100", "s_mov_b64 s[106:107], 0", "s107: the kernel allocates 106"),
        ("gfx942", "v_mov_b32_e32 v15, 0\n v_accvgpr_write_b32 a7, v0\n s_mov_b32 s19, 0", ""),
    ],
)
def test_registers_that_a_kernel_does_not_have_are_refused(target: str, code: str, problem: str) -> None:
    limits = {"next_free_vgpr": 24, "next_free_sgpr": 20}
    if target == "gfx942":
        limits["accum_offset"] = 16
    if not problem:
        moded(code, target, **limits)
        return
    with pytest.raises(NotImplementedError, match=problem):
        moded(code, target, **limits)
