"""The facts that the doctor reads from a machine."""

from __future__ import annotations

import grp
import json
import os
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flash_attn.core import store
from flash_attn.core.build_info import BuildInfo
from flash_attn.core.platform import PLATFORM, linux
from flash_attn.diagnosis import findings, survey
from made_up_machines import BUILD, HEALTHY, PROBE

_SOURCE = Path(__file__).resolve().parent.parent


def test_the_triton_requirement_of_torch_and_the_origin_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["filelock", 'pytorch-triton-rocm==3.1.0; platform_system == "Linux"']
    monkeypatch.setattr(survey.metadata, "requires", lambda _: needs)
    assert survey.torch_triton() == "pytorch-triton-rocm==3.1.0"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(survey, "PLATFORM", SimpleNamespace(is_windows=True))
        assert survey.torch_triton() == ""
        needs.append("triton-windows==3.5.1; sys_platform == 'win32' and extra == 'all'")
        assert survey.torch_triton() == "triton-windows==3.5.1"
    monkeypatch.setattr(survey.metadata, "requires", lambda _: None)
    assert survey.torch_triton() == ""
    for written, origin in (
        ('{"url": "file:///tmp/a.whl"}', "/tmp/a.whl"),
        ('{"url": "file:///tmp/my%20wheels/a.whl"}', "/tmp/my wheels/a.whl"),
        ('{"url": "https://x/a.whl"}', "https://x/a.whl"),
        ('{"url": "file:///src", "dir_info": {}}', ""),
        (None, ""),
    ):
        there = SimpleNamespace(read_text=lambda _, written=written: written)
        monkeypatch.setattr(survey.metadata, "distribution", lambda _, there=there: there)
        assert survey.origin() == origin


def test_missing_files_of_a_wheel_are_reported(tmp_path: Path) -> None:
    (tmp_path / "_kernels").mkdir()
    (tmp_path / "_kernels/gfx942.zip").write_bytes(b"no zip")
    missing, damaged, *files = survey.lacking(replace(BUILD, backend="ck"), tmp_path)
    assert missing.startswith("_kernels/gfx90a.zip ([Errno 2]")
    assert damaged == "_kernels/gfx942.zip (File is not a zip file)"
    assert files == ["_launcher", "_ck_planner.so"]
    assert list(survey.lacking(BuildInfo(), tmp_path)) == []
    for target in BUILD.targets:
        with zipfile.ZipFile(tmp_path / f"_kernels/{target}.zip", "w") as archive:
            archive.writestr("manifest.json", json.dumps({"format": store.FORMAT, "kernels": {}, "signatures": []}))
    (tmp_path / "_launcher.abi3.so").touch()
    assert list(survey.lacking(BUILD, tmp_path)) == []
    assert list(survey.lacking(replace(BUILD, backend="ck"), tmp_path)) == ["_ck_planner.so"]
    (tmp_path / "_ck_planner.so").touch()
    assert list(survey.lacking(replace(BUILD, backend="ck"), tmp_path)) == []
    with zipfile.ZipFile(tmp_path / "_kernels/gfx90a.zip", "w") as archive:
        archive.writestr("manifest.json", json.dumps({"format": store.FORMAT + 1, "kernels": {}}))
    (result,) = survey.lacking(BUILD, tmp_path)
    assert f"has format {store.FORMAT + 1}" in result


def test_access_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "kfd"
    assert survey.access(device) is None
    device.write_bytes(b"")
    device.chmod(0o641)
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) == (device, os.R_OK | os.W_OK))
    result = survey.access(device)
    assert result is not None
    assert (result.mode, result.allowed) == ("641", True)


def test_the_facts_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kfd, *render = (tmp_path / name for name in ("kfd", "renderD128", "renderD129"))
    for path in (kfd, *render, tmp_path / "card0"):
        path.touch()
    build = replace(BUILD, targets=("gfx0",))
    files = {"meminfo": "MemTotal: 8192 kB\nMemAvailable: 2048 kB\n", "version": "6.8.5\n"}
    files["lockup_timeout"] = "900000\n"
    for name, value in (("KFD", kfd), ("RENDER_NODES", str(tmp_path)), ("_read", lambda _: ""),
                        ("run_probe", lambda: ({"torch": 1}, "ended with signal 9")),
                        ("installed", lambda: "/env/flash_attn"), ("TRITONS", ("pytest", "no-such-one")),
                        ("PLUG_INS", {"pytest": "no-such-one"})):  # fmt: skip
        monkeypatch.setattr(survey, name, value)
    monkeypatch.setattr(linux, "_read", lambda path: files[path.name])
    monkeypatch.setattr(survey.build_info, "load", lambda: build)
    monkeypatch.setattr(os, "getgroups", lambda: [0])
    for name in ("PYTORCH_ROCM_ARCH", "LD_LIBRARY_PATH", "GITHUB_TOKEN"):
        monkeypatch.setenv(name, "x")
    facts = survey.survey("a log")
    assert (facts.build, facts.probe, facts.died, facts.log) == (build, {"torch": 1}, "ended with signal 9", "a log")
    assert [each.split()[0] for each in facts.lacking][:1] == ["_kernels/gfx0.zip"]
    assert [each.path for each in (facts.kfd, *facts.render) if each is not None] == [*map(str, (kfd, *render))]
    assert facts.user.endswith(f", groups {grp.getgrgid(0)[0]}")
    assert (facts.location, facts.installed) == (str(_SOURCE / "flash_attn"), "/env/flash_attn")
    assert sys.executable in facts.python
    assert facts.system
    assert facts.tritons == facts.plug_ins == {"pytest": pytest.__version__}
    assert (facts.memory_mib, facts.driver, facts.limit) == (2, "6.8.5", None)
    assert {"PYTORCH_ROCM_ARCH", "LD_LIBRARY_PATH"} <= facts.variables.keys()
    assert "GITHUB_TOKEN" not in facts.variables
    assert list(facts.variables) == sorted(facts.variables)


