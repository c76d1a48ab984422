"""The instruction check after every compiler: each hazard is planted, found on every path, and cured."""

from __future__ import annotations

import re

import pytest

from rocm_wheels.compile import sources
from rocm_wheels.compile.check import forms, instructions, pending, prologue, reserve, scalars, scan, stage
from rocm_wheels.compile.check.rules import RULES, VECTORS, for_target
from rocm_wheels.errors import CompileFailed

KERNEL = """\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"
kernel:                                 ; @kernel
{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel kernel
\t\t.amdhsa_next_free_vgpr {registers}
\t\t.amdhsa_next_free_sgpr 60
\t\t.amdhsa_accum_offset 128
\t.end_amdhsa_kernel
"""


def text(code: str, target: str) -> str:
    lines = (line.strip() for line in code.split("\n"))
    code = "\n".join(line if line.endswith(":") else f"\t{line}" for line in lines)
    form = KERNEL.replace("\t\t.amdhsa_accum_offset 128\n", "") if target.startswith("gfx1") else KERNEL
    (most,) = instructions.kernels(form.format(target=target, code=code, registers=256))
    whole = form.format(target=target, code=code, registers=min(reserve.named(most, target), 256))
    return prologue.begun(whole, target)[0] if target == "gfx1250" else whole


def kernel(code: str, target: str) -> instructions.Kernel:
    (result,) = instructions.kernels(text(code, target))
    return result


def missing(code: str, target: str) -> list[int]:
    return [finding.missing for finding in scan.findings(kernel(code, target), target)]


MFMA = "v_mfma_f32_32x32x8_f16 v[0:15], v[16:17], v[18:19], v[0:15]"
MFMA_950 = "v_mfma_f32_32x32x16_f16 v[0:15], v[16:19], v[20:23], v[0:15]"
MFMA_908 = "v_mfma_f32_32x32x8f16 a[0:15], v[16:17], v[18:19], a[0:15]"
SMALL = "v_mfma_f32_16x16x16_f16 v[0:3], v[16:17], v[18:19], v[0:3]"
WMMA_1250 = "v_wmma_f32_16x16x32_bf16 v[0:7], v[16:23], v[24:31], v[0:7]"
M0 = "s_mov_b32 m0, s1"
CMPX = "v_cmpx_gt_f32_e32 vcc, v1, v2"
SELECT = "v_cndmask_b32_e32 v1, v2, v3, vcc_lo"

