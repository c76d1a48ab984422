"""The command that lists the instruction forms that tests have executed."""

from __future__ import annotations

from pathlib import Path

import pytest

from amdgpu_simulator import __main__ as command
from amdgpu_simulator.isa import assembly, forms, machine
from amdgpu_simulator.tests.test_isa import KERNEL, LOAD, STORE, run


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        ("v_add_f32_e64 v9, -v0, |s4| clamp", "v_add_f32 v,-v,|s| clamp"),
        ("v_add_f32_e32 v9, 0.5, v0", "v_add_f32 v,literal,v"),
        ("v_pk_add_f32 v[8:9], v[0:1], v[2:3] op_sel:[0,1]", "v_pk_add_f32 v2,v2,v2 op_sel:[0,1]"),
        ("global_load_dword v9, v[2:3], off offset:16 nt", "global_load_dword v,v2,off offset nt"),
        ("v_cndmask_b32_e32 v9, 1, v0, vcc", "v_cndmask_b32 v,literal,v,vcc"),
        ("v_mfma_f32_32x32x8_f16 a[0:15], v[4:5], v[4:5], a[0:15]", "v_mfma_f32_32x32x8_f16 a16,v2,v2,a16"),
        ("s_endpgm", "s_endpgm"),
    ],
)
def test_forms(code: str, expected: str) -> None:
    (instruction,) = assembly.parse_line(code)
    assert forms.form(instruction) == expected


def test_executed_forms_are_distinguished(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    executed, text = tmp_path / "forms", tmp_path / "kernel.s"
    monkeypatch.setenv(forms.VARIABLE, str(executed))
    monkeypatch.setattr(forms, "_executed", {})
    code = "v_mov_b32_e32 v9, 1\n s_branch .Lend\n v_not_b32_e32 v9, v9\n v_frob_b32 v9, v9\n.Lend:\n"
    text.write_text(KERNEL.format(target="gfx942", code="\t" + (LOAD + code + STORE).strip()), encoding="utf-8")
    run("", program=machine.Program(assembly.parse(text.read_text(encoding="utf-8"))))
    forms.write()
    command.main(["coverage", str(text), "--executed", str(executed)])
    *lines, total = capsys.readouterr().out.splitlines()
    states = {line.split()[0]: line.split()[1] for line in lines[1:]}
    assert states["v_mov_b32"] == states["global_store_dword"] == states["s_endpgm"] == "executed"
    assert states["v_not_b32"] == "never"
    assert states["v_frob_b32"] == "refused"
    assert total.startswith("1 kernels, ")
    with pytest.raises(SystemExit, match="neither an assembly text"):
        command.main(["coverage", str(tmp_path / "forms")])
    text.write_text(KERNEL.format(target="gfx942", code="\ts_branch 1f\n1:"), encoding="utf-8")
    with pytest.raises(SystemExit, match="s_branch 1f: the text has no label 1f"):
        command.main(["coverage", str(text)])
