"""Triton's assembly for one GPU becomes a code object of a generic target or of another GPU of its family."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rocm_wheels.compile import codeobject, units
from rocm_wheels.compile.triton import compiler, retarget
from rocm_wheels.errors import CompileFailed

ASSEMBLY = """\t.amdgcn_target "amdgcn-amd-amdhsa--gfx1100"
\t.amdhsa_code_object_version 5
\ts_endpgm ; gfx1100
amdhsa.target:   amdgcn-amd-amdhsa--gfx1100
"""


def test_the_target_and_the_version_are_renamed_and_nothing_else() -> None:
    assert retarget.rename(ASSEMBLY, "gfx1100", "gfx11-generic", is_generic=True) == (
        '\t.amdgcn_target "amdgcn-amd-amdhsa--gfx11-generic"\n'
        "\t.amdhsa_code_object_version 6\n"
        "\ts_endpgm ; gfx1100\n"
        "amdhsa.target:   amdgcn-amd-amdhsa--gfx11-generic\n"
    )


def test_an_instruction_that_the_generic_target_lacks_is_an_error() -> None:
    with pytest.raises(CompileFailed, match=r"does not assemble for gfx11-generic: "):
        retarget.assemble(
            retarget.rename(ASSEMBLY, "gfx1100", "gfx11-generic", is_generic=True) + "\tv_mfma_f32_4x4x1f32\n",
            "gfx11-generic",
        )


@pytest.mark.parametrize(
    ("target", "made_for", "machine"),
    [
        ("gfx10-1-generic", "gfx1010", 0x52),
        ("gfx10-3-generic", "gfx1030", 0x53),
        ("gfx11-generic", "gfx1100", 0x54),
        ("gfx12-generic", "gfx1201", 0x59),
        ("gfx1103", "gfx1100", 0x44),
        ("gfx1150", "gfx1100", 0x43),
    ],
)
def test_a_code_object_of_another_target_than_its_assembly(
    target: str, made_for: str, machine: int, tmp_path: Path
) -> None:
    (unit,) = units.find([target], only="combine-bf16-d128")
    # In a process of its own, because Triton may be set to interpret kernels in this process.
    spawn = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(1, spawn, initializer=compiler.prepare, initargs=(str(tmp_path),)) as process:
        made = process.submit(compiler.translate, target, *unit.content)
        source = process.submit(compiler.translate, made_for, *unit.content)
    image, _, assembly = made.result()
    result = codeobject.read(image)
    assert (result.target, result.symbol) == (target, "attn_combine")
    is_generic = target.endswith("-generic")
    assert image[8] == (4 if is_generic else 3)  # the ELF ABI of code objects of version 6 and of version 5
    assert image[48] == machine
    assert image[51] == is_generic  # the version of the generic target
    _, _, own = source.result()
    assert assembly == retarget.rename(own, made_for, target, is_generic=is_generic)