# Rule -> target, first instruction, second instruction, wait states that are needed between them.
PLANTED = [
    ("VALU writes SGPR, VMEM", "gfx942", "v_readfirstlane_b32 s4, v1", "buffer_load_dword v2, v3, s[4:7], 0 offen", 5),
    ("VALU writes SGPR, VMEM", "gfx90a", "v_cmp_eq_u32_e64 s[4:5], v1, v2", "global_load_dword v2, v3, s[4:5]", 5),
    ("v_readlane or v_writelane selects", "gfx90a", "v_readlane_b32 s4, v1, 3", "v_readlane_b32 s5, v2, s4", 4),
    ("v_div_fmas", "gfx942", "v_div_scale_f32 v1, vcc, v2, v3, v2", "v_div_fmas_f32 v4, v5, v6, v7", 4),
    (
        "DPP reads it",
        "gfx90a",
        "v_add_f32_e32 v1, v2, v3",
        "v_add_f32_dpp v4, v1, v5 row_shr:1 row_mask:0xf bank_mask:0xf",
        2,
    ),
    (
        "EXEC, DPP",
        "gfx90a",
        "v_cmpx_eq_u32_e32 vcc, v1, v2",
        "v_mov_b32_dpp v4, v3 quad_perm:[1,0,3,2] row_mask:0xf bank_mask:0xf",
        5,
    ),
    ("SALU writes M0", "gfx942", M0, "buffer_load_dword v1, s[4:7], 0 offen lds", 1),
    ("SALU writes M0", "gfx950", M0, "global_load_lds_dwordx4 v[2:3], off", 1),
    ("s_setreg", "gfx90a", "s_setreg_imm32_b32 hwreg(HW_REG_MODE), 3", "s_getreg_b32 s1, hwreg(HW_REG_MODE)", 2),
    ("store of more than 64 bits, VALU", "gfx90a", "global_store_dwordx4 v1, v[2:5], s[2:3]", "v_mov_b32_e32 v5, 0", 1),
    (
        "store of more than 64 bits, VALU",
        "gfx942",
        "global_store_dwordx4 v[0:1], v[2:5], off",
        "v_mov_b32_e32 v5, 0",
        2,
    ),
    (
        "store of more than 64 bits, VALU",
        "gfx942",
        "buffer_store_dwordx3 v[2:4], v1, s[4:7], 0 offen",
        "v_mov_b32_e32 v3, 0",
        2,
    ),
    (
        "store of more than 64 bits with scalar",
        "gfx950",
        "buffer_store_dwordx4 v[2:5], v1, s[4:7], s9 offen",
        "v_pk_mul_f32 v[2:3], v[6:7], v[6:7]",
        1,
    ),
    ("another VALU reads it", "gfx942", "v_exp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v4", 1),
    (
        "part of a VGPR",
        "gfx942",
        "v_add_f16_sdwa v1, v2, v3 dst_sel:WORD_1 dst_unused:UNUSED_PAD src0_sel:WORD_0 src1_sel:WORD_0",
        "v_add_f32_e32 v3, v1, v4",
        1,
    ),
    ("VALU writes SGPR or VCC, VALU", "gfx942", "v_cmp_eq_u32_e32 vcc, v1, v2", "v_cndmask_b32_e32 v3, v4, v5, vcc", 2),
    ("v_readlane reads it", "gfx942", "v_add_u32_e32 v1, v2, v3", "v_readfirstlane_b32 s4, v1", 1),
    ("EXEC, v_readlane", "gfx942", "v_cmpx_eq_u32_e32 vcc, v1, v2", "v_readlane_b32 s5, v3, 4", 4),
    ("EXEC, v_readlane", "gfx90a", "v_cmpx_eq_u32_e32 vcc, v1, v2", MFMA.replace("_f16", "f16"), 4),
    ("lanes of permlane swap", "gfx950", "v_mov_b32_e32 v1, v2", "v_permlane32_swap_b32 v1, v3", 2),
    ("v_cmpx, permlane swap", "gfx950", CMPX, "v_permlane32_swap_b32_e32 v3, v4", 4),
    ("v_cmpx, permlane swap", "gfx950", CMPX, "v_permlane16_swap_b32_e32 v3, v4", 4),
    ("VALU writes a part", "gfx942", "v_cvt_sr_fp8_f32 v1, v2, v3 op_sel:[0,0,1,0]", "v_add_f32_e32 v4, v1, v1", 1),
    ("VALU writes a part", "gfx942", "v_cvt_sr_bf8_f32 v1, v2, v3 op_sel:[0,0,0,1]", "v_mov_b32_e32 v1, v5", 1),
    (
        "VALU writes a part",
        "gfx950",
        "v_cvt_pk_fp8_f32 v1, v2, v3 op_sel:[0,0,1]",
        "v_pk_mul_f32 v[4:5], v[0:1], v[6:7]",
        1,
    ),
    ("conversion to FP8 or FP4", "gfx950", "v_cvt_scalef32_pk_fp4_f32 v1, v2, v3, v4", "v_add_f32_e32 v5, v1, v1", 1),
    ("conversion to FP8 or FP4", "gfx950", "v_cvt_scalef32_pk_fp8_f16 v1, v2, v3", "v_pk_add_u16 v1, v1, v6", 1),
    (
        "conversion to FP8 or FP4",
        "gfx950",
        "v_cvt_scalef32_sr_pk_fp4_f32 v1, v[2:3], v4, v5",
        "v_mov_b32_e32 v1, v6",
        1,
    ),
    ("conversion to FP8 or FP4", "gfx950", "v_cvt_scalef32_sr_bf8_f32 v1, v2, v3, v4", "v_add_f32_e32 v5, v1, v1", 1),
    # `v_cvt_pk_fp8_f32` keeps a half of its destination, so it reads the destination.
    ("another VALU reads it", "gfx942", "v_exp_f32_e32 v1, v2", "v_cvt_pk_fp8_f32 v1, v3, v4", 1),
    (
        "loads of a clause",
        "gfx90a",
        "global_load_dwordx2 v[0:1], v[0:1], off",
        "global_load_dwordx2 v[2:3], v[2:3], off",
        1,
    ),
    (
        "loads of a clause",
        "gfx942",
        "buffer_load_dword v1, v2, s[4:7], 0 offen",
        "buffer_load_dword v2, v3, s[4:7], 0 offen",
        1,
    ),
    ("loads of a clause", "gfx950", "global_load_dword v9, v[0:1], off", "flat_load_dword v3, v[8:9]", 1),
    ("loads of a clause", "gfx90a", "global_load_dword v9, v[0:1], off", "global_store_dword v[2:3], v4, off", 1),
    ("loads of a clause", "gfx908", "global_load_dword v9, v[0:1], off", "global_load_short_d16_hi v5, v[2:3], off", 1),
    (
        "scalar loads of a clause",
        "gfx942",
        "s_load_dwordx2 s[4:5], s[0:1], 0x0",
        "s_load_dwordx2 s[0:1], s[2:3], 0x0",
        1,
    ),
    ("scalar loads of a clause", "gfx1010", "s_load_dword s4, s[0:1], 0x0", "s_load_dwordx2 s[0:1], s[2:3], 0x8", 1),
    ("VALU writes VGPR, MFMA", "gfx90a", "v_mov_b32_e32 v16, v60", MFMA, 2),
    ("dot product", "gfx942", "v_dot2_f32_f16 v1, v2, v3, v4", "v_add_f32_e32 v5, v1, v6", 3),
    ("reads as A or B", "gfx90a", MFMA, "v_mfma_f32_32x32x8_f16 v[32:47], v[0:1], v[18:19], v[32:47]", 19),
    ("reads as A or B", "gfx942", MFMA, "v_mfma_f32_32x32x8_f16 v[32:47], v[0:1], v[18:19], v[32:47]", 11),
    ("reads as A or B", "gfx950", MFMA_950, "v_mfma_f32_32x32x16_f16 v[32:47], v[0:3], v[20:23], v[32:47]", 12),
    (
        "reads as A or B",
        "gfx950",
        "v_mfma_f32_32x32x2_f32 v[0:15], v16, v18, v[0:15]",
        "v_mfma_f32_32x32x16_f16 v[32:47], v[0:3], v[20:23], v[32:47]",
        18,
    ),
    (
        "reads as A or B",
        "gfx950",
        "v_mfma_f32_32x32x4_2b_f16 v[0:31], v[40:41], v[42:43], 0",
        "v_mfma_f32_32x32x16_f16 v[32:47], v[0:3], v[20:23], v[32:47]",
        20,
    ),
    ("accumulates on it", "gfx942", MFMA, "v_mfma_f32_32x32x8_f16 v[2:17], v[20:21], v[22:23], v[2:17]", 9),
    ("accumulates on it", "gfx90a", MFMA, "v_mfma_f32_32x32x8_f16 v[2:17], v[20:21], v[22:23], v[2:17]", 16),
    (
        "accumulates on it",
        "gfx950",
        "v_mfma_f32_16x16x32_f16 v[0:3], v[16:19], v[20:23], v[0:3]",
        SMALL,
        6,
    ),  # other shape, same registers
    ("VALU, memory or LDS reads", "gfx942", MFMA, "v_add_f32_e32 v20, v15, v21", 11),
    ("VALU, memory or LDS reads", "gfx942", SMALL, "ds_write_b32 v9, v3", 7),
    ("VALU, memory or LDS reads", "gfx90a", SMALL, "global_store_dword v9, v3, s[2:3]", 11),
    ("VALU, memory or LDS reads", "gfx950", MFMA_950, "v_add_f32_e32 v20, v15, v21", 12),
    (
        "MFMA writes, VALU, memory or LDS overwrites",
        "gfx942",
        MFMA.replace("v[0:15]", "v[32:47]", 1),
        "v_mov_b32_e32 v40, 0",
        11,
    ),
    ("MFMA writes, VALU, memory or LDS overwrites", "gfx942", SMALL, "global_load_dword v3, v[40:41], off", 7),
    ("MFMA writes, VALU, memory or LDS overwrites", "gfx90a", SMALL, "ds_read_b64 v[2:3], v40", 11),
    (
        "MFMA writes, VALU, memory or LDS overwrites",
        "gfx950",
        MFMA_950,
        "buffer_load_dwordx4 v[12:15], v40, s[4:7], 0 offen",
        12,
    ),
    # A load of 16 bits keeps the other half, so it reads its destination too.
    ("LDS reads", "gfx942", SMALL, "ds_read_u16_d16_hi v3, v40", 7),
    ("LDS reads", "gfx90a", SMALL, "buffer_load_short_d16 v3, v40, s[4:7], 0 offen", 11),
    ("LDS overwrites it", "gfx942", MFMA.replace("v[0:15]", "v[32:47]", 1), "ds_read_b32 v3, v60", 7),
    ("LDS overwrites it", "gfx90a", MFMA.replace("v[0:15]", "v[32:47]", 1), "global_load_dword v3, v50, s[2:3]", 15),
    ("MFMA accumulates on VGPR", "gfx942", MFMA.replace("v[0:15]", "v[32:47]", 1), "v_mov_b32_e32 v3, 0", 7),
    ("v_accvgpr_read reads", "gfx908", MFMA_908, "v_accvgpr_read_b32 v2, a15", 18),
    ("accumulates on a part", "gfx908", MFMA_908, MFMA_908.replace("a[0:15]", "a[4:19]"), 16),
    (
        "v_accvgpr_write overwrites",
        "gfx908",
        MFMA_908.replace("a[0:15]", "a[32:47]", 1),
        "v_accvgpr_write_b32 a33, v1",
        15,
    ),
    ("AGPR, v_accvgpr_write", "gfx908", MFMA_908.replace("a[0:15]", "a[32:47]", 1), "v_accvgpr_write_b32 a3, v1", 13),
    ("v_accvgpr_write, MFMA", "gfx908", "v_accvgpr_write_b32 a3, v1", MFMA_908, 1),
    ("v_accvgpr_read, memory", "gfx908", "v_accvgpr_read_b32 v1, a0", "global_store_dword v9, v1, s[2:3]", 2),
    ("v_cmpx, v_permlane", "gfx1030", "v_cmpx_lt_u32_e32 v0, v1", "v_permlanex16_b32 v2, v3, s0, s1", 1),
    ("v_cmpx, v_permlane", "gfx1151", "v_cmpx_lt_u32_e32 v0, v1", "v_permlane16_b32 v2, v3, s0, s1", 1),
    ("transcendental writes VGPR, VALU", "gfx1100", "v_exp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v4", 6),
    (
        "WMMA",
        "gfx1150",
        "v_wmma_f32_16x16x16_f16 v[0:7], v[16:23], v[24:31], v[0:7]",
        "v_wmma_f32_16x16x16_f16 v[32:39], v[0:7], v[24:31], v[32:39]",
        1,
    ),
    (
        "WMMA",
        "gfx1201",
        "v_wmma_f32_16x16x16_f16 v[0:7], v[16:19], v[24:27], v[0:7]",
        "v_wmma_f32_16x16x16_f16 v[32:39], v[40:43], v[0:3], v[32:39]",
        1,
    ),
    ("WMMA writes, WMMA reads as A, B or indices", "gfx1250", WMMA_1250, WMMA_1250.replace("v[16:23]", "v[0:7]"), 5),
    (
        "WMMA writes, WMMA reads as A, B or indices",
        "gfx1250",
        "v_wmma_i32_16x16x64_iu8 v[0:7], v[16:23], v[24:31], v[0:7]",
        "v_swmmac_f32_16x16x64_f16 v[32:39], v[40:47], v[48:63], v7",
        9,
    ),
    ("WMMA writes, VALU reads or overwrites", "gfx1250", WMMA_1250, "v_add_f32_e32 v40, v7, v41", 4),
    ("WMMA writes, VALU reads or overwrites", "gfx1250", WMMA_1250, "v_mov_b32_e32 v7, v41", 4),
    (
        "WMMA writes, VALU reads or overwrites",
        "gfx1250",
        "v_wmma_f32_16x16x64_fp8_fp8 v[0:7], v[16:23], v[24:31], v[0:7]",
        "v_add_f32_e32 v40, v7, v41",
        1,
    ),
    (
        "WMMA reads, VALU overwrites",
        "gfx1250",
        WMMA_1250,
        "v_dual_mov_b32 v16, v86 :: v_dual_max_num_f32 v127, v119, v118",
        4,
    ),
    (
        "WMMA reads, VALU overwrites",
        "gfx1250",
        "v_swmmac_f32_16x16x64_f16 v[0:7], v[16:23], v[24:39], v40",
        "v_mov_b32_e32 v40, v41",
        2,
    ),
    ("WMMA reads, VALU overwrites", "gfx1250", WMMA_1250.replace("v[0:7]", "v[32:39]", 1), "v_mov_b32_e32 v3, 0", 4),
    (
        "image access by six",
        "gfx1010",
        "image_sample_c_d v0, [v1, v2, v3, v4, v5, v6], s[0:7], s[8:11] dmask:0x1 dim:SQ_RSRC_IMG_1D",
        "buffer_load_dword v9, v8, s[12:15], 0 offen offset:2",
        1,
    ),
    ("floating point atomic", "gfx1030", "global_atomic_fcmpswap v[0:1], v[2:3], off", "s_denorm_mode 3", 3),
    ("another VALU reads it at once", "gfx1250", "v_exp_f32_e32 v1, v2", "v_add_f32_e32 v3, v1, v4", 1),
    ("another VALU overwrites it at once", "gfx1250", "v_exp_f32_e32 v1, v2", "v_mov_b32_e32 v2, v4", 1),
]


