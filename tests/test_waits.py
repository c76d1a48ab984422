"""Waits and barriers, by the check of instructions: each one is taken out of compiled kernels and must be missed."""

from __future__ import annotations

import re
from collections.abc import Callable
from dataclasses import replace

import pytest
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import gpu
from rocm_wheels.compile.check import counters, exchanges, instructions, stage, unfolding
from rocm_wheels.compile.check.lanes import Lanes
from rocm_wheels.errors import CompileFailed

KERNEL = """\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"
kernel:
{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_next_free_vgpr 10
\t\t.amdhsa_next_free_sgpr 60
\t.end_amdhsa_kernel
    .max_flat_workgroup_size: {threads}
    .name:           kernel
    .symbol:         kernel.kd
"""
USE = "v_add_f32_e32 v9, v1, v1"


def kernel(target: str, code: str, threads: int = 256) -> instructions.Kernel:
    lines = (line.strip() for line in code.split("\n"))
    code = "\n".join(line if line.endswith(":") else f"\t{line}" for line in lines)
    (result,) = instructions.kernels(KERNEL.format(target=target, code=code, threads=threads))
    return result


def missing(target: str, code: str) -> list[tuple[str, str]]:
    """(instruction, the wait that it lacks)."""
    result = counters.findings(kernel(target, code), target)
    return [(one.problem.partition(": without ")[0], one.cure) for one in result]


# A load, and the wait for it and for one younger access of each kind.
WAITS = [
    ("gfx942", "global_load_dword v1, v[2:3], off", "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)"),
    ("gfx942", "global_load_dword v1, v[2:3], off", "s_waitcnt 0xf71", "s_waitcnt vmcnt(0)"),
    ("gfx90a", "ds_read_b32 v1, v2", "s_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(0)"),
    ("gfx1030", "buffer_load_dword v1, v2, s[8:11], 0 offen", "s_waitcnt vmcnt(1)", "s_waitcnt vmcnt(0)"),
    ("gfx1100", "ds_load_b32 v1, v2", "s_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(0)"),
    ("gfx1100", "global_load_b32 v1, v[2:3], off", "s_waitcnt 0x7f7", "s_waitcnt vmcnt(0)"),
    ("gfx1201", "global_load_b32 v1, v[2:3], off", "s_wait_loadcnt 0x1", "s_wait_loadcnt 0x0"),
    ("gfx1201", "ds_load_b32 v1, v2", "s_wait_dscnt 0x1", "s_wait_dscnt 0x0"),
    ("gfx1201", "ds_load_b32 v1, v2", "s_wait_loadcnt_dscnt 0x3f01", "s_wait_dscnt 0x0"),
    ("gfx1250", "global_load_b32 v1, v2, s[2:3]", "s_wait_loadcnt 0x1", "s_wait_loadcnt 0x0"),
    ("gfx1201", "image_sample_lz v1, [v2, v3], s[8:15], s[16:19]", "s_wait_samplecnt 0x1", "s_wait_samplecnt 0x0"),
]


@pytest.mark.parametrize(("target", "load", "wait", "cure"), WAITS)
def test_a_use_follows_its_wait(target: str, load: str, wait: str, cure: str) -> None:
    younger = load.replace("v1,", "v20,", 1)
    assert missing(target, f"{load}\n{USE}") == [(USE, cure)]
    assert missing(target, f"{load}\nv_mov_b32_e32 v1, v7") == [("v_mov_b32_e32 v1, v7", cure)]
    assert missing(target, f"{load}\n{younger}\n{wait}\n{USE}") == []
    assert missing(target, f"{load}\n{wait}\n{USE}") == [(USE, cure)]
    assert missing(target, f"{load}\n{cure}\n{USE}") == []


