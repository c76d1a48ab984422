"""Barriers that order LDS alone: which LLVM IR is rewritten, which is refused, and what real kernels have then."""

from __future__ import annotations

import multiprocessing
from concurrent.futures import ProcessPoolExecutor
from pathlib import Path

import pytest

from rocm_wheels.compile import units
from rocm_wheels.compile.triton import barriers, compiler
from rocm_wheels.errors import CompileFailed

IR = """define amdgpu_kernel void @attn_fwd(ptr addrspace(1) inreg readonly captures(none) %0, ptr addrspace(1) inreg \
writeonly captures(none) %1, i32 inreg %2, ptr addrspace(1) inreg readnone captures(none) %3) local_unnamed_addr #0 {
  fence syncscope("workgroup") release
  tail call void @llvm.amdgcn.s.barrier()
  fence syncscope("workgroup") acquire
  fence syncscope("agent") release
  ret void
}
!0 = !{i32 2, !"Debug Info Version", i32 3}
"""


def test_fences_of_a_work_group_name_lds_and_others_stay() -> None:
    lines = barriers.lds_only(IR, "kernel").splitlines()
    assert lines[1] == '  fence syncscope("workgroup") release, !mmra !1'
    assert lines[3] == '  fence syncscope("workgroup") acquire, !mmra !1'
    assert lines[4] == '  fence syncscope("agent") release'
    assert lines[-1] == '!1 = !{!"amdgpu-synchronize-as", !"local"}'


@pytest.mark.parametrize(
    ("ir", "why"),
    [
        (IR.replace("readonly ", ""), "kernel reads and writes %0, so its barriers must order global memory"),
        (IR.replace("writeonly ", ""), "kernel reads and writes %1"),
        (IR.replace("  ret void", "  %5 = inttoptr i64 %4 to ptr addrspace(1)\n  ret void"), "makes pointers"),
        (IR.replace("amdgpu_kernel ", ""), "kernel: the LLVM IR has no kernel"),
    ],
)
def test_a_kernel_without_the_proof_is_refused(ir: str, why: str) -> None:
    with pytest.raises(CompileFailed, match=why):
        barriers.lds_only(ir, "kernel")


@pytest.mark.parametrize(
    ("target", "name", "invalidation"),
    [
        ("gfx1030", "fwd-fp16-d64", None),
        ("gfx1100", "bwd-dq-bf16-d64", None),
        ("gfx1201", "decode-bf16-d64", None),
        # Its rows may be normalised in place.
        ("gfx1100", "norm-fwd-bf16-d4096", "buffer_gl0_inv"),
    ],
)
def test_barriers_of_compiled_kernels(target: str, name: str, invalidation: str | None, tmp_path: Path) -> None:
    (unit,) = units.find([target], only=name)
    with ProcessPoolExecutor(1, multiprocessing.get_context("spawn")) as pool:
        pool.submit(compiler.prepare, str(tmp_path)).result()
        assembly = pool.submit(compiler.translate, target, *unit.content).result()[2]
    assert "s_barrier" in assembly
    present = [word for word in ("buffer_gl0_inv", "buffer_gl1_inv", "global_inv") if word in assembly]
    assert present == ([] if invalidation is None else [invalidation])
