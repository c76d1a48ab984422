"""Every modifier and operand of an instruction is either implemented or refused."""

from __future__ import annotations

import pytest

from amdgpu_simulator.isa import arithmetic, machine
from amdgpu_simulator.tests.test_isa import kernel, run

# One operand for each kind of value.
_OPERANDS = {"U": "v[10:11]", "I": "v[10:11]", "F": "v[10:11]"}
# Modifiers that no operation of `arithmetic` accepts, except clamp for floating-point operations.
_MODIFIERS = ("mul:2", "mul:4", "div:2", "byte_sel:1", "neg_lo:[1,0]", "neg_hi:[1,0]", "op_sel_hi:[0,0]", "fi:1",
              "dst_sel:BYTE_0 src0_sel:BYTE_1", "quad_perm:[1,0,3,2]", "bitop3:0x3", "cbsz:1", "frob")  # fmt: skip


def operation(name: str, kinds: str) -> str:
    kinds = kinds[:-1] if kinds.endswith("d") else kinds
    return f"v_{name} {', '.join(_OPERANDS.get(kind, 'v10') for kind in kinds)}"


TABLED = [operation(name, kinds) for name, (kinds, _) in (arithmetic.OPERATIONS | arithmetic.EXTREMES).items()]
OTHERS = {
    "v_cndmask_b32 v9, v0, v1, vcc": ("clamp", "op_sel:[1,0]"),
    "v_cmp_gt_f32 vcc, v0, v1": ("clamp", "dst_sel:WORD_1"),
    "v_add_co_u32 v9, vcc, v0, v1": ("clamp",),
    "v_addc_co_u32 v9, vcc, v0, v1, vcc": ("clamp",),
    "v_subb_co_u32 v9, vcc, v0, v1, vcc": ("clamp",),
    "v_mad_u64_u32 v[8:9], vcc, v0, v1, v[2:3]": ("clamp",),
    "v_div_scale_f32 v9, vcc, v0, v1, v0": ("clamp",),
    "v_div_fmas_f32 v9, v0, v1, v2": ("clamp",),
    "v_readlane_b32 s6, v0, 5": ("clamp",),
    "v_permlane16_b32 v9, v0, s6, s7": ("clamp",),
    "v_bitop3_b32 v9, v0, v1, v2": ("op_sel:[1,0]", "clamp"),
    "v_fma_mix_f32 v9, v0, v1, v2": ("clamp", "neg_lo:[1,0,0]", "neg_hi:[1,0,0]"),
    "v_pk_add_f32 v[8:9], v[2:3], v[4:5]": ("clamp",),
    "v_pk_fma_f16 v9, v0, v1, v2": ("clamp",),
    "v_pk_add_u16 v9, v0, v1": ("clamp", "neg_lo:[1,0]", "neg_hi:[1,0]"),
    "v_pk_mov_b32 v[8:9], v[2:3], v[4:5]": ("neg_lo:[1,0]",),
    "v_cvt_pk_fp8_f32 v9, v0, v1": ("clamp", "byte_sel:2"),
    "v_cvt_f32_fp8 v9, v0": ("clamp",),
    "v_mfma_f32_32x32x8_f16 v[16:31], v[4:5], v[4:5], 0": ("cbsz:1", "abid:1", "blgp:1", "neg:[1,0,0]"),
    "global_load_dword v9, v[2:3], off": ("tfe", "offen", "idxen", "swz", "offset0:4"),
    "buffer_load_dword v9, v1, s[4:7], 0": ("tfe", "swz", "addr64"),
    "buffer_load_dword v9, v1, s[4:7], 0 offen": ("tfe", "offset1:1"),
    "buffer_store_dword v9, v1, s[4:7], 0 idxen": ("tfe", "lwe"),
    "global_atomic_add v[2:3], v9, off": ("tfe", "offen"),
    "s_load_dword s6, s[0:1], 0x0": ("offen", "idxen", "tfe"),
    "ds_read_b32 v9, v1": ("gds", "offset0:1", "offset1:1"),
    "ds_read2_b32 v[8:9], v1": ("gds", "offset:4"),
    "ds_write_b64 v1, v[8:9]": ("gds", "offset0:1"),
    "ds_bpermute_b32 v9, v1, v0": ("gds", "offset0:1"),
    "ds_swizzle_b32 v9, v0 offset:swizzle(SWAP,16)": ("gds",),
    "s_mov_b32 s6, s7": ("clamp", "frob"),
    "s_waitcnt_frob 0": ("",),
}  # fmt: skip
FORMS = [f"{code} {modifier}" for code in TABLED for modifier in _MODIFIERS]
FORMS += [f"{code} {modifier}" for code, modifiers in OTHERS.items() for modifier in modifiers]