@pytest.mark.parametrize(("rule", "target", "first", "second", "needed"), PLANTED)
def test_a_planted_hazard_is_caught_and_cured(rule: str, target: str, first: str, second: str, needed: int) -> None:
    code = f"{first}\n{second}"
    (finding,) = [finding for finding in scan.findings(kernel(code, target), target) if rule in finding.rule]
    assert finding.missing == needed
    assert f"kernel: {second}: {needed} " in str(finding)
    assert f" too early after {first}" in str(finding)
    if "v_cmpx, v_permlane" in rule:
        with pytest.raises(CompileFailed, match=re.escape(second)):
            stage.checked(text(code, target), target, "it")
        return
    (unit,) = {row.unit for row in RULES if finding.rule.startswith(f"{row.name}; ")}
    filler = "v_mov_b32_e32 v250, v251" if unit == VECTORS else "s_nop 0"
    if unit != VECTORS:
        assert missing(f"{first}\ns_nop {needed - 2}\n{second}" if needed > 1 else code, target)
    assert not missing("\n".join([first, *[filler] * needed, second]), target)
    assert missing("\n".join([first, *[filler] * (needed - 1), second]), target)
    # With other registers there is no hazard. The cure is sufficient, and nothing is inserted twice.
    cured, report = stage.checked(text(code, target), target, "it")
    assert sum(report.found.values()) >= 1
    assert stage.checked(cured, target, "it")[0] == cured
    assert [line for line in cured.split("\n") if line.strip() in (first, second)] == [f"\t{first}", f"\t{second}"]


