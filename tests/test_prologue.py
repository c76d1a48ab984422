"""gfx1250: each kernel begins with the sequence that its hardware needs."""

from __future__ import annotations

import re

import pytest
from flash_attn.kernels import targets
from flash_attn.kernels.variants import Variant

from amdgpu_simulator import gpu
from rocm_wheels.compile.check import prologue, stage
from rocm_wheels.matrix import versions

KERNEL = """{name}:
\ts_clause 0x1
\tglobal_load_b32 v1, v0, s[2:3]
\tglobal_load_b32 v2, v0, s[4:5]
\ts_endpgm
.Lfunc_end{number}:
\t.amdhsa_kernel {name}
\t\t.amdhsa_next_free_vgpr 3
\t\t.amdhsa_next_free_sgpr 60
\t.end_amdhsa_kernel
"""


def test_each_kernel_of_a_text_begins_with_it() -> None:
    text = KERNEL.format(name="first", number=0) + KERNEL.format(name="second", number=1)
    begun, report = stage.checked(text, "gfx1250", "two kernels")
    start = "".join(f"\t{code}\n" for code in prologue.SEQUENCE)
    assert begun == text.replace("\ts_clause", f"{start}\ts_clause")
    assert report.found == {prologue.RULE: 2}
    assert stage.checked(begun, "gfx1250", "two kernels") == (
        begun,
        stage.Report(pairs=0, found={}, added=0, unjudged=0),
    )


@pytest.mark.parametrize("target", ["gfx1201", "gfx12-generic"])
def test_other_targets_begin_as_they_were(target: str) -> None:
    text = KERNEL.format(name="first", number=0)
    assert prologue.begun(text, target) == (text, 0)


def test_a_compiled_kernel_begins_with_it() -> None:
    """It is assembled, and the first vector and memory instructions are the safe ones."""
    _, entry, text = gpu.compiled("gfx1250", Variant("combine", "bf16", 64, "plain"))
    code = re.findall(r"^\t([a-z]+_\w+.*?)\s*$", text[text.index(f"\n{entry['symbol']}:") :], re.MULTILINE)
    assert tuple(code[:3]) == prologue.SEQUENCE


def test_targets_that_nothing_executes_are_in_no_wheel() -> None:
    assert not {*targets.NOT_EXECUTED} & {*versions.load().targets}
    assert {*targets.NOT_EXECUTED} <= {*targets.TARGETS}
