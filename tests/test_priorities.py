"""`s_setprio` in forwards: where it is inserted into the assembly, and which assembly is refused."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rocm_wheels.compile import units
from rocm_wheels.compile.triton import compiler, priorities, retarget
from rocm_wheels.errors import CompileFailed

BEFORE = """\tv_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], 0
.LBB0_1:                                ; wait
\ts_sleep 1
\ts_cbranch_scc1 .LBB0_1
"""
# The form of a softcap: exponentials and packed multiplications come before the maxima too.
LOOP = """.LBB0_2:                                ; =>This Inner Loop Header: Depth=1
\tv_mfma_f32_32x32x16_bf16 v[0:15], v[16:19], v[20:23], 0
\tv_exp_f32_e32 v24, v0
\tv_pk_mul_f32 v[0:1], v[0:1], v[24:25]
\tv_max3_f32 v26, v0, v1, v2
\tv_max_f32_e32 v26, v26, v3
\tv_pk_mul_f32 v[0:1], v[0:1], v[30:31]
\tv_exp_f32_e32 v0, v0
\tv_pk_mul_f32 v[32:33], v[32:33], v[26:27]
\tv_mfma_f32_32x32x16_bf16 v[32:47], v[0:3], v[48:51], v[32:47]
\tv_exp_f32_e32 v1, v1
\tv_mfma_f32_32x32x16_bf16 v[32:47], v[4:7], v[48:51], v[32:47]
\ts_cbranch_scc1 .LBB0_2
"""
AFTER = "\ts_endpgm\n"


def test_a_wave_has_priority_from_the_scaling_to_its_next_scores() -> None:
    result = priorities.insert(BEFORE + LOOP + AFTER, "kernel")
    lines = result.split("\n")
    assert [line for line in lines if "s_setprio" not in line] == (BEFORE + LOOP + AFTER).split("\n")
    maxima, scaling, end = (index for index, line in enumerate(lines) if "s_setprio" in line)
    assert [lines[index] for index in (maxima, scaling, end)] == ["\ts_setprio 0", "\ts_setprio 1", "\ts_setprio 0"]
    assert "v_max3_f32" in lines[maxima + 1]
    assert "v[32:33]" in lines[scaling + 1]
    assert "s_cbranch" in lines[end - 1]


def test_each_loop_has_priorities() -> None:
    both = LOOP + LOOP.replace("LBB0_2", "LBB0_3")
    assert priorities.insert(both, "kernel").count("s_setprio") == 6


@pytest.mark.parametrize(
    ("assembly", "why"),
    [
        (BEFORE + AFTER, "kernel has no loop with products"),
        # Not a step of a forward: only the products of the scores are left.
        (BEFORE + LOOP.replace("\tv_mfma_f32_32x32x16_bf16 v[32", "\tv_fma v[32"), "no v_mfma_ after v_mfma_, v_max"),
        (BEFORE + LOOP.replace("\tv_max", "\tv_min"), "the loop .LBB0_2:.* has no v_max after v_mfma_"),
        # One valid loop does not excuse another loop.
        (LOOP + LOOP.replace("LBB0_2", "LBB0_3").replace("\tv_exp", "\tv_log"), "the loop .LBB0_3:.* has no v_exp_"),
        # A branch in the loop.
        (BEFORE + LOOP.replace("\tv_max3", "\ts_cbranch_vccz .LBB0_4\n\tv_max3"), "kernel has no loop with products"),
    ],
)  # fmt: skip
def test_a_loop_of_another_form_is_refused(assembly: str, why: str) -> None:
    with pytest.raises(CompileFailed, match=why):
        priorities.insert(assembly, "kernel")


@pytest.mark.parametrize("target", ["gfx942", "gfx950"])
def test_the_other_code_is_unchanged(target: str, tmp_path: Path) -> None:
    (unit,) = units.find([target], only="combine-bf16-d128")
    # In a process of its own, because Triton may be set to interpret kernels in this process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=compiler.prepare, initargs=(str(tmp_path),)) as process:
        image, _, assembly = process.submit(compiler.translate, target, *unit.content).result()
        assert process.submit(retarget.assemble, assembly, target).result() == image