def test_every_rule_is_planted() -> None:
    assert [rule.name for rule in RULES if not any(name in rule.name for name, *_ in PLANTED)] == []


@pytest.mark.parametrize(
    ("target", "code"),
    [
        ("gfx942", f"{MFMA}\nv_add_f32_e32 v20, v16, v21"),  # reads the registers that the product reads
        ("gfx942", f"{MFMA}\n{MFMA}"),  # forwarded
        ("gfx90a", "v_exp_f32_e32 v1, v2\nv_add_f32_e32 v3, v1, v4"),
        ("gfx90a", "buffer_store_dwordx4 v[2:5], v1, s[4:7], s9 offen\nv_mov_b32_e32 v5, 0"),
        ("gfx942", "global_store_dwordx2 v[0:1], v[2:3], off\nv_mov_b32_e32 v2, 0"),
        ("gfx1150", "v_exp_f32_e32 v1, v2\nv_add_f32_e32 v3, v1, v4"),
        ("gfx1100", "v_exp_f32_e32 v1, v2\ns_waitcnt_depctr depctr_va_vdst(0)\nv_add_f32_e32 v3, v1, v4"),
        ("gfx1100", "v_exp_f32_e32 v1, v2\nds_load_b32 v9, v8\nv_add_f32_e32 v3, v1, v4"),
        ("gfx1100", "v_exp_f32_e32 v1, v2\nv_exp_f32_e32 v5, v6\nv_exp_f32_e32 v7, v8\nv_add_f32_e32 v3, v1, v4"),
        ("gfx1201", "v_exp_f32_e32 v1, v2\nv_add_f32_e32 v3, v1, v4"),
        ("gfx942", "v_readfirstlane_b32 s4, v1\ns_endpgm\nbuffer_load_dword v2, v3, s[4:7], 0 offen"),
        # A load may overwrite its own address if it is alone, or if something else comes between it and the next load.
        ("gfx90a", "global_load_dword v1, v[0:1], off\ns_nop 0\nglobal_load_dword v3, v[2:3], off"),
        ("gfx90a", "global_load_dword v8, v[0:1], off\nglobal_load_dword v9, v[2:3], off"),
        ("gfx90a", "global_store_dword v[0:1], v2, off\nglobal_store_dword v[0:1], v3, off offset:4"),
        (
            "gfx942",
            f"{M0}\ns_nop 0\nbuffer_load_dword v9, v1, s[4:7], 0 offen\nbuffer_load_dword v2, s[4:7], 0 offen lds",
        ),
        ("gfx1030", "s_load_dword s4, s[0:1], 0x0\ns_load_dwordx2 s[0:1], s[2:3], 0x8"),
        ("gfx942", "v_cvt_sr_fp8_f32 v1, v2, v3\nv_add_f32_e32 v4, v1, v1"),
        ("gfx942", "v_fma_mix_f32 v1, v2, v3, v4 op_sel:[0,0,1] op_sel_hi:[1,1,1]\nv_add_f32_e32 v4, v1, v1"),
        ("gfx950", "v_cvt_scalef32_pk_f32_fp4 v[0:1], v2, v3\nv_add_f32_e32 v4, v1, v1"),
    ],
)
def test_no_hazard(target: str, code: str) -> None:
    assert missing(code, target) == []
    whole = text(code, target)
    assert stage.checked(whole, target, "it") == (whole, stage.Report(pairs=0, found={}, added=0, unjudged=0))


