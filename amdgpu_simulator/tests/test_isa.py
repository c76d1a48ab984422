"""Single instructions: their results, as AMD's guides define them, and the instructions that are refused."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest

from amdgpu_simulator.clock import cost
from amdgpu_simulator.clock.latencies import latencies
from amdgpu_simulator.clock.record import Record
from amdgpu_simulator.hip import topology
from amdgpu_simulator.isa import arguments, assembly, machine
from amdgpu_simulator.isa.assembly import Array
from amdgpu_simulator.isa.global_memory import Memory, MemoryFaultError
from amdgpu_simulator.isa.lds import Shared
from amdgpu_simulator.isa.queues import Operation

KERNEL = """
\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"
kernel:
{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_kernarg_size 8
\t\t.amdhsa_group_segment_fixed_size 1024
\t\t.amdhsa_private_segment_fixed_size 16
\t\t.amdhsa_user_sgpr_count 2
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_system_sgpr_workgroup_id_x 1
\t.end_amdhsa_kernel
"""
# v[2:3] has the address of the lane's result word; the kernel's argument is the address of the first word.
LOAD = """
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\ts_waitcnt lgkmcnt(0)
\tv_lshlrev_b32_e32 v1, 2, v0
\tv_mov_b32_e32 v2, s4
\tv_mov_b32_e32 v3, s5
\tv_add_co_u32_e32 v2, vcc, v2, v1
\tv_addc_co_u32_e64 v3, vcc, v3, 0, vcc
"""
STORE = "\n\tglobal_store_dword v[2:3], v9, off"


def kernel(code: str, target: str) -> assembly.Kernel:
    code = "\n".join("\t" + line.strip() for line in (LOAD + code + STORE).splitlines() if line.strip())
    return assembly.parse(KERNEL.format(target=target, code=code))


def run(
    code: str,
    target: str = "gfx942",
    *,
    threads: int = 64,
    backwards: bool = False,
    program: machine.Program | None = None,
    room: int = 1,
    in_step: bool = False,
) -> Array:
    """Runs a kernel of one group. Returns the word that each thread stores from its v9. room: words of the result
    tensor.
    """
    out = np.full(threads * room, 0xABABABAB, np.uint32)
    program = program or machine.Program(kernel(code, target))
    ranges = [(out.ctypes.data, out.nbytes)]
    argument = struct.pack("<Q", out.ctypes.data)
    machine.launch(program, (1, 1, 1), threads, argument, ranges, backwards=backwards, in_step=in_step)
    return out


def floats(code: str, target: str = "gfx942") -> list[float]:
    return list(run(code, target).view(np.float32))


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("v_add_u32_e32 v9, 0x10, v0", lambda lane: lane + 16),
        ("v_sub_u32_e32 v9, 3, v0", lambda lane: (3 - lane) % 2**32),
        ("v_sub_u32_e64 v9, v0, 2 clamp", lambda lane: max(lane - 2, 0)),
        ("v_add_i32 v9, v0, -1", lambda lane: (lane - 1) % 2**32),
        ("v_sub_i32 v9, 3, v0", lambda lane: (3 - lane) % 2**32),
        ("v_nop\n v_mov_b32_e32 v9, v0", lambda lane: lane),
        ("v_bfe_u32 v9, v0, 1, 3", lambda lane: lane >> 1 & 7),
        ("v_bfe_i32 v9, v0, 0, 1", lambda lane: -(lane & 1) % 2**32),
        ("v_mul_hi_u32 v9, 0x10000000, v0", lambda lane: lane >> 4),
        ("v_mad_u64_u32 v[8:9], s[6:7], v0, -1, 0", lambda lane: max(lane - 1, 0)),
        ("v_alignbit_b32 v9, v0, v0, 4", lambda lane: (lane << 28 | lane >> 4) % 2**32),
        ("v_lshl_or_b32 v9, v0, 8, v0", lambda lane: lane << 8 | lane),
        ("v_bfrev_b32_e32 v9, v0", lambda lane: int(f"{lane:032b}"[::-1], 2)),
        ("v_mov_b32_e32 v8, 0x44332211\n v_perm_b32 v9, v8, v0, 0x0c070400", lambda lane: 0x441100 | lane),
        ("v_and_b32_sdwa v9, v0, v0 dst_sel:BYTE_2 dst_unused:UNUSED_PAD src0_sel:BYTE_0 src1_sel:BYTE_0",
         lambda lane: lane << 16),
        ("v_mov_b32_dpp v9, v0 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf", lambda lane: lane ^ 1),
        ("v_mov_b32_dpp v9, v0 row_ror:1 row_mask:0xf bank_mask:0xf", lambda lane: lane // 16 * 16 + (lane - 1) % 16),
        ("v_mov_b32_e32 v9, 7\n v_mov_b32_dpp v9, v0 row_shr:1 row_mask:0xf bank_mask:0xf",
         lambda lane: lane - 1 if lane % 16 else 7),
        ("v_xor_b32_e32 v8, 0x80, v1\n ds_bpermute_b32 v9, v8, v0\n s_waitcnt lgkmcnt(0)", lambda lane: lane ^ 32),
        ("v_readlane_b32 s6, v0, 5\n v_mov_b32_e32 v9, s6", lambda _lane: 5),
        ("v_cmp_gt_u32_e32 vcc, 9, v0\n v_cndmask_b32_e32 v9, 1, v0, vcc", lambda lane: lane if lane < 9 else 1),
        ("v_mov_b32_e32 v9, 0\n v_cmp_gt_u32_e64 s[6:7], 9, v0\n s_and_saveexec_b64 s[8:9], s[6:7]\n"
         "v_mov_b32_e32 v9, 1\n s_mov_b64 exec, s[8:9]", lambda lane: int(lane < 9)),
        ("v_mbcnt_lo_u32_b32 v8, -1, 0\n v_mbcnt_hi_u32_b32 v9, -1, v8", lambda lane: lane),
        ("s_mov_b32 s6, 5\n s_lshl_b32 s6, s6, 30\n s_cselect_b32 s6, s6, 1\n v_mov_b32_e32 v9, s6",
         lambda _lane: 1 << 30),
        ("s_mov_b64 s[6:7], -1\n s_add_u32 s6, s6, 1\n s_addc_u32 s7, s7, 4\n v_mov_b32_e32 v9, s7", lambda _lane: 4),
    ],
)  # fmt: skip
def test_integers(code: str, expected: object) -> None:
    assert callable(expected)
    assert list(run(code)) == [expected(lane) for lane in range(64)]


def test_floats() -> None:
    lanes = range(64)
    assert floats("v_cvt_f32_u32_e32 v8, v0\n v_fma_f32 v9, v8, -2.0, |v8|") == [-float(lane) for lane in lanes]
    assert floats("v_cvt_f32_u32_e32 v8, v0\n v_mul_f32_e64 v9, v8, 0.5 clamp") == [min(lane / 2, 1) for lane in lanes]
    assert floats("v_mov_b32_e32 v8, 0x40400000\n v_exp_f32_e32 v9, v8")[0] == 8.0
    for name, rest in (("mac", 0.0), ("fmac", 2**-24)):  # (1 + 2^-12)^2 - (1 + 2^-11), the product rounded or exact
        code = f"v_mov_b32_e32 v8, 0x3f800800\n v_mov_b32_e32 v9, 0xbf801000\n v_{name}_f32_e32 v9, v8, v8"
        assert floats(code)[0] == rest
    packed = "v_cvt_f32_u32_e32 v6, v0\n v_mov_b32_e32 v7, 1.0\n v_pk_add_f32 v[8:9], v[6:7], v[6:7] op_sel_hi:[0,1]"
    assert floats(packed) == [lane + 1.0 for lane in lanes]
    mixed = "v_mov_b32_e32 v8, 0x40003c00\n v_fma_mix_f32 v9, v8, v8, 0.5 op_sel:[1,0,0] op_sel_hi:[1,1,0]"
    assert floats(mixed)[0] == 2.5


def test_both_halves_of_a_dual_instruction_read_first() -> None:
    code = "v_mov_b32_e32 v8, 1\n v_mov_b32_e32 v9, 2\n v_dual_mov_b32 v8, v9 :: v_dual_mov_b32 v9, v8"
    program = machine.Program(assembly.parse(KERNEL.format(target="gfx1100", code="\t" + code.replace("\n ", "\n\t"))))
    assert len(program.code) == 4
    wave = machine._wave(program.kernel, Memory([]), Shared(4), 0, (0, 0, 0), 0)
    assert program.run(wave) == "end"
    assert (wave.v[8, 0], wave.v[9, 0]) == (2, 1)


def test_matrices() -> None:
    """A[row, k] and B[k, row] are in lane row + 32 * (k // 4). A lane holds 16 rows of its column of D."""
    code = "v_cvt_f32_u32_e32 v8, v0\n v_cvt_f16_f32_e32 v10, v8\n v_mov_b32_e32 v11, 0\n"
    code += "v_mov_b32_e32 v12, 0x3c00\n v_mov_b32_e32 v13, 0\n"  # 1.0 if k is 0 or 4
    code += "v_mfma_f32_32x32x8_f16 v[16:31], v[10:11], v[12:13], 1.0\n v_mov_b32_e32 v9, v21"
    rows = [8 + 4 * (lane // 32) + 1 for lane in range(64)]  # the sixth register
    assert floats(code) == [1.0 + row + (row + 32) for row in rows]


@pytest.mark.parametrize(
    ("kind", "a", "b", "c", "exact"),
    [
        ("32x32x8f16", 0x03FF03FF, 0x3C003C00, 0x3F800000, 1 + 8 * 1023 * 2.0**-24),  # the largest subnormal, times 1
        ("32x32x8f16", 0x3C003C00, 0x80018001, 0x3F800000, 1 - 8 * 2.0**-24),  # the smallest one, negative
        ("32x32x8f16", 0x04000400, 0x3C003C00, 0x3F800000, None),  # the smallest normal number
        ("16x16x16f16", 0x03FF03FF, 0x3C003C00, 0x3F800000, 1 + 16 * 1023 * 2.0**-24),
        ("32x32x8bf16_1k", 0x007F007F, 0x7F007F00, 0x3F800000, 1 + 8 * 127 * 2.0**-133 * 2.0**127),
        ("32x32x8bf16_1k", 0x1E801E80, 0x1E801E80, 0, 8 * 2.0**-132),  # 2^-66 squared: a subnormal result
        ("32x32x8f16", 0, 0, 0x00400000, 2.0**-127),  # a subnormal accumulator
        ("32x32x2f32", 0x00400000, 0x7F000000, 0x3F800000, None),  # products of fp32 flush nothing
        ("32x32x2f32", 0, 0, 0x00400000, None),
    ],
)  # fmt: skip
def test_subnormals_of_matrices(kind: str, a: int, b: int, c: int, exact: float | None) -> None:
    """Only MI200 treats subnormals as zero. exact: the result without a flush, None if MI200 has the same result."""
    code = "".join(f"v_mov_b32_e32 v{at}, {a if at < 12 else b:#x}\n " for at in range(10, 14))
    code += "".join(f"v_mov_b32_e32 v{at}, {c:#x}\n " for at in range(16, 32))
    left, right = ("v10", "v12") if "f32" in kind else ("v[10:11]", "v[12:13]")
    last = 19 if kind.startswith("16") else 31
    code += f"v_mfma_f32_{kind} v[16:{last}], {left}, {right}, v[16:{last}]\n v_mov_b32_e32 v9, v17"
    flushed = set(floats(code, "gfx90a"))
    plain = {target: set(floats(code, target)) for target in ("gfx908", "gfx942")}
    assert plain["gfx908"] == plain["gfx942"]
    if exact is None:
        assert flushed == plain["gfx942"]
    else:
        assert plain["gfx942"] == {np.float32(exact)}
        assert flushed == {1.0 if c == 0x3F800000 else 0.0}
    with pytest.raises(NotImplementedError, match="gfx90a flushes subnormals in this instruction"):
        floats("v_dot2_f32_f16 v9, v8, v8, v8", "gfx90a")


def test_shared_memory_and_barriers() -> None:
    write = "v_mov_b32_e32 v8, v1\n ds_write_b32 v8, v0\n s_waitcnt lgkmcnt(0)\n"
    read = "v_xor_b32_e32 v8, 0x100, v1\n ds_read_b32 v9, v8\n s_waitcnt lgkmcnt(0)"
    for backwards in (False, True):
        whole = run(f"{write} s_barrier\n {read}", threads=128, backwards=backwards)
        assert list(whole) == [lane ^ 64 for lane in range(128)]
    with pytest.raises(MemoryFaultError, match="ds_read_b32 v9, v8: a race: wave 1 reads what another wave wrote"):
        run(f"{write} v_and_b32_e32 v8, 0xff, v1\n ds_read_b32 v9, v8", threads=128)
    with pytest.raises(MemoryFaultError, match="a race: wave 1 writes what another wave read since the last barrier"):
        run(write + read, threads=128)
    with pytest.raises(MemoryFaultError, match="a race: wave 1 writes what another wave wrote"):
        run("v_mov_b32_e32 v8, 0\n ds_write_b32 v8, v0", threads=128)
    run("v_mov_b32_e32 v8, 0\n ds_write_b32 v8, v8\n v_mov_b32_e32 v9, 0", threads=128)  # the same value
    # If lanes of one wave write different values to one address, the last lane wins.
    run("v_mov_b32_e32 v8, 0\n v_and_b32_e32 v9, 63, v0\n ds_write_b32 v8, v9", threads=128)


def test_invalid_accesses_and_instructions_are_refused() -> None:
    with pytest.raises(
        MemoryFaultError, match=r"global_load_dword v9, v\[2:3\], off offset:4: the 4 bytes at 0x\w+ belong"
    ):
        run("global_load_dword v9, v[2:3], off offset:4")
    with pytest.raises(MemoryFaultError, match="byte 1027 is past the 1024 bytes of shared memory"):
        run("v_mov_b32_e32 v8, 0\n ds_read_b32 v9, v8 offset:1024")
    with pytest.raises(NotImplementedError, match="v_frobnicate_f32 v9, v0: not known"):
        run("v_frobnicate_f32 v9, v0")
    with pytest.raises(NotImplementedError, match="modifiers frob"):
        run("v_add_f32_e64 v9, v0, v0 frob:1")
    with pytest.raises(ValueError, match="the text holds 0 AMD kernels"):
        assembly.parse("int main;")


def test_the_counter_of_shared_memory_ends_at_fifteen() -> None:
    """The 16th instruction waits for the oldest one. Kernels rely on that: the first of 16 reads has arrived."""
    reads = "v_mov_b32_e32 v8, v1\n ds_write_b32 v8, v0\n s_waitcnt lgkmcnt(0)\n" + "".join(
        f"ds_read_b32 v{20 + number}, v8\n" for number in range(16)
    )
    assert list(run(f"{reads} v_mov_b32_e32 v9, v20")) == list(range(64))
    assert 0 not in run(f"{reads} v_mov_b32_e32 v9, v21")
    assert 0 not in run(f"{reads} v_mov_b32_e32 v9, v20", "gfx1030", threads=32)


def test_accesses_past_a_buffer() -> None:
    """Past its last byte, a buffer reads zero and ignores writes."""
    code = "s_mov_b32 s6, 16\n s_mov_b32 s7, 0x27000\n s_mov_b32 s4, s4\n"
    code += "s_and_b32 s5, s5, 0xffff\n buffer_load_dword v9, v1, s[4:7], 0 offen\n s_waitcnt vmcnt(0)"
    assert list(run(code)) == [0xABABABAB] * 4 + [0] * 60


def test_a_buffer_of_records_checks_the_index() -> None:
    """Records of 4 bytes: past the fifth record, a buffer reads zero and ignores writes."""
    resource = "s_mov_b32 s6, 5\n s_mov_b32 s7, 0x20000\n s_and_b32 s5, s5, 0xffff\n s_or_b32 s5, s5, 0x40000\n"
    load = "buffer_load_dword v9, v0, s[4:7], 0 idxen\n s_waitcnt vmcnt(0)"
    assert list(run(resource + load)) == [0xABABABAB] * 5 + [0] * 59
    wide = "v_lshlrev_b32_e32 v8, 1, v0\n buffer_load_dwordx2 v[8:9], v8, s[4:7], 0 idxen\n s_waitcnt vmcnt(0)"
    assert list(run(resource + wide, room=2)[:64]) == [0xABABABAB] * 3 + [0] * 61
    store = "v_mov_b32_e32 v9, 7\n buffer_store_dword v9, v0, s[4:7], 0 idxen offset:256\n"
    assert list(run(resource + store, room=2)[64:70]) == [7] * 5 + [0xABABABAB]
    # Without an index, the same resource counts bytes.
    raw = "buffer_load_dword v9, v1, s[4:7], 0 offen\n s_waitcnt vmcnt(0)"
    assert list(run(resource.replace("s6, 5", "s6, 8") + raw)) == [0xABABABAB] * 2 + [0] * 62


def test_wide_loads_to_shared_memory() -> None:
    """Each lane's bytes follow the bytes of the lane before. gfx950 has more shared memory than M0's lower half can
    address.
    """
    code = BRING.replace("buffer_load_dword v1", "v_lshlrev_b32_e32 v7, 4, v0\n buffer_load_dwordx4 v7")
    code = code.replace("s6, 0x200", "s6, 0x400") + "s_waitcnt vmcnt(0)\n v_xor_b32_e32 v8, 0xff, v1\n"
    code += "v_and_b32_e32 v8, 0xfc, v8\n ds_read_b32 v9, v8\n s_waitcnt lgkmcnt(0)"
    program = machine.Program(kernel(code, "gfx950"))
    out = np.arange(256, dtype=np.uint32)
    ranges = [(out.ctypes.data, out.nbytes)]
    machine.launch(program, (1, 1, 1), 64, struct.pack("<Q", out.ctypes.data), ranges)
    assert list(out[:64]) == list(range(63, -1, -1))
    with pytest.raises(MemoryFaultError, match="past the 1024 bytes of shared memory"):
        run(code.replace("m0, s8", "m0, 0x10000"), "gfx950", room=4)


def test_waves_in_lockstep() -> None:
    """Both waves read the first bytes of shared memory before wave 0 overwrites them, without a barrier."""
    code = """
    v_mov_b32_e32 v6, 0
    v_mov_b32_e32 v7, 5
    ds_write_b32 v6, v7
    s_waitcnt lgkmcnt(0)
    s_barrier
    ds_read_b32 v9, v6
    s_waitcnt lgkmcnt(0)
    ds_write_b32 v6, v0
    """
    assert set(run(code, threads=128, in_step=True)) == {5}
    with pytest.raises(MemoryFaultError, match="a race"):
        run(code, threads=128)


def test_a_direct_load_in_lockstep_arrives_at_its_wait() -> None:
    before = "v_mov_b32_e32 v8, 5\n ds_write_b32 v1, v8\n s_waitcnt lgkmcnt(0)\n"
    code = before + BRING + "ds_read_b32 v9, v1\n s_waitcnt {}"
    assert set(run(code.format("lgkmcnt(0)"), in_step=True)) == {5}
    code = before + BRING + "s_waitcnt vmcnt(0)\n ds_read_b32 v9, v1\n s_waitcnt lgkmcnt(0)"
    assert set(run(code, in_step=True)) == {0xABABABAB}


def test_a_scalar_offset_of_private_memory_counts_all_lanes() -> None:
    code = "s_mov_b32 s5, 0x3fff0000\n s_mov_b32 s8, 0x100\n buffer_store_dword v0, off, s[4:7], 0 offset:8\n"
    code += "buffer_load_dword v9, off, s[4:7], s8\n s_waitcnt vmcnt(0)"
    assert list(run(code, "gfx1030", threads=32)) == list(range(32))


def test_initial_state_of_a_wave() -> None:
    """A wave has the address of the dispatch packet, whose word 3 is the grid size, and preloaded arguments. It begins
    after the trap for firmware that does not preload.
    """
    code = KERNEL.replace("{code}", "\ts_trap 2\n\ts_load_dword s10, s[0:1], 0xc\n\ts_waitcnt lgkmcnt(0)\n{code}")
    code = code.replace("user_sgpr_count 2", "user_sgpr_count 6").replace(
        "\t\t.amdhsa_user_sgpr_kernarg", "\t\t.amdhsa_user_sgpr_dispatch_ptr 1\n\t\t.amdhsa_user_sgpr_kernarg"
    )
    code = code.replace("segment_ptr 1", "segment_ptr 1\n\t\t.amdhsa_user_sgpr_kernarg_preload_length 2")
    body = "\tv_lshlrev_b32_e32 v1, 2, v0\n\tv_mov_b32_e32 v9, s10\n\tglobal_store_dword v1, v9, s[4:5]"
    program = machine.Program(assembly.parse(code.format(target="gfx942", code=body)))
    assert list(run("", program=program)) == [64] * 64


NOT_THERE = 0xFFFFFFFF
# The words of the result, through a buffer, to shared memory.
BRING = """s_mov_b32 s6, 0x200
s_mov_b32 s7, 0x27000
s_and_b32 s5, s5, 0xffff
v_readfirstlane_b32 s8, v1
s_mov_b32 m0, s8
buffer_load_dword v1, s[4:7], 0 offen lds
"""
BRING_GLOBAL = BRING.replace("buffer_load_dword v1, s[4:7], 0 offen lds", "global_load_lds_dword v[2:3], off")


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("global_load_dword v9, v[2:3], off", NOT_THERE),
        ("global_load_dword v9, v[2:3], off\n s_waitcnt lgkmcnt(0)", NOT_THERE),
        ("global_load_dword v9, v[2:3], off\n s_waitcnt vmcnt(0)", 0xABABABAB),
        ("global_load_dword v9, v[2:3], off\n global_load_dword v8, v[2:3], off\n s_waitcnt vmcnt(1)", 0xABABABAB),
        ("global_load_dword v8, v[2:3], off\n global_load_dword v9, v[2:3], off\n s_waitcnt vmcnt(1)", NOT_THERE),
        ("global_load_dword v9, v[2:3], off\n global_store_dword v[2:3], v0, off\n s_waitcnt vmcnt(1)", 0xABABABAB),
        ("global_load_dword v9, v[2:3], off\n" + 61 * "global_load_dword v8, v[2:3], off\n", NOT_THERE),
        ("global_load_dword v9, v[2:3], off\n" + 62 * "global_load_dword v8, v[2:3], off\n", 0xABABABAB),
        ("ds_write_b32 v1, v1\n ds_read_b32 v9, v1\n s_waitcnt lgkmcnt(1)", NOT_THERE),
        ("ds_write_b32 v1, v1\n ds_read_b32 v9, v1\n s_waitcnt lgkmcnt(0)", None),
        ("s_load_dword s6, s[0:1], 0x0\n v_mov_b32_e32 v9, s6", NOT_THERE),
        ("s_mov_b32 s6, 1\n s_load_dword s6, s[4:5], 0x0\n ds_read_b32 v8, v1\n s_waitcnt lgkmcnt(1)\n"
         "v_mov_b32_e32 v9, s6", NOT_THERE),
        ("v_mov_b32_e32 v8, 0\n ds_bpermute_b32 v9, v8, v0", NOT_THERE),
        (BRING + "s_waitcnt vmcnt(0)\n ds_read_b32 v9, v1\n s_waitcnt lgkmcnt(0)", 0xABABABAB),
        (BRING_GLOBAL + "s_waitcnt vmcnt(0)\n ds_read_b32 v9, v1\n s_waitcnt lgkmcnt(0)", 0xABABABAB),
        ("ds_read_b32 v9, v1 offset:512\n" + BRING_GLOBAL + "s_waitcnt lgkmcnt(1)", NOT_THERE),
    ],
)  # fmt: skip
def test_a_load_arrives_at_its_wait(code: str, expected: int | None) -> None:
    """The load reads 4 * lane. expected is None: the register still holds NaN."""
    assert list(run(code)) == [4 * lane if expected is None else expected for lane in range(64)]


def test_shared_memory_is_in_use_until_a_wait() -> None:
    write, read = "ds_write_b32 v1, v0\n", "v_xor_b32_e32 v8, 0x100, v1\n ds_read_b32 v9, v8\n"
    wait, barrier = "s_waitcnt lgkmcnt(0)\n", "s_barrier\n"
    run(write + wait + barrier + read + wait + barrier + write, threads=128)
    with pytest.raises(MemoryFaultError, match="a race: wave 0 reads what another wave wrote"):
        run(write + barrier + read, threads=128)
    with pytest.raises(MemoryFaultError, match="a race: wave 0 writes what another wave read"):
        run(read + barrier + write, threads=128)
    with pytest.raises(MemoryFaultError, match="wave 0 reads what a load still brings: no wait for it, at byte 0"):
        run(BRING + "ds_read_b32 v9, v1")
    with pytest.raises(MemoryFaultError, match="wave 1 reads what a load still brings"):
        run(
            BRING + barrier + "v_and_b32_e32 v8, 0xff, v1\n s_waitcnt vmcnt(0)\n ds_read_b32 v9, v8",
            threads=128,
            backwards=True,
        )


@pytest.mark.parametrize(
    ("text", "left"),
    [
        ("s_waitcnt vmcnt(1)", (1, 3, 3)),
        ("s_waitcnt lgkmcnt(1)", (3, 1, 3)),
        ("s_waitcnt vmcnt(2) lgkmcnt(0)", (2, 0, 0)),
        ("s_waitcnt expcnt(0)", (3, 3, 3)),
        ("s_waitcnt_vscnt null, 0x0", (3, 3, 3)),
        ("s_wait_loadcnt 0x2", (2, 3, 3)),
        ("s_wait_dscnt 0x0", (3, 0, 3)),
        ("s_wait_kmcnt 0x0", (3, 3, 0)),
        ("s_wait_storecnt 0x0", (3, 3, 3)),
        ("s_wait_loadcnt_dscnt 0x102", (1, 2, 3)),
        ("s_wait_storecnt_dscnt 0x1", (3, 1, 3)),
        ("s_wait_idle", (0, 0, 0)),
    ],
)
def test_a_wait_leaves_the_newest_operations_outstanding(text: str, left: tuple[int, int, int]) -> None:
    program = machine.Program(assembly.parse(KERNEL.format(target="gfx1201", code="\t" + text)))
    wave = machine._wave(program.kernel, Memory([]), Shared(4), 0, (0, 0, 0), 0)
    queues = (wave.queues.vector, wave.queues.shared, wave.queues.scalar)
    for queue in queues:
        queue.extend([Operation()] * 3)
    program.run(wave)
    assert tuple(len(queue) for queue in queues) == left


def taken(code: str, target: str) -> dict[str, float]:
    """Cycles of each unit, minus the cycles of a kernel that only stores its result."""
    records = [Record(kernel(part, target)) for part in (code, "")]
    for record in records:
        run("", threads=record.kernel.wave, program=machine.Program(record.kernel, record), room=16)
    result, other = (record.cycles for record in records)
    return {unit: result[unit] - other[unit] for unit in result if result[unit] != other[unit]}


@pytest.mark.parametrize(
    ("code", "target", "expected"),
    [
        ("v_add_u32_e32 v9, 1, v0", "gfx942", {"vector": 4}),
        ("v_add_u32_e32 v9, 1, v0", "gfx1100", {"vector": 1}),
        ("v_exp_f32_e32 v9, v0", "gfx942", {"vector": 16}),
        ("v_exp_f32_e32 v9, v0", "gfx1100", {"trans": 4, "vector": 1}),
        ("v_mul_lo_u32 v9, v0, v0", "gfx1100", {"vector": 4}),
        ("v_dual_mov_b32 v8, v0 :: v_dual_mov_b32 v9, v1", "gfx1100", {"vector": 1}),
        ("s_mov_b32 s6, 1", "gfx942", {}),
        ("s_mov_b32 s6, 1", "gfx1100", {"scalar": 1}),
        # 2 * 32 * 32 * 8 operations at 512 per cycle (gfx90a: 256; fp32: 64; FP8: twice the rate)
        ("v_mfma_f32_32x32x8_bf16_1k v[16:31], v[4:5], v[4:5], 0", "gfx90a", {"matrix": 64}),
        ("v_mfma_f32_32x32x8_bf16 v[16:31], v[4:5], v[4:5], 0", "gfx942", {"matrix": 32}),
        ("v_mfma_f32_32x32x16_bf16 v[16:31], v[4:7], v[4:7], 0", "gfx950", {"matrix": 32}),
        ("v_mfma_f32_32x32x16_fp8_fp8 v[16:31], v[4:5], v[4:5], 0", "gfx942", {"matrix": 32}),
        ("v_mfma_f32_32x32x2_f32 v[16:31], v4, v5, 0", "gfx942", {"matrix": 64}),
        ("v_wmma_f32_16x16x16_f16 v[16:23], v[4:11], v[5:12], 0", "gfx1100", {"matrix": 32}),
        ("v_wmma_f32_16x16x16_f16 v[16:23], v[4:7], v[8:11], 0", "gfx1201", {"matrix": 16}),
        ("v_wmma_i32_16x16x16_iu8 v[16:23], v[4:7], v[5:8], 0 neg_lo:[1,1,0]", "gfx1100", {"matrix": 32}),
        ("v_wmma_i32_16x16x16_iu8 v[16:23], v[4:5], v[6:7], 0 neg_lo:[1,1,0]", "gfx1201", {"matrix": 8}),
    ],
)
def test_cycles(code: str, target: str, expected: dict[str, int]) -> None:
    assert taken(code, target) == expected


@pytest.mark.parametrize(
    ("place", "read", "shared", "conflicts"),
    [
        ("v_lshlrev_b32_e32 v4, 2, v0", "ds_read_b32 v9, v4", 2, 0),  # 64 words from 32 banks
        ("v_lshlrev_b32_e32 v4, 2, v0", "ds_read_u16 v9, v4", 2, 0),
        ("v_mov_b32_e32 v4, 4", "ds_read_b32 v9, v4", 1, 0),  # one word for all lanes
        ("v_lshlrev_b32_e32 v4, 3, v0", "ds_read_b64 v[8:9], v4", 4, 0),
        ("v_lshlrev_b32_e32 v4, 7, v0\n v_and_b32_e32 v4, 0x380, v4", "ds_read_b32 v9, v4", 8, 7),  # 8 rows of one bank
        ("v_lshlrev_b32_e32 v4, 3, v0\n v_and_b32_e32 v4, 0x7f, v4", "ds_read2_b64 v[6:9], v4 offset1:32", 2, 0),
        ("", "ds_bpermute_b32 v9, v1, v0", 2, 0),
    ],
)
def test_cycles_of_shared_memory(place: str, read: str, shared: int, conflicts: int) -> None:
    result = taken(f"{place}\n {read}\n s_waitcnt lgkmcnt(0)", "gfx942")
    assert (result["shared"], result.get("conflicts", 0)) == (shared, conflicts)


def test_cycles_of_global_memory() -> None:
    """Four addresses of lanes per cycle, or cache lines of 64 bytes."""
    load = "global_load_{} v[6:9], v{}, s[4:5]\n s_waitcnt vmcnt(0)"
    assert taken(load.format("dwordx4", 1), "gfx942") == {"memory": 16}  # 5 lines
    assert taken("v_lshlrev_b32_e32 v4, 6, v0\n" + load.format("dwordx4", 4), "gfx942")["memory"] == 64
    load = load.replace("6:9", "8:9")
    assert taken("v_mul_u32_u24_e32 v4, 60, v0\n" + load.format("dwordx2", 4), "gfx942")["memory"] == 60


@pytest.mark.parametrize("target", ["gfx1300", "gfx900", "gfx1250", "gfx13-generic"])
def test_an_unknown_gpu_is_refused_by_name(target: str) -> None:
    expected = f"does not know the instructions of {target}, only those of gfx908"
    code = kernel("v_mov_b32_e32 v9, v0", target)
    with pytest.raises(ValueError, match=expected):
        machine.Program(code)
    for question in (cost.rates, latencies):
        with pytest.raises(ValueError, match=expected):
            question(target)
    with pytest.raises(ValueError, match=expected):
        topology.write(Path("/nowhere"), target, 1)


@pytest.mark.parametrize(("target", "is_32"), [("gfx1100", 0), ("gfx942", 1)])
def test_waves_of_another_size_are_refused(target: str, is_32: int) -> None:
    text = KERNEL.format(target=target, code="").replace(
        "\t.end_amdhsa", f"\t\t.amdhsa_wavefront_size32 {is_32}\n\t.end_amdhsa"
    )
    with pytest.raises(ValueError, match=f"on {target} the simulator runs waves of"):
        machine.Program(assembly.parse(text))


@pytest.mark.parametrize(
    ("instruction", "target"),
    [
        ("v_mfma_f32_32x32x8_bf16 v[16:31], v[4:5], v[4:5], 0", "gfx1100"),
        ("v_wmma_f32_16x16x16_f16 v[16:23], v[4:11], v[4:11], 0", "gfx942"),
        ("v_wmma_f32_16x16x16_f16 v[16:23], v[4:11], v[4:11], 0", "gfx1030"),
        ("v_wmma_i32_16x16x16_iu8 v[16:23], v[4:7], v[4:7], 0", "gfx1030"),
    ],
)
def test_matrix_instructions_of_another_generation_are_refused(instruction: str, target: str) -> None:
    program = machine.Program(kernel(instruction, target))
    with pytest.raises(NotImplementedError, match=f"{target} has no such instruction"):
        run("", target, threads=64 if target == "gfx942" else 32, program=program)


@pytest.mark.parametrize(("target", "words"), [("gfx1100", 4), ("gfx1201", 2)])
@pytest.mark.parametrize(
    ("signs", "expected"), [("[1,1,0]", 40 + 64), ("[0,0,0]", 518184 + 64), ("[1,0,0]", (-3032 + 64) % 2**32)]
)
def test_products_of_8_bit_integers(target: str, words: int, signs: str, expected: int) -> None:
    """16 values of k: four times the bytes fe 02 ff 01, which are signed, or not, in each operand."""
    set_up = "".join(f"v_mov_b32_e32 v{index}, 0x01ff02fe\n " for index in range(4, 4 + words))
    code = f"v_wmma_i32_16x16x16_iu8 v[16:23], v[4:{3 + words}], v[4:{3 + words}], 64 neg_lo:{signs}"
    result = run(f"{set_up}{code}\n v_mov_b32_e32 v9, v21", target, threads=32)
    assert set(result.view(np.uint32).ravel()[:32].tolist()) == {expected}


def test_arguments_are_packed_by_the_descriptor() -> None:
    rows = [(0, 8, "global_buffer"), (8, 4, "by_value"), (12, 4, "by_value"), (16, 8, "global_buffer")]
    parsed = assembly.parse(KERNEL.format(target="gfx942", code="\ts_nop 0"))
    kernel = replace(parsed, arguments=[*rows, (24, 4, "hidden_grid_dims")], descriptor={"kernarg_size": 28})
    array = np.zeros(3, np.float32)
    content, ranges = arguments.pack(kernel, [array, 2, 0.5])
    assert struct.unpack("<Qif", content[:16]) == (array.ctypes.data, 2, 0.5)
    assert (len(content), ranges) == (28, [(array.ctypes.data, 12)])
    with pytest.raises(ValueError, match="has 4 arguments, and 2 values were passed"):
        arguments.pack(kernel, [array, 2])
    with pytest.raises(ValueError, match="has 4 arguments, and 5 values were passed"):
        arguments.pack(kernel, [array, 2, 0.5, array, 1])
    with pytest.raises(ValueError, match="argument 0 is a global_buffer, the value is a int"):
        arguments.pack(kernel, [1, 2, 0.5])
    with pytest.raises(ValueError, match="argument 1 is a by_value, the value is a ndarray"):
        arguments.pack(kernel, [array, array, 0.5])


def test_a_modifier_may_have_a_blank() -> None:
    (result,) = assembly.parse_line("ds_load_b64 v[2:3], v1 offset: 8")
    assert (list(result.operands), result.modifiers["offset"]) == (["v[2:3]", "v1"], "8")