def test_the_firmware_of_each_gpu(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A processor, a GPU inside it, a card whose file the container hides, an MI200 without MES; see amdgpu_ucode.c."""
    nodes, drm = tmp_path / "nodes", tmp_path / "drm"
    versions = (("0", "-1", None), ("110501", "128", "0x00000083\n"), ("120001", "129", None), ("90010", "130", None))
    for number, (target, minor, version) in enumerate(versions):
        (nodes / str(number)).mkdir(parents=True)
        text = f"cpu_cores_count 0\ngfx_target_version {target}\ndrm_render_minor {minor}\n"
        (nodes / str(number) / "properties").write_text(text)
        (folder := drm / f"renderD{minor}" / "device" / "fw_version").mkdir(parents=True)
        if version:
            (folder / "mes_fw_version").write_text(version)
    monkeypatch.setattr(linux, "_NODES", nodes)
    monkeypatch.setattr(linux, "_DRM", drm)
    assert linux.Linux().mes_firmware() == {"gfx1151": 0x83}


def test_facts_that_a_machine_does_not_provide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(os, "getuid", lambda: 123456789)
    assert PLATFORM.user() == "123456789, in no further group"
    monkeypatch.setattr(linux, "_read", lambda _: "")
    assert (PLATFORM.available_mib(), PLATFORM.gpu_driver(), PLATFORM.libraries()) == (0, "", [])


def test_the_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    result = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(survey.metadata, "distribution", {"flash_attn": result}.__getitem__)
    assert survey.installed() is None  # an editable one
    (tmp_path / "flash_attn").mkdir()
    assert survey.installed() == str((tmp_path / "flash_attn").resolve())


def test_output_of_a_crashed_probe_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'print(\'{"torch": 1}\', flush=True); print("{", end="", flush=True); import os; os.kill(os.getpid(), 9)'
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert survey.run_probe() == ({"torch": 1}, "ended with signal 9 (SIGKILL)")
    text = """import os
os.write(1, b'Welcome\\n3\\n{2 users}\\n{"torch": 1}\\n')
os.write(2, b"a warning\\ncaf\\xe9 driver\\n")
os._exit(1)"""
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert survey.run_probe() == ({"torch": 1}, "ended with exit code 1: caf\ufffd driver")
    text = text.replace("_exit(1)", "_exit(0)")
    assert survey.run_probe() == ({"torch": 1}, "")
    text = "import time; print('{\"torch\": 1}', flush=True); time.sleep(60)"
    assert survey.run_probe(seconds=3) == ({"torch": 1}, "did not end within 3 s")


_STAND_IN = """\
import warnings
import torch
class Attention(torch.autograd.Function):
    @staticmethod
    def forward(context, q, k, v):
        return torch.empty_like(q)
    @staticmethod
    def backward(context, dout):
        return torch.empty_like(dout), torch.zeros_like(dout), torch.empty_like(dout)
def flash_attn_func(q, k, v, causal):
    return Attention.apply(q, k, v)
def backend_info():
    return {}
original = torch.nn.functional.scaled_dot_product_attention
def broken(q, k, v):
    done = original(q, k, v)
    if calls:  # as PyTorch's C++ warns
        warnings.warn("is still experimental. Enable it with TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1.")
    return done if calls.append(0) or len(calls) == 1 else torch.zeros_like(done)
calls = []
torch.nn.functional.scaled_dot_product_attention = broken
"""


def test_the_probe_sees_launches_that_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash_attn that writes no result but dk, and a torch whose attention gives zeros."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(_STAND_IN)
    (package / "core").mkdir()
    (package / "core/platform.py").write_text(
        "from types import SimpleNamespace\nPLATFORM = SimpleNamespace(libraries=list)\n"
    )
    (package / "core/build_info.py").write_text("load = None\n")
    (package / "diagnosis/selftest").mkdir(parents=True)
    (package / "diagnosis/selftest/machine.py").touch()
    (package / "attention").mkdir()
    (package / "attention/backends.py").write_text(
        "from types import SimpleNamespace\nselect = lambda q: SimpleNamespace(name='x')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    answers, died = survey.run_probe()
    assert not died
    assert answers["call"]["unwritten"] == ["out", "dq", "dv"]
    assert answers["attention"]["error"] == 1.0
    assert answers["attention"]["experimental"] is True
    keys = [
        finding.key
        for finding in findings.examine(
            replace(HEALTHY, probe={**PROBE, **answers, "torch": PROBE["torch"], "devices": PROBE["devices"]})
        )
    ]
    assert keys == ["nothing-launched", "torch-attention", "torch-experimental"]