@pytest.mark.parametrize(
    ("code", "late"),
    [
        (f"{MFMA}\ns_cbranch_scc0 .L1\ns_nop 15\n.L1:\nv_add_f32_e32 v20, v15, v21", 10),  # around the wait
        (f".L1:\nv_add_f32_e32 v20, v15, v21\n{MFMA}\ns_cbranch_scc0 .L1", 10),  # the back edge of a loop
        (f"s_branch .L2\n.L1:\nv_add_f32_e32 v20, v15, v21\ns_endpgm\n.L2:\n{MFMA}\ns_branch .L1", 10),
        (f".L1:\ns_cbranch_scc1 .L3\nv_add_f32_e32 v20, v15, v21\n.L3:\n{MFMA}\ns_branch .L1", 9),
    ],
)
def test_a_hazard_crosses_branches(code: str, late: int) -> None:
    assert missing(code, "gfx942") == [late]
    cured, _ = stage.checked(text(code, "gfx942"), "gfx942", "it")
    assert f"\ts_nop 7\n\ts_nop {late - 9}\n\tv_add_f32_e32 v20, v15, v21" in cured


def test_the_nearest_of_several_paths_counts() -> None:
    code = f"{MFMA}\ns_cbranch_scc0 .L1\ns_nop 3\n.L1:\ns_nop 1\nv_add_f32_e32 v20, v15, v21"
    assert missing(code, "gfx942") == [8]


@pytest.mark.parametrize(
    ("code", "wait"),
    [
        ("v_mov_b32_e32 v1, s4\ns_mov_b32 s4, 1\nv_mov_b32_e32 v2, s4", "depctr_sa_sdst(0)"),
        ("v_mov_b32_e32 v1, s5\ns_mov_b32 s4, 1\nv_mov_b32_e32 v2, s4", "depctr_sa_sdst(0)"),  # the pair counts
        ("v_mov_b32_e32 v1, s4\ns_mov_b32 s5, 1\nv_mov_b32_e32 v2, s5", "depctr_sa_sdst(0)"),
        ("v_mov_b32_e32 v1, s4\ns_mov_b32 s4, 1\ns_add_co_i32 s6, s4, s7", "depctr_sa_sdst(0)"),
        ("v_mov_b32_e32 v1, s4\nv_readfirstlane_b32 s4, v2\nv_mov_b32_e32 v2, s4", "depctr_va_sdst(0)"),
        (f"{SELECT}\nv_cmp_eq_u32_e32 vcc_lo, v1, v2\n{SELECT}", "depctr_va_vcc(0)"),
        (".L1:\nv_mov_b32_e32 v2, s4\ns_add_co_i32 s4, s4, 1\ns_cbranch_scc1 .L1", "depctr_sa_sdst(0)"),
    ],
)
def test_gfx12_waits_for_scalar_registers(code: str, wait: str) -> None:
    code = f"s_mov_b32 vcc_lo, 0\n{code}"
    result = scalars.findings(kernel(code, "gfx1201"))
    assert {finding.cure for finding in result} == {f"s_wait_alu {wait}"}
    cured, report = stage.checked(text(code, "gfx1201"), "gfx1201", "it")
    assert f"\ts_wait_alu {wait}" in cured
    assert report.found == {scalars.RULE: len(result)}
    assert stage.checked(cured, "gfx1201", "it")[1].found == {}
    assert stage.checked(text(code, "gfx1100"), "gfx1100", "it")[1].found == {}