@pytest.mark.parametrize(
    ("target", "code", "cure"),
    [
        # Scalar loads end in any order, so only a wait for all of them ends one of them.
        ("gfx942", "s_load_dword s4, s[0:1], 0x0\ns_memtime s[6:7]\ns_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(0)"),
        ("gfx1201", "s_load_b32 s4, s[0:1], 0x0\ns_load_b32 s5, s[0:1], 0x4\ns_wait_kmcnt 0x1", "s_wait_kmcnt 0x0"),
        # A younger scalar load does not end the older access of LDS that counts in the same counter.
        ("gfx942", "ds_read_b32 v4, v2\ns_load_dword s5, s[0:1], 0x0\ns_waitcnt lgkmcnt(1)", "s_waitcnt lgkmcnt(0)"),
        ("gfx1100", "global_load_b32 v4, v2, s[2:3]\nglobal_store_b32 v2, v8, s[2:3]\ns_waitcnt vmcnt(1)",
         "s_waitcnt vmcnt(0)"),
        ("gfx942", "flat_load_dword v4, v[2:3]\ns_waitcnt vmcnt(0)", "s_waitcnt lgkmcnt(0)"),
    ],
)  # fmt: skip
def test_what_a_wait_does_not_end(target: str, code: str, cure: str) -> None:
    use = "v_mov_b32_e32 v9, s4" if "s4" in code else "v_mov_b32_e32 v9, v4"
    assert missing(target, f"{code}\n{use}") == [(use, cure)]
    assert missing(target, f"{code}\n{cure}\n{use}") == []


def test_an_lds_access_that_a_younger_one_proves_to_be_over() -> None:
    code = "ds_read_b32 v1, v2\ns_load_dword s5, s[0:1], 0x0\nds_read_b32 v3, v4\ns_waitcnt lgkmcnt(1)"
    assert missing("gfx942", f"{code}\n{USE}") == []


def test_the_younger_of_two_paths_counts_and_loops_end() -> None:
    """The load is the youngest on one path; a loop takes its own last load with it."""
    joined = """ds_read_b32 v1, v2
                s_cbranch_scc1 .L1
                ds_read_b32 v3, v2
                .L1:
                s_waitcnt lgkmcnt(1)
                """
    assert missing("gfx942", joined + USE) == [(USE, "s_waitcnt lgkmcnt(0)")]
    loop = """.L0:
              v_add_f32_e32 v9, v1, v1
              global_load_dword v1, v[2:3], off
              s_cbranch_scc1 .L0"""
    assert missing("gfx942", loop) == [(USE, "s_waitcnt vmcnt(0)")]


def test_loads_of_one_kind_may_write_one_register() -> None:
    """Both halves of a register come by two loads; before GFX12, loads from global memory end in order."""
    halves = "ds_read_u16 v1, v2\ns_waitcnt lgkmcnt(0)\nds_read_u16_d16_hi v1, v2 offset:8\ns_waitcnt lgkmcnt(0)\n"
    assert missing("gfx942", halves + USE) == []
    twice = "{0} v1, v[2:3], off\n{0} v1, v[4:5], off"
    assert missing("gfx942", twice.format("global_load_dword")) == []
    assert missing("gfx1201", twice.format("global_load_b32"))[0][1] == "s_wait_loadcnt 0x0"
    assert missing("gfx942", "ds_read_b32 v1, v2\nglobal_load_dword v1, v[4:5], off")[0][1] == "s_waitcnt lgkmcnt(0)"


@pytest.mark.parametrize(
    ("target", "code", "cure"),
    [
        ("gfx942", "ds_write_b32 v1, v2\ns_barrier", "s_waitcnt lgkmcnt(0)"),
        ("gfx1100", "ds_load_b32 v1, v2\ns_barrier", "s_waitcnt lgkmcnt(0)"),
        ("gfx1201", "ds_store_b32 v1, v2\ns_barrier_signal -1", "s_wait_dscnt 0x0"),
        ("gfx950", "s_mov_b32 m0, 0\nbuffer_load_dword v2, s[8:11], 0 offen lds\ns_barrier", "s_waitcnt vmcnt(0)"),
        # After this barrier a wave drops its cache of global memory, so the barrier orders global memory too.
        ("gfx1100", "global_store_b32 v[2:3], v8, off\ns_barrier\nbuffer_gl0_inv", "s_waitcnt_vscnt null, 0x0"),
        ("gfx1201", "global_store_b32 v[2:3], v8, off\ns_barrier_signal -1\ns_barrier_wait -1\nglobal_inv",
         "s_wait_storecnt 0x0"),
    ],
)  # fmt: skip
def test_no_access_is_under_way_at_a_barrier(target: str, code: str, cure: str) -> None:
    assert [wait for _, wait in missing(target, code)] == [cure]
    barrier = next(line for line in code.split("\n") if line.startswith("s_barrier"))
    assert missing(target, code.replace(barrier, f"{cure}\n{barrier}", 1)) == []


