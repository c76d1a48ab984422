"""Kernels read from code objects with a disassembler of Debian."""

from __future__ import annotations

import struct
import subprocess
from pathlib import Path

import numpy as np
import pytest
import tools

from amdgpu_simulator.debian import UnavailableError
from amdgpu_simulator.isa import disassembly, machine
from amdgpu_simulator.isa.mode import Mode
from rocm_wheels.compile.ck import toolchain

SOURCE = """
\t.amdgcn_target "amdgcn-amd-amdhsa--gfx942"
\t.text
\t.globl count
\t.p2align 8
\t.type count,@function
count:
\ts_load_dwordx2 s[4:5], s[0:1], 0x0
\ts_mov_b32 s6, 0
\tv_lshlrev_b32_e32 v1, 2, v0
again:
\ts_add_u32 s6, s6, s2
\ts_add_u32 s6, s6, 1
\ts_cmp_lt_u32 s6, 10
\ts_cbranch_scc1 again
\tv_add_u32_e32 v2, s6, v0
\ts_waitcnt lgkmcnt(0)
\tglobal_store_dword v1, v2, s[4:5]
\ts_endpgm
\t.size count, .-count
\t.rodata
\t.p2align 6
\t.amdhsa_kernel count
\t\t.amdhsa_user_sgpr_kernarg_segment_ptr 1
\t\t.amdhsa_group_segment_fixed_size 512
\t\t.amdhsa_next_free_vgpr 4
\t\t.amdhsa_next_free_sgpr 8
\t\t.amdhsa_accum_offset 4
\t\t.amdhsa_float_denorm_mode_32 2
\t.end_amdhsa_kernel
\t.amdgpu_metadata
---
amdhsa.version: [1, 2]
amdhsa.target: amdgcn-amd-amdhsa--gfx942
amdhsa.kernels:
  - .name: count
    .symbol: count.kd
    .kernarg_segment_size: 8
    .group_segment_fixed_size: 512
    .private_segment_fixed_size: 0
    .kernarg_segment_align: 8
    .wavefront_size: 64
    .sgpr_count: 8
    .vgpr_count: 4
    .max_flat_workgroup_size: 64
...
\t.end_amdgpu_metadata
"""


@pytest.fixture(scope="module")
def image(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    directory: Path = tmp_path_factory.mktemp("disassembly")
    (directory / "count.s").write_text(SOURCE.replace("\t.rodata", "\t.section .rodata"), encoding="utf-8")
    clang = toolchain.find("pypi")
    assemble = ["-x", "assembler", "--target=amdgcn-amd-amdhsa", "-mcpu=gfx942", "-c", "count.s", "-o", "count.o"]
    for command in ([*clang.command, *assemble], [*clang.linker, "-shared", "count.o", "-o", "count.co"]):
        done = subprocess.run(command, cwd=directory, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stderr
    return (directory / "count.co").read_bytes()


def test_a_kernel_of_a_code_object_runs(image: bytes) -> None:
    try:
        kernel = disassembly.kernel(image)
    except UnavailableError as problem:
        tools.missing(str(problem))
    assert (kernel.symbol, kernel.target, kernel.descriptor["kernarg_size"]) == ("count", "gfx942", 8)
    assert kernel.descriptor["group_segment_fixed_size"] == 512
    assert Mode(kernel.descriptor).value == Mode({}).value | 0x20  # float_denorm_mode_32 2
    out = np.zeros(64, np.uint32)
    ranges = [(out.ctypes.data, out.nbytes)]
    machine.launch(machine.Program(kernel), (1, 1, 1), 64, struct.pack("<Q", out.ctypes.data), ranges)
    assert list(out) == list(range(10, 74))


def test_other_files_are_refused(image: bytes) -> None:
    with pytest.raises(ValueError, match="no AMD kernel"):
        disassembly.kernel(image.replace(b"AMDGPU\0", b"NOBODY\0"))
    with pytest.raises(ValueError, match="is for gfx942, not for gfx950"):
        disassembly.kernel(image, target="gfx950")
    with pytest.raises(ValueError, match="does not know the instructions of gfx949"):
        disassembly.kernel(image.replace(b"--gfx942", b"--gfx949"))
    nameless = image.replace(b"amdhsa.target", b"amdhsa.nobody")
    with pytest.raises(ValueError, match="does not name its GPU target"):
        disassembly.kernel(nameless)
