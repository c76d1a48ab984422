"""A kernel reserves the vector registers that its code names: the descriptor that LLVM writes for `waves_per_eu`."""

from __future__ import annotations

import pytest
from flash_attn.kernels.tuning import Config
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import gpu, measure
from rocm_wheels.compile import codeobject, sources
from rocm_wheels.compile.check import prologue, reserve, stage
from rocm_wheels.errors import CompileFailed

BEGIN = "".join(f"{code}\n\t" for code in prologue.SEQUENCE)
KERNEL = """\t.amdgcn_target "amdgcn-amd-amdhsa--{target}"
{name}:
{code}
\ts_endpgm
.Lfunc_end0:
\t.amdhsa_kernel {name}
\t\t.amdhsa_next_free_vgpr {reserved}
\t\t.amdhsa_next_free_sgpr 60
{accumulators}\t\t.amdhsa_system_vgpr_workitem_id {items}
\t.end_amdhsa_kernel
"""


def text(code: str, target: str, reserved: int, *, accumulators: int = 0, items: int = 0, name: str = "kernel") -> str:
    offset = f"\t\t.amdhsa_accum_offset {accumulators}\n" if accumulators else ""
    return KERNEL.format(
        name=name, target=target, code=f"\t{code}", reserved=reserved, accumulators=offset, items=items
    )


@pytest.mark.parametrize(
    ("target", "code", "reserved", "accumulators", "exact"),
    [
        ("gfx942", "v_mov_b32_e32 v144, v3", 257, 148, 145),
        ("gfx942", "v_accvgpr_write_b32 a9, v3", 400, 148, 158),
        ("gfx908", "v_accvgpr_write_b32 a9, v3", 100, 0, 10),
        ("gfx1201", "global_load_b128 v[4:7], v2, s[2:3]", 241, 0, 8),
        ("gfx1250", f"{BEGIN}v_mov_b32_e32 v64 /*v320*/, v3", 513, 0, 321),
        ("gfx1250", f"{BEGIN}v_mov_b32_e32 v64 /*v320*/, v3", 321, 0, 321),
        ("gfx1201", "s_nop 0", 16, 0, 1),
    ],
)
def test_the_descriptor_becomes_exact(target: str, code: str, reserved: int, accumulators: int, exact: int) -> None:
    assembly = text(code, target, reserved, accumulators=accumulators)
    rewritten, report = stage.checked(assembly, target, "a kernel")
    assert rewritten == assembly.replace(f"next_free_vgpr {reserved}", f"next_free_vgpr {exact}")
    assert report.found == ({} if reserved == exact else {reserve.RULE: 1})
    assert stage.checked(rewritten, target, "a kernel")[0] == rewritten


def test_work_item_numbers_have_registers() -> None:
    rewritten, _ = stage.checked(text("s_nop 0", "gfx1030", 64, items=2), "gfx1030", "a kernel")
    assert "next_free_vgpr 3\n" in rewritten


def test_each_kernel_of_a_text_has_its_own_number() -> None:
    both = text("v_mov_b32_e32 v9, v1", "gfx942", 200) + text("v_mov_b32_e32 v20, v1", "gfx942", 200, name="kernel2")
    rewritten, report = stage.checked(both, "gfx942", "two kernels")
    assert [line.split()[1] for line in rewritten.split("\n") if "next_free_vgpr" in line] == ["10", "21"]
    assert report.found == {reserve.RULE: 2}


@pytest.mark.parametrize("code", ["s_swappc_b64 s[30:31], s[0:1]", "v_movrels_b32_e32 v1, v2"])
def test_registers_that_the_text_does_not_show(code: str) -> None:
    with pytest.raises(CompileFailed, match=r"reserves 200 vector registers and names \d, .* compile it without"):
        stage.checked(text(f"s_mov_b32 m0, 0\n\t{code}", "gfx942", 200), "gfx942", "a kernel")


def test_a_kernel_scheduled_for_one_wave() -> None:
    """The descriptor in the code object has room for the waves that the registers of the code allow."""
    target, tile = "gfx950", Config(128, 32, 4, options=(("waves_per_eu", 2),))
    image, entry, assembly = gpu.compiled(target, Variant("fwd", "fp32", 32, "plain"), tile)
    used = entry["resources"]["vgprs"]
    granule = sources.module("kernels.targets").get(target).descriptor_granule
    assert entry["resources"]["reserved_vgprs"] == -(-used // granule) * granule < 168
    assert codeobject.read(image).reserved_vgprs == entry["resources"]["reserved_vgprs"]
    assert f"next_free_vgpr {used}\n" in assembly
    more = entry | {"resources": entry["resources"] | {"reserved_vgprs": 257}}
    assert measure.resident(target, more) < measure.resident(target, entry)