@pytest.mark.parametrize(
    "code",
    [
        "s_mov_b32 s4, 1\nv_mov_b32_e32 v2, s4",  # no VALU has read it
        "v_mov_b32_e32 v1, s6\ns_mov_b32 s5, 1\nv_mov_b32_e32 v2, s5",  # s5 is of the pair of s4
        "v_mov_b32_e32 v1, s4\ns_mov_b32 s4, 1\ns_wait_alu depctr_sa_sdst(0)\nv_mov_b32_e32 v2, s4",
        "v_mov_b32_e32 v1, s4\ns_mov_b32 s4, 1\ns_load_b32 s9, s[0:1], 0x0\nv_mov_b32_e32 v2, s4",
        "v_mov_b32_e32 v1, s4\nv_readfirstlane_b32 s4, v2\ns_mov_b32 s9, s4\nv_mov_b32_e32 v2, s4",
    ],
)
def test_gfx12_needs_no_wait(code: str) -> None:
    assert scalars.findings(kernel(code, "gfx1201")) == []


def test_registers_from_v256_on_are_the_ones_of_the_comment() -> None:
    """gfx1250: s_set_vgpr_msb says the upper bits, and LLVM writes the whole number in a comment."""
    high = WMMA_1250.replace("v[0:7]", "v[0:7] /*v[256:263]*/")
    assert missing(f"{high}\nv_add_f32_e32 v40, v7, v41", "gfx1250") == []
    assert missing(f"{high}\nv_add_f32_e32 v40, v7 /*v263*/, v41", "gfx1250") == [4]
    assert instructions.registers("v1 /*v257*/") == 1 << 257
    assert instructions.registers("v[254:255] /*v[1022:1023]*/") == 0b11 << 1022
    assert instructions.registers("v0 /*v512*/") & instructions.SGPRS == 0


@pytest.mark.parametrize(
    ("target", "code", "problem"),
    [
        ("gfx942", "v_mov_b32_e32 v128, 0", "v_mov_b32_e32 v128, 0: a VGPR beyond the 128"),
        ("gfx942", "v_accvgpr_write_b32 a128, v0", "an AGPR beyond the 128"),
        ("gfx942", "s_mov_b64 s[60:61], 0", "an SGPR beyond the 60"),
        ("gfx942", "buffer_load_dword v1, s[4:7], 0 offen lds", "reads M0, which nothing has written"),
        (
            "gfx942",
            "s_cbranch_scc0 .L1\ns_mov_b64 vcc, 0\n.L1:\ns_nop 9\nv_cndmask_b32_e32 v3, v4, v5, vcc",
            "reads VCC",
        ),
        ("gfx1100", "v_dual_cndmask_b32 v0, v1, v2 :: v_dual_mov_b32 v3, v4", "reads VCC"),
    ],
)
def test_registers_that_a_kernel_must_not_use(target: str, code: str, problem: str) -> None:
    with pytest.raises(CompileFailed, match=rf"^it breaks a rule of the hardware: kernel: .*{problem}"):
        stage.checked(text(code, target), target, "it")


def test_an_instruction_without_figures_is_refused() -> None:
    code = "v_mfma_f64_16x16x4_f64 v[0:7], v[8:9], v[10:11], v[0:7]\nv_mov_b32_e32 v20, v0"
    with pytest.raises(CompileFailed, match="it: v_mfma_f64_16x16x4_f64: the check has no passes for it on gfx942"):
        stage.checked(text(code, "gfx942"), "gfx942", "it")


def test_a_branch_to_nowhere_is_refused() -> None:
    with pytest.raises(CompileFailed, match=r"it: s_branch \.L9: the label is not in the kernel"):
        stage.checked(text(".L9:\ns_branch .L9", "gfx942").replace(".L9:", ""), "gfx942", "it")


def test_code_for_nvidia_is_not_read() -> None:
    assert stage.checked("no assembly", "sm_90", "it") == (
        "no assembly",
        stage.Report(pairs=0, found={}, added=0, unjudged=0),
    )


def test_a_target_without_rules_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """A row does not inherit the hazards of its family: a new GPU has others until somebody has read its guide."""
    targets = sources.module("kernels.targets")
    monkeypatch.setattr(targets, "TARGETS", targets.TARGETS | targets._rows(targets._RDNA4, "gfx1300"))
    with pytest.raises(CompileFailed, match=r"^it: gfx1300 has no hazard rules: name the groups of its rules in"):
        stage.checked(text("s_nop 0", "gfx1300"), "gfx1300", "it")