def test_a_missing_wait_is_added() -> None:
    assembly = KERNEL.format(target="gfx1201", code=f"\tds_load_b32 v1, v2\n\t{USE}", threads=32)
    text, report = stage.checked(assembly, "gfx1201", "a kernel")
    assert f"\ts_wait_dscnt 0x0\n\t{USE}\n" in text
    assert report.found[counters.WAIT_RULE] == 1


@pytest.mark.parametrize("code", ["exp mrt0 v1, v2, v3, v4 done", "ds_gws_init v1", "s_wait_tensorcnt 0x0"])
def test_an_access_of_unknown_kind_is_refused(code: str) -> None:
    with pytest.raises(ValueError, match=r"add it to counters\.py"):
        missing("gfx1250", code)


EXCHANGE = """v_and_b32_e32 v1, 0xff, v0
              v_lshlrev_b32_e32 v2, 2, v1
              v_xor_b32_e32 v3, 0x100, v2
              ds_write_b32 v2, v4
              s_waitcnt lgkmcnt(0)
              {between}
              ds_read_b32 v5, {address}{offset}"""


@pytest.mark.parametrize(
    ("between", "address", "offset", "threads", "problems"),
    [
        ("s_barrier", "v3", "", 256, 0),
        ("s_nop 0", "v3", "", 256, 1),
        ("s_nop 0", "v2", "", 256, 0),  # each lane reads what it wrote
        ("s_nop 0", "v3", " offset:1024", 256, 0),  # other bytes
        ("s_nop 0", "v3", " offset:768", 256, 1),
        ("s_nop 0", "v3", "", 64, 0),  # one wave
    ],
)
def test_waves_meet_between_a_write_and_a_read(
    between: str, address: str, offset: str, threads: int, problems: int
) -> None:
    result = exchanges.judged(
        kernel("gfx942", EXCHANGE.format(between=between, address=address, offset=offset), threads), "gfx942"
    )
    assert [finding.rule for finding in result.findings] == [exchanges.RULE] * problems
    assert result.unknown == []


def test_a_barrier_of_gfx12_has_two_halves() -> None:
    late, early = "no s_barrier_wait after the last signal", "no s_barrier_signal before it"
    for code, problems in (
        ("s_barrier_signal -1\ns_barrier_signal -1", [f"s_barrier_signal -1: {late}", f"s_endpgm: {late}"]),
        ("s_barrier_wait -1", [f"s_barrier_wait -1: {early}"]),
        ("s_barrier_signal -1", [f"s_endpgm: {late}"]),
        ("s_barrier_signal -1\ns_barrier_wait -1", []),
    ):
        assert [
            finding.problem for finding in exchanges.judged(kernel("gfx1201", code), "gfx1201").findings
        ] == problems


def test_a_missing_barrier_is_refused() -> None:
    code = "\n".join(f"\t{line.strip()}" for line in EXCHANGE.split("\n"))
    code = code.format(between="s_nop 0", address="v3", offset="")
    with pytest.raises(CompileFailed, match=r"ds_read_b32 v5, v3: no barrier after ds_write_b32 v2, v4"):
        stage.checked(KERNEL.format(target="gfx942", code=code, threads=256), "gfx942", "a kernel")


