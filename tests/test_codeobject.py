"""Reading code objects. test_kernels.py reads real ones."""

from __future__ import annotations

import sys
from dataclasses import replace
from pathlib import Path

import pytest

from rocm_wheels.compile import codeobject, isa
from rocm_wheels.errors import CompileFailed


@pytest.mark.parametrize("image", [b"", b"\x7fELF", b"not an object at all", b"\x7fELF" + b"\0" * 60])
def test_files_that_are_no_code_object_are_refused(image: bytes) -> None:
    with pytest.raises(CompileFailed, match="not a "):
        codeobject.read(image)


def test_a_host_program_is_refused() -> None:
    with pytest.raises(CompileFailed, match="not a GPU code object"):
        codeobject.read(Path(sys.executable).read_bytes())


def test_the_metadata_of_a_kernel() -> None:
    """The caller does not pass the arguments that the compiler adds, and no spill is lost."""
    kinds = ("global_buffer", "by_value", "hidden_global_offset_x")
    registers = ("vgpr_count", "agpr_count", "sgpr_count", "vgpr_spill_count", "sgpr_spill_count")
    sizes = ("private_segment_fixed_size", "group_segment_fixed_size", "max_flat_workgroup_size")
    kernel = {f".{name}": number for number, name in enumerate((*registers, *sizes), start=1)}
    arguments = [{".offset": 8 * i, ".size": 4, ".value_kind": kind} for i, kind in enumerate(kinds)]
    result = codeobject._amd_kernel("gfx942", {".name": "attn", ".args": arguments, **kernel}, granules=19)
    assert (result.symbol, result.arguments, result.argument_bytes, result.threads) == ("attn", 2, 12, 8)
    known = ("vgprs", "agprs", "sgprs", "vgpr_spills", "sgpr_spills", "private", "lds")
    assert result.resources() == {name: number for number, name in enumerate(known, 1)} | {"reserved_vgprs": 152}
    assert replace(result, target="gfx1250").reserved_vgprs == 304


def test_the_instruction_mix_counts_by_class() -> None:
    lines = [
        "\tv_mfma_f32_32x32x8_f16 a[0:15], v[0:1], v[2:3], a[0:15]",
        "\tv_add_f32_e32 v0, v1, v2",
        "\tv_exp_f32_e32 v0, v1",
        "\tds_read_b64 v[0:1], v2",
        "\tbuffer_load_dwordx4 v[0:3], v4, s[0:3], 0 offen",
        "\ts_waitcnt lgkmcnt(0)",
        ".LBB0_1:",
        "\t; v_add in a comment",
    ]
    expected = {"mfma": 1, "lds": 1, "memory": 1, "valu": 2, "salu": 1}
    assert isa.instruction_mix("\n".join(lines)) == expected