LOAD = "buffer_load_dword v1, v2, s[8:11], 0 offen"
SOURCES, ON_BRANCH = "VMEM or LDS reads scalar register", "LDS and VMEM on two sides"
# Rule -> code without the wait, the instruction before which the wait is missing.
WITHOUT_WAIT = [
    (SOURCES, f"{LOAD}\ns_mov_b32 s8, 0", "s_mov_b32 s8, 0"),
    (SOURCES, f"{LOAD}\ns_load_dword s11, s[0:1], 0x0", "s_load_dword s11, s[0:1], 0x0"),
    (SOURCES, "ds_write_b32 v1, v2\ns_or_b32 exec_lo, exec_lo, s1", "s_or_b32 exec_lo, exec_lo, s1"),
    (SOURCES, "ds_read_b32 v1, v2\ns_and_saveexec_b32 s1, s2", "s_and_saveexec_b32 s1, s2"),
    (SOURCES, f"{LOAD}\ns_waitcnt vmcnt(0)\ns_mov_b32 s8, 0", "s_mov_b32 s8, 0"),
    (SOURCES, f".L1:\ns_add_i32 s9, s9, 1\n{LOAD}\ns_cbranch_scc1 .L1", "s_add_i32 s9, s9, 1"),
    ("SMEM reads SGPR", "s_load_dword s1, s[2:3], 0x0\nv_readfirstlane_b32 s2, v1", "v_readfirstlane_b32 s2, v1"),
    (
        "SMEM reads SGPR",
        "s_load_dword s1, s[2:3], 0x0\ns_nop 3\nv_cmp_eq_u32_e64 s3, v1, v2",
        "v_cmp_eq_u32_e64 s3, v1, v2",
    ),
    ("EXEC is read", "s_mov_b32 s1, exec_lo\nv_cmpx_gt_f32_e32 v1, v2", "v_cmpx_gt_f32_e32 v1, v2"),
    ("EXEC is read", f"{LOAD}\nv_mov_b32_e32 v4, v5\nv_cmpx_gt_f32_e32 v3, v2", "v_cmpx_gt_f32_e32 v3, v2"),
    (
        ON_BRANCH,
        "ds_write_b32 v1, v2\ns_branch .L1\n.L1:\nglobal_load_dword v3, v[4:5], off",
        "global_load_dword v3, v[4:5], off",
    ),
    (
        ON_BRANCH,
        "global_load_dword v3, v[4:5], off\ns_cbranch_scc1 .L1\n.L1:\nds_write_b32 v1, v2",
        "ds_write_b32 v1, v2",
    ),
]


@pytest.mark.parametrize(("rule", "code", "late"), WITHOUT_WAIT)
def test_a_missing_wait_of_gfx101_is_added(rule: str, code: str, late: str) -> None:
    (finding,) = pending.findings(kernel(code, "gfx1010"), "gfx1010")
    assert finding.rule.startswith(rule)
    cured, report = stage.checked(text(code, "gfx1010"), "gfx10-1-generic", "it")
    assert f"\t{finding.cure}\n\t{late}\n" in cured
    assert report.added == 1
    assert stage.checked(cured, "gfx1010", "it")[1].found == {}
    assert stage.checked(text(code, "gfx1030"), "gfx1030", "it")[1].found == {}


@pytest.mark.parametrize(
    "code",
    [
        f"{LOAD}\nv_mov_b32_e32 v4, v5\ns_mov_b32 s8, 0",
        f"{LOAD}\ns_waitcnt vmcnt(0) expcnt(0) lgkmcnt(0)\ns_mov_b32 s8, 0",
        f"{LOAD}\ns_waitcnt_depctr 0xffe3\ns_mov_b32 s8, 0",
        f"{LOAD}\ns_mov_b32 s12, 0",
        "s_load_dword s1, s[2:3], 0x0\ns_waitcnt lgkmcnt(0)\nv_readfirstlane_b32 s2, v1",
        "s_load_dword s1, s[2:3], 0x0\ns_add_i32 s4, s5, 1\nv_readfirstlane_b32 s2, v1",
        "s_mov_b32 s1, exec_lo\ns_waitcnt_depctr 0xfffe\nv_cmpx_gt_f32_e32 v1, v2",
        "s_mov_b32 s1, exec_lo\nv_cmp_gt_f32_e32 vcc_lo, v1, v2\nv_cmpx_gt_f32_e32 v1, v2",
        "ds_write_b32 v1, v2\nglobal_load_dword v3, v[4:5], off",
        "ds_write_b32 v1, v2\ns_branch .L1\n.L1:\nds_write_b32 v1, v2",
        "ds_write_b32 v1, v2\ns_waitcnt_vscnt null, 0x0\ns_branch .L1\n.L1:\nglobal_load_dword v3, v[4:5], off",
    ],
)
def test_gfx101_needs_no_wait(code: str) -> None:
    assert pending.findings(kernel(code, "gfx1010"), "gfx1010") == []


TRANSLATED = "memory access reads register, overwritten before its address is translated"
LOAD_1250, STORE_1250 = "global_load_b32 v1, v[2:3], off", "global_store_b32 v[2:3], v4, off"
SCALAR_1250 = "s_load_b64 s[4:5], s[0:1], 0x0"