@pytest.mark.parametrize(
    ("code", "value"),
    [
        ("v_and_b32_e32 v1, 15, v0\nv_lshl_or_b32 v1, v1, 4, 3", lambda n: (n & 15) << 4 | 3),
        ("v_mov_b32_e32 v2, 0x70\nv_bitop3_b32 v1, v0, v2, 0x7f0 bitop3:0x6c", lambda n: 0x70 ^ (n & 0x7F0)),
        ("v_bfe_u32 v1, v0, 4, 3\nv_mul_u32_u24_e32 v1, 24, v1", lambda n: (n >> 4 & 7) * 24),
        ("s_movk_i32 s4, 0xffc0\nv_and_b32_e32 v1, s4, v0", lambda n: n & ~63),
        ("v_bfe_i32 v1, v0, 3, 1\nv_and_b32_e32 v1, 0x108, v1", lambda n: 0x108 * (n >> 3 & 1)),
        ("v_accvgpr_write_b32 a1, v0\nv_accvgpr_read_b32 v1, a1", lambda n: n),
        ("v_readfirstlane_b32 s4, v0\nv_add_u32_e32 v1, s4, v0", lambda n: n + n // 64 * 64),
        ("v_xad_u32 v1, v0, 5, -1", lambda n: (n ^ 5) - 1 & 0xFFFFFFFF),
        ("s_bfe_u32 s4, ttmp8, 0x50019\nv_mov_b32_e32 v1, s4", lambda n: n // 64),
        ("s_cmp_lt_i32 -1, 0\ns_cselect_b32 s4, 8, 9\nv_mov_b32_e32 v1, s4", lambda _: 8),
        ("v_cmp_gt_u32_e64 s[4:5], 7, v0\nv_cndmask_b32_e64 v1, 3, 4, s[4:5]", lambda n: 4 if n < 7 else 3),
        # Spilled to scratch, to a lane, and the mask of a lane: each is overwritten between.
        (
            "scratch_store_dwordx2 off, v[0:1], off offset:8\ns_nop 0\nscratch_load_dword v1, off, off offset:8",
            lambda n: n,
        ),
        (
            "buffer_store_dword v0, off, s[8:11], 0 offset:4\nbuffer_load_dword v1, off, s[8:11], 0 offset:4",
            lambda n: n,
        ),
        (
            "s_movk_i32 s4, 5\nv_writelane_b32 v9, s4, 3\ns_mov_b32 s4, 6\nv_readlane_b32 s5, v9, 3\nv_mov_b32 v1, s5",
            lambda _: 5,
        ),
        (
            "v_cmp_gt_u32_e64 s[4:5], 7, v0\nv_writelane_b32 v9, s4, 3\ns_mov_b64 s[4:5], 0\nv_readlane_b32 s6, v9, 3\n"
            "v_cndmask_b32_e64 v1, 3, 4, s[6:7]",
            lambda n: 4 if n < 7 else 3,
        ),
    ],
)
def test_the_value_of_each_thread(code: str, value: Callable[[int], int]) -> None:
    assert held(code) == [[value(number) for number in range(256)]]


@pytest.mark.parametrize(
    "code",
    [
        "global_load_dword v1, v[2:3], off",
        "v_add_u32_e32 v1, s3, v0",
        "s_nop 0",
        "scratch_store_dword off, v0, off\nscratch_store_dword v5, v3, off\nscratch_load_dword v1, off, off",
        "s_mov_b32 s4, 5\nv_writelane_b32 v9, s4, 3\nv_mov_b32 v9, 0\nv_readlane_b32 s5, v9, 3\nv_mov_b32 v1, s5",
        "s_cmp_lt_i32 s3, 0\ns_cselect_b32 s4, 8, 9\nv_mov_b32_e32 v1, s4",
    ],
)
def test_an_unknown_value(code: str) -> None:
    assert held(code) == [None]


def test_a_loop_has_a_round_for_each_of_its_buffers() -> None:
    code = "s_mov_b32 s4, 0\n.L:\nv_mov_b32 v1, s4\nds_read_b32 v3, v1\ns_add_i32 s4, s4, 1\n"
    assert held(f"{code}s_cmp_lt_i32 s4, 3\ns_cselect_b32 s4, s4, 0\ns_cbranch_vccnz .L", whole=True) == [
        [buffer] * 256 for buffer in range(3)
    ]
    assert held(f"{code}s_cbranch_vccnz .L", whole=True)[-1] is None  # without end


def held(code: str, whole: bool = False) -> list[list[int] | None]:
    """The values of v1 at an access of LDS, for each way to get there. whole: whether the access stands in the code."""
    result = kernel("gfx950", code if whole else f"{code}\nds_read_b32 v3, v1")
    place = next(place for place, one in enumerate(result.instructions) if one.text == "ds_read_b32 v3, v1")
    lanes = Lanes(result, 64)
    steps = unfolding.steps(result, lanes, {place: instructions.registers("v1")}, set())
    reached = (step.address for step in steps if step.place == place)
    return [None if address is None else lanes.value(address).tolist() for address in reached]


BUFFERS = """v_lshlrev_b32 v1, 2, v0
             v_xor_b32 v2, 0x100, v1
             s_mov_b32 s4, 0
             .L:
             s_lshl_b32 s5, s4, 10
             v_add_u32 v3, s5, v1
             ds_write_b32 v3, v9
             s_waitcnt lgkmcnt(0)
             {barrier}
             v_add_u32 v4, {buffer}, v2
             ds_read_b32 v5, v4
             s_waitcnt lgkmcnt(0)
             s_xor_b32 s4, s4, 1
             s_cbranch_vccnz .L"""


@pytest.mark.parametrize(
    ("barrier", "buffer", "problems", "unknown"),
    [
        ("s_barrier", "s5", 0, 0),
        ("s_nop 0", "s5", 2, 0),
        ("s_barrier", "s9", 0, 2),  # an argument: the check names the barrier, and the write of the next round
        ("s_nop 0", "s9", 0, 2),
    ],
)
def test_waves_exchange_two_buffers(barrier: str, buffer: str, problems: int, unknown: int) -> None:
    result = exchanges.judged(kernel("gfx942", BUFFERS.format(barrier=barrier, buffer=buffer)), "gfx942")
    assert (len(result.findings), len(result.unknown)) == (problems, unknown)


WAIT = re.compile(r"s_wait(cnt|cnt_vscnt|_(load|store|ds|km)cnt(_dscnt)?)\b")
BARRIER = re.compile(r"s_barrier(_signal|_wait)?\b")
# Waits before a barrier that order nothing: no access of LDS is under way on any path, only scalar loads, for which
# another wait follows; a wait in the prologue that is jumped over; waits for loads that a loop has waited for.
SPARE = {"gfx942": 3, "gfx1100": 2, "gfx1201": 4}


@pytest.mark.parametrize(
    ("target", "variant"),
    [
        ("gfx942", Variant("fwd", "bf16", 64, "plain")),
        ("gfx1100", Variant("decode", "bf16", 128, "plain")),
        ("gfx1201", Variant("fwd", "fp16", 64, "plain")),
    ],
)
def test_every_wait_and_barrier_is_missed(target: str, variant: Variant) -> None:
    (whole,) = instructions.kernels(gpu.compiled(target, variant)[2])

    def without(place: int) -> instructions.Kernel:
        before, after = whole.instructions[:place], whole.instructions[place + 1 :]
        return replace(whole, instructions=(*before, instructions.instruction("s_nop 0"), *after))

    assert (counters.findings(whole, target), *exchanges.judged(whole, target)) == ([], [], [])
    waits, barriers = (
        [place for place, one in enumerate(whole.instructions) if kind.match(one.text)] for kind in (WAIT, BARRIER)
    )
    assert len(barriers) > 6
    planted = barriers[:: 1 + len(barriers) // 12]
    assert [place for place in planted if not exchanges.judged(without(place), target).findings] == []
    unnoticed = [place for place in waits[:: 1 + len(waits) // 20] if not counters.findings(without(place), target)]
    assert len(unnoticed) <= SPARE[target], [(whole.lines[at], whole.instructions[at].text) for at in unnoticed]