@pytest.mark.parametrize("target", ["gfx942", "gfx1100", "gfx1201"])
def test_modifiers_that_nothing_reads_are_refused(target: str) -> None:
    made = machine.Program(kernel("\n".join(FORMS), target))
    refused = {text.partition(": ")[0] for text in made.refused}
    assert [form for form in FORMS if form.strip() not in refused] == []
    names = {form: form.partition(" clamp")[0] for form in FORMS}
    assert all(names)


def test_forms_without_modifiers_are_accepted() -> None:
    plain = [*TABLED, *OTHERS]
    plain.remove("s_waitcnt_frob 0")
    refused = machine.Program(kernel("\n".join(plain), "gfx942")).refused
    assert refused == []


@pytest.mark.parametrize(
    ("code", "problem"),
    [
        ("v_add_f32_e64 v9, v0, v1 mul:2", "modifiers mul"),
        ("v_add_co_u32_e64 v9, vcc, v0, v1 clamp", "modifiers clamp"),
        ("v_add_u32_e64 v9, v0, v1 clamp", "clamp of integers"),
        ("v_and_b32_e64 v9, v0, v1 op_sel:[1,0,0]", "a half of a register cannot be an operand of kind u"),
        ("v_add_u32_e32 v9, v0.h, v1", "a half of a register cannot be an operand of kind u"),
        ("v_add_u32_e32 v9.l, v0, v1", "a half of a register cannot be a result of kind u"),
        ("v_add_u32_e32 v9, -v0, v1", "-v0"),
        ("v_add_u32_e32 v9, |v0|, v1", "v0"),
        ("v_add_u32_e32 v9, sext(v0), v1", "v0"),
        ("v_add_u32_e32 v9, v0, v1, v2", "3 operands"),
        ("v_cmp_eq_u32_e32 vcc, v0, v1, v2", "operands v0"),
        ("s_add_u32 s6, s7, s8, s9", "not known"),
        ("s_not_b32 s6, s7, s8", "not known"),
        ("v_pk_add_bf16 v9, v0, v1", "not known"),
        ("v_pk_max_bf16 v9, v0, v1", "not known"),
        ("v_mov_b64_e32 v[8:9], 3.5", "the constant 3.5 is not implemented"),
        ("v_lshlrev_b64 v[8:9], 1, 0x123456789", "the literal 0x123456789 is not implemented for 64-bit operands"),
        ("v_add_u16_e32 v9, 1.0, v0", "the constant 1.0 is not implemented for operands of kind w"),
        ("v_mov_b32_sdwa v9, v0 dst_sel:WORD_1 dst_unused:UNUSED_SEXT src0_sel:DWORD", "UNUSED_SEXT"),
        ("v_mov_b32_dpp v9, v0 dpp8:[7,6,5,4,3,2,1,0]", "DPP without exactly one known control"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 0, 2), 1", "round mode 0x1"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_MODE, 9, 1), 0", "sets bits of MODE"),
        ("s_setreg_imm32_b32 hwreg(HW_REG_TRAPSTS, 0, 1), 0", r"hwreg\(HW_REG_TRAPSTS,0,1\) is not modelled"),
        ("s_getreg_b32 s6, hwreg(HW_REG_HW_ID)", "not known"),
        ("s_frob_b32 s6, s7", "s_frob_b32 s6, s7: not known"),
    ],
)  # fmt: skip
def test_a_refusal_names_the_instruction_and_the_reason(code: str, problem: str) -> None:
    with pytest.raises(NotImplementedError, match=problem) as raised:
        run(code)
    assert code in str(raised.value)


def test_a_refused_instruction_may_be_skipped() -> None:
    assert list(run("s_branch .Lafter\n v_frob_b32 v9, v0\n.Lafter:\n v_mov_b32_e32 v9, 5")) == [5] * 64