@pytest.mark.parametrize(
    ("code", "late"),
    [
        (f"{LOAD_1250}\nv_mov_b32_e32 v3, 0", "v_mov_b32_e32 v3, 0"),
        (f"{STORE_1250}\nv_mov_b32_e32 v4, 0", "v_mov_b32_e32 v4, 0"),
        (f"{STORE_1250}\ns_or_b32 exec_lo, exec_lo, s1", "s_or_b32 exec_lo, exec_lo, s1"),
        (f"{SCALAR_1250}\ns_mov_b32 s0, 0", "s_mov_b32 s0, 0"),
        (f"{LOAD_1250}\ns_wait_kmcnt 0x0\nds_load_b32 v2, v9", "ds_load_b32 v2, v9"),
        (f".L1:\nv_add_nc_u32_e32 v2, 4, v2\n{STORE_1250}\ns_cbranch_scc1 .L1", "v_add_nc_u32_e32 v2, 4, v2"),
        # A wait for scalar loads is none for the vector load of the other path.
        (
            f"{SCALAR_1250}\ns_cbranch_scc1 .L1\nglobal_load_b32 v1, v2, s[0:1]\n.L1:\n"
            "s_wait_kmcnt 0x0\ns_mov_b32 s0, 0",
            "s_mov_b32 s0, 0",
        ),
    ],
)
def test_gfx1250_waits_for_the_translation_of_addresses(code: str, late: str) -> None:
    cured, report = stage.checked(text(code, "gfx1250"), "gfx1250", "it")
    assert {rule.partition(";")[0]: number for rule, number in report.found.items()} == {TRANSLATED: 1}
    assert f"\ts_wait_xcnt 0x0\n\t{late}\n" in cured
    assert stage.checked(cured, "gfx1250", "it")[1].found == {}
    assert stage.checked(text(code, "gfx1201"), "gfx1201", "it")[1].found == {}


@pytest.mark.parametrize(
    "code",
    [
        f"{LOAD_1250}\ns_wait_loadcnt 0x0\nv_mov_b32_e32 v3, 0",
        f"{LOAD_1250}\nglobal_load_b32 v2, v[4:5], off",  # vector accesses are translated in order
        f"{LOAD_1250}\n{SCALAR_1250}\nv_mov_b32_e32 v3, 0",  # the hardware waits between the two kinds
        f"{SCALAR_1250}\ns_wait_kmcnt 0x0\ns_mov_b32 s0, 0",
        f"{LOAD_1250}\nv_mov_b32_e32 v9, v3",
    ],
)
def test_gfx1250_needs_no_wait_for_translation(code: str) -> None:
    assert pending.findings(kernel(code, "gfx1250"), "gfx1250") == []


def test_every_wait_and_form_is_planted() -> None:
    planted_waits = (TRANSLATED, *(name for name, *_ in WITHOUT_WAIT))
    assert all(rule.name.startswith(planted_waits) for rule in pending.RULES)
    assert all(any(form.source in planted for *_, planted in WRONG_FORMS) for form in forms.FORMS)


LAST = "v_dual_fma_f64 v[0:1], v[2:3], v[4:5], v[6:7] :: v_dual_mov_b32 v9, v255"
WRONG_FORMS = [
    ("gfx1010", "flat_load_dword v1, v[2:3] offset:4", "LLVM hasFlatSegmentOffsetBug"),
    ("gfx1012", "scratch_load_dword v1, v2, off offset:-6", "LLVM hasNegativeUnalignedScratchOffsetBug"),
    ("gfx1011", "s_inst_prefetch 0x1", "LLVM FeatureInstFwdPrefetchBug"),
    ("gfx1250", LAST, "LLVM pull request 224741"),
]


@pytest.mark.parametrize(("target", "code", "source"), WRONG_FORMS)
def test_a_form_that_the_gpu_executes_wrongly_is_refused(target: str, code: str, source: str) -> None:
    with pytest.raises(CompileFailed, match=re.escape(code) + f".*{source}"):
        stage.checked(text(code, target), target, "it")
    right = (
        code.replace(" offset:4", "").replace("-6", "-8").replace("s_inst_prefetch", "s_clause").replace("255", "254")
    )
    for fine in ((right, target), (code, "gfx1030" if target != "gfx1250" else "gfx1201")):
        assert stage.checked(text(*fine), fine[1], "it")[1].found == {}


def test_every_target_has_rules_and_every_group_has_a_target() -> None:
    rows = [row for row in sources.module("kernels.targets").TARGETS.values() if row.vendor == "amd"]
    assert all(for_target(row.name) for row in rows)
    tables = (*RULES, *pending.RULES, *forms.FORMS)
    elsewhere = {"sgpr_rewrite", "entry"}  # scalars.py, prologue.py
    ruled = {group for table in tables for group in table.hazards} | elsewhere
    assert {group for row in rows for group in row.hazards} == ruled


@pytest.mark.parametrize("wait", ["depctr_va_vdst(1)", "depctr_va_vdst(15)", "0x1fff", "depctr_va_sdst(0)"])
def test_a_wait_for_some_vector_instructions_does_not_end_a_hazard(wait: str) -> None:
    """va_vdst(1) lets the newest instruction still run, and the newest may be the transcendental one."""
    assert missing(f"v_exp_f32_e32 v1, v2\ns_waitcnt_depctr {wait}\nv_add_f32_e32 v3, v1, v4", "gfx1100") == [6]
    full = wait.replace("(1)", "(0)").replace("(15)", "(0)").replace("0x1fff", "0xfff").replace("sdst", "vdst")
    assert not missing(f"v_exp_f32_e32 v1, v2\ns_waitcnt_depctr {full}\nv_add_f32_e32 v3, v1, v4", "gfx1100")
