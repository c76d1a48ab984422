"""The hazard check on AMD's assembly kernels counts accepted habits and refuses every other hazard."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from amdgpu_simulator import assembly_hazards
from rocm_wheels.compile.asm import package
from rocm_wheels.compile.check import habits, instructions
from rocm_wheels.errors import DataError

# One code object of each target and set of habits; `python -m amdgpu_simulator hazards` checks all.
SAMPLE = {(one.target, *one.places): one for one in reversed(package.load().objects)}

PRODUCT = "v_mfma_f32_32x32x8_bf16 v[0:15], v[16:17], v[18:19], v[0:15]"
READ = "v_max3_f32 v25, v0, v1, v28"
SELECT = "v_cndmask_b32_e64 v3, v4, v5, s[4:5]"
COMPARE = "v_cmp_lt_i32_e64 s[4:5], 0, v16"
LOAD = "buffer_load_dword v4, s[8:11], s59 offen lds"


def kernel(code: str) -> instructions.Kernel:
    return instructions.kernel("it", list(enumerate(code.split("\n"))), {})


@pytest.mark.parametrize(
    "one",
    [
        pytest.param(
            one, id=f"{one.target}-{one.kernel}", marks=() if one.kernel.startswith("asm-fwd") else pytest.mark.long
        )
        for one in SAMPLE.values()
    ],
)
def test_the_counts_in_the_data_file_are_current(one: package.CodeObject) -> None:
    assert assembly_hazards.counts(one) == one.places


def test_each_habit_occurs() -> None:
    assert {name for one in package.load().objects for name in one.places} == set(habits.NAMES)


@pytest.mark.parametrize(
    ("target", "code", "expected"),
    [
        ("gfx942", f"{COMPARE}\ns_nop 0\n{SELECT}", {"mask": 1}),
        ("gfx942", f"s_mov_b32 m0, s1\n{LOAD}", {"lds": 1}),
        (
            "gfx950",
            "v_permlane32_swap_b32_e32 v1, v3\nv_nop\nv_permlane16_swap_b32_e32 v1, v2",
            {"swap": 1},
        ),
        ("gfx942", f"{PRODUCT}\ns_nop 6\ns_barrier\ns_nop 0\n{READ}", {"product": 1}),
        ("gfx942", f"{PRODUCT}\ns_nop 2\ns_branch L1\nL1:\n{READ}", {"product": 1}),
        ("gfx942", f"{PRODUCT}\ns_nop 7\ns_nop 2\n{READ}", {}),
    ],
)
def test_an_accepted_habit_is_counted(target: str, code: str, expected: dict[str, int]) -> None:
    assert habits.counts(kernel(code), target) == expected


@pytest.mark.parametrize(
    ("target", "code", "problem"),
    [
        ("gfx942", f"{COMPARE}\n{SELECT}", "2 wait states too early after v_cmp_lt_i32"),
        ("gfx942", f"v_readfirstlane_b32 s4, v1\ns_nop 0\n{SELECT}", "1 wait states too early after v_readfirstlane"),
        ("gfx942", f"{COMPARE}\ns_nop 0\nv_mov_b32_e32 v1, s4", "1 wait states too early after v_cmp_lt_i32"),
        (
            "gfx950",
            "s_mov_b32 m0, s1\nglobal_load_lds_dwordx4 v[2:3], off",
            "1 wait states too early after s_mov_b32 m0",
        ),
        ("gfx950", "v_mov_b32_e32 v1, v3\nv_nop\nv_permlane16_swap_b32_e32 v1, v2", "1 wait states too early"),
        (
            "gfx950",
            "v_permlane32_swap_b32_e32 v1, v3\nv_permlane16_swap_b32_e32 v1, v2",
            "2 wait states too early",
        ),
        ("gfx942", f"{PRODUCT}\n{READ}", "11 wait states too early after v_mfma"),
        ("gfx942", f"{PRODUCT}\ns_nop 7\ns_nop 1\n{READ}", "1 wait states too early after v_mfma"),
        ("gfx942", f"{PRODUCT}\ns_barrier\n{READ}", "8 wait states too early after v_mfma"),
        ("gfx942", f"{PRODUCT}\ns_nop 1\ns_branch L1\nL1:\n{READ}", "1 wait states too early after v_mfma"),
        ("gfx942", f"{PRODUCT}\n{PRODUCT.replace('v[0:15]', 'v[32:47]')}\n{READ}", "10 wait states too early"),
        ("gfx942", "v_readlane_b32 s4, v1, 3\nv_readlane_b32 s5, v2, s4", "4 wait states too early"),
        ("gfx942", LOAD, "reads M0, which nothing has written"),
    ],
)
def test_a_hazard_that_no_habit_explains_is_refused(target: str, code: str, problem: str) -> None:
    with pytest.raises(ValueError, match=f"^it: .*{problem}"):
        habits.counts(kernel(code), target)


def test_a_kernel_without_its_barriers_is_refused() -> None:
    one = next(one for one in SAMPLE.values() if "product" in one.places)
    code = assembly_hazards.read(one)
    without = tuple(
        instructions.instruction("s_nop 0") if each.mnemonic == "s_barrier" else each for each in code.instructions
    )
    with pytest.raises(ValueError, match="too early after v_mfma"):
        habits.counts(replace(code, instructions=without), one.target)


def test_counts_that_differ_from_the_data_file_fail(monkeypatch: pytest.MonkeyPatch) -> None:
    one = next(iter(SAMPLE.values()))
    changed = replace(package.load(), objects=(replace(one, places={"mask": 7}),))
    monkeypatch.setattr(assembly_hazards, "counts", lambda _: {"mask": 8})
    monkeypatch.setattr(package, "load", lambda: changed)
    with pytest.raises(ValueError, match=r"amd_aiter.toml has places \{ mask = 7 \}"):
        list(assembly_hazards.table())


@pytest.mark.parametrize("places", ["", "places = 3\n", "places = { unheard = 1 }\n"])
def test_a_code_object_without_counts_in_the_data_file_is_refused(places: str, tmp_path: Path) -> None:
    text = package.DATA_FILE.read_text(encoding="utf-8")
    first = next(line for line in text.splitlines(keepends=True) if line.startswith("places = "))
    changed = tmp_path / "other.toml"
    changed.write_text(text.replace(first, places, 1), encoding="utf-8")
    with pytest.raises(DataError, match=r"asm-fwd-bf16-d128-plain of gfx942 in other.toml has places") as caught:
        package.load(changed)
    assert "python -m amdgpu_simulator hazards" in str(caught.value.remedy)
