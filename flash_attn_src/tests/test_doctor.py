"""python -m flash_attn.doctor: every trouble of its table on a made-up machine, and itself without torch."""

from __future__ import annotations

import grp
import json
import os
import re
import subprocess
import sys
import zipfile
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from flash_attn.backends import sources
from flash_attn.diagnosis import commands, doctor, findings, survey
from flash_attn.diagnosis.survey import Access, Facts
from flash_attn.diagnosis.troubles import TROUBLES
from flash_attn.runtime import environment, store
from flash_attn.runtime.build_info import BuildInfo
from flash_attn.runtime.platform import PLATFORM, linux

_SOURCE = Path(__file__).resolve().parent.parent
_INDEXES = {
    "2.5.1": {"6.1": "rocm6.1", "6.2": "rocm6.2"},
    "2.6.0": {"6.1": "rocm6.1", "6.2": "rocm6.2.4"},
    "2.14.0": {"7.2": "rocm7.2"},
}
_BUILD = BuildInfo(
    label="rocm62torch2.5triton", targets=("gfx90a", "gfx942"), torch="2.5", rocm="6.2", torch_indexes=_INDEXES
)
_UNIVERSAL = replace(
    _BUILD, label="rocm", torch="", rocm="", targets=("gfx942", "gfx1030"), repository="https://github.com/Owner/name"
)
_PIP_TORCH = "pip install torch=={0} --index-url https://download.pytorch.org/whl/{1}"
_KFD = Access(path="/dev/kfd", owner="root", group="render", mode="660", allowed=True)
_HIP = "{}/libamdhip64.so.6"
_CALL = {
    "device": "cuda",
    "backend": "flash_attn.backends.triton",
    "forward_ms": 1.0,
    "backward_ms": 2.0,
    "forward_error": 3e-3,
    "backward_error": 6e-3,
    "limit": 2.4e-2,
}
_PROBE: dict[str, Any] = {
    "torch": {"version": "2.5.1+rocm6.2", "hip": "6.2.41133-dd7f95766", "cuda": None},
    "devices": [{"name": "AMD Instinct MI300X", "target": "gfx942", "memory_mib": 196592}],
    "info": {"launcher": "/torch/lib/libamdhip64.so", "problems": []},
    "libraries": [_HIP.format("/torch/lib"), "/usr/lib/libcuda.so.1"],
    "call": _CALL,
}
HEALTHY = Facts(
    build=_BUILD,
    location="/env/flash_attn",
    installed="/env/flash_attn",
    kfd=_KFD,
    python="3.11.7 (/env/bin/python)",
    user="me, groups me",
    memory_mib=64000,
    tritons={"pytorch-triton-rocm": "3.1.0"},
    probe=_PROBE,
)


def probed(**answers: Any) -> Facts:
    """A healthy machine, but for some answers of the probe; None takes one away."""
    return replace(HEALTHY, probe={key: value for key, value in {**_PROBE, **answers}.items() if value is not None})


def torch(version: str, hip: str | None = None, cuda: str | None = None, **answers: Any) -> Facts:
    return probed(torch={"version": version, "hip": hip, "cuda": cuda}, **answers)


_DENIED = replace(_KFD, path="/dev/dri/renderD128", allowed=False)

# trouble, a machine that has it, and the text that the doctor must print
CASES: list[tuple[str, Facts, str]] = [
    ("torch-missing", replace(HEALTHY, probe={"torch_error": ""}), _PIP_TORCH.format("2.5.1+rocm6.2", "rocm6.2")),
    ("torch-broken", replace(HEALTHY, probe={"torch_error": "OSError: libamdhip64.so.6"}), "OSError: libamdhip64.so.6"),
    ("torch-cpu", torch("2.5.1+cpu", devices=[]), "torch 2.5.1+cpu is not"),
    ("torch-cuda", torch("2.5.1", cuda="12.4", devices=[]), "(CUDA 12.4) is not"),
    ("torch-minor", torch("2.6.0+rocm6.2.4", "6.2.4"), "torch 2.6.0+rocm6.2.4 is installed"),
    ("rocm-mismatch", torch("2.5.1+rocm6.1", "6.1.40091"), "built for ROCm 6.1"),
    ("wheel-incomplete", replace(HEALTHY, lacking=("_launcher",)), "lacks _launcher"),
    (
        "wheel-incomplete",
        probed(info={"problems": ["the planner of the CK backend does not load (x): reinstall the wheel"]}),
        "does not load (x)",
    ),
    (
        "wheel-incomplete",
        replace(HEALTHY, log="KernelError: the launcher does not load (no _launcher): reinstall the wheel"),
        "no _launcher",
    ),
    ("shadowed", replace(HEALTHY, location="/home/me/flash_attn"), "/home/me/flash_attn is imported"),
    ("no-kfd", replace(probed(devices=[]), kfd=None), "there is no /dev/kfd"),
    ("no-kfd-in-container", replace(probed(devices=[]), kfd=None, container=True), "--device=/dev/kfd"),
    ("gpu-hidden", replace(probed(devices=[]), variables={"HIP_VISIBLE_DEVICES": "7"}), "HIP_VISIBLE_DEVICES=7 is set"),
    (
        "gpu-hidden",
        replace(probed(devices=[]), variables={"ROCR_VISIBLE_DEVICES": "", "HIP_VISIBLE_DEVICES": ""}),
        "`unset ROCR_VISIBLE_DEVICES HIP_VISIBLE_DEVICES`",
    ),
    ("no-device", probed(devices=[]), "dmesg"),
    ("no-device-of-windows", replace(probed(devices=[]), kfd=None, has_kfd=False), "wsl --update"),
    (
        "gpu-hidden",
        replace(probed(devices=[]), kfd=None, has_kfd=False, variables={"HIP_VISIBLE_DEVICES": "7"}),
        "torch sees no GPU, and HIP_VISIBLE_DEVICES=7 is set",
    ),
    ("no-permission", replace(probed(devices=[]), kfd=replace(_KFD, allowed=False)), "/dev/kfd (root:render 660)"),
    ("no-permission", replace(probed(devices=[]), render=(_DENIED,)), "D128"),
    (
        "no-permission",
        replace(probed(devices=[]), kfd=replace(_KFD, group="993", allowed=False), render=(_DENIED,)),
        "usermod -aG 993,render $USER",
    ),
    (
        "no-permission-in-container",
        replace(probed(devices=[]), kfd=replace(_KFD, allowed=False), container=True),
        "--group-add",
    ),
    ("no-driver", probed(info={"problems": ["no GPU driver: libamdhip64 is not there"]}), "libamdhip64 is not there"),
    (
        "two-hip-runtimes",
        probed(libraries=[_HIP.format("/opt/my rocm/lib"), _HIP.format("/torch/lib")]),
        "/opt/my rocm/lib/libamdhip64.so.6 and /torch/lib/libamdhip64.so.6",
    ),
    ("two-tritons", replace(HEALTHY, tritons={"triton": "3.1.0", "triton-rocm": "3.6.0"}), "triton-rocm 3.6.0"),
    (
        "target-missing",
        probed(devices=[{"name": "Radeon", "target": "gfx1100", "memory_mib": 1}]),
        "PYTORCH_ROCM_ARCH=gfx1100 ./build_rocm.sh 2.8.3`",
    ),
    (
        "target-of-a-relative",
        replace(probed(devices=[{"name": "RX 6700", "target": "gfx1031", "memory_mib": 1}]), build=_UNIVERSAL),
        "HSA_OVERRIDE_GFX_VERSION=10.3.0",
    ),
    (
        "target-missing",
        replace(probed(devices=[{"name": "Vega", "target": "gfx900", "memory_mib": 1}]), build=_UNIVERSAL),
        "git clone https://github.com/Owner/name && cd name && PYTORCH_ROCM_ARCH=gfx900 ./build_rocm.sh 2.8.3",
    ),
    (
        "triton-not-selected",
        replace(HEALTHY, variables={environment.TRITON_ENABLE: "FALSE"}),
        "asks for Composable Kernel",
    ),
    (
        "triton-not-selected",
        replace(HEALTHY, variables={environment.TRITON_ENABLE: "triton"}),
        "neither TRUE nor FALSE",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.KERNEL_SOURCE: "cuda"}),
        "SOURCE=cuda is none of asm, ck, triton",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.KERNEL_SOURCE: "asm"}),
        "KERNEL_SOURCE=asm asks for kernels that this",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.TRITON_AUTOTUNE: "maybe"}),
        "AUTOTUNE=maybe is neither TRUE nor FALSE",
    ),
    (
        "variable",
        replace(HEALTHY, variables={environment.MAX_LAUNCH_SECONDS: "long"}),
        "SECONDS=long is no number of seconds",
    ),
    (
        "variable",
        replace(HEALTHY, variables={"FLASH_ATTN_TRITON_AMD_ENABLE": "TRUE"}),
        "FLASH_ATTN_TRITON_AMD_ENABLE=TRUE has no effect: the variable is FLASH_ATTENTION_TRITON_AMD_ENABLE",
    ),
    (
        "variable",
        replace(HEALTHY, variables={"FLASH_ATTENTION_TRITON_AMD_ENBALE": "1"}),
        "FLASH_ATTENTION_TRITON_AMD_ENBALE=1 has no effect",
    ),
    ("call-failed", probed(call={**_CALL, "backward_error": float("nan")}), "the backward by flash_attn.backends"),
    ("call-failed", probed(call=None, error="RuntimeError: no"), "RuntimeError: no"),
    (
        "device-package-missing",
        replace(
            probed(
                call=None,
                torch={"version": "2.15.0+rocm10.0", "hip": "10.0.60500", "cuda": None},
                error="AcceleratorError: HIP error: device kernel image is invalid (hipErrorInvalidImage)",
            ),
            build=replace(_BUILD, torch="", rocm=""),
        ),
        "pip install torch[device-gfx942]==2.15.0+rocm10.0 --index-url https://download.pytorch.org/whl/rocm10.0",
    ),
    (
        "device-package-missing",
        replace(
            probed(
                call=None,
                torch={"version": "2.12.0+rocm7.14.0", "hip": "7.14.60850", "cuda": None},
                error="AcceleratorError: CUDA error: device kernel image is invalid",
            ),
            build=replace(_BUILD, torch="", rocm=""),
        ),
        "pip install torch[device-gfx942]==2.12.0+rocm7.14.0 --index-url",
    ),
    (
        "device-package-empty",
        replace(
            probed(
                call=None,
                torch={"version": "2.12.0+rocm7.14.0", "hip": "7.14.60850", "cuda": None},
                devices=[{"name": "MI250X", "target": "gfx90a", "memory_mib": 65520}],
                error="AcceleratorError: CUDA error: device kernel image is invalid",
            ),
            build=replace(_BUILD, torch="", rocm=""),
        ),
        "-name 'torch_gfx90a:xnack*.kpack' -delete",
    ),
    # torch's own kernel ran: the image that is invalid is one of this wheel's
    ("call-failed", probed(call=None, torch_kernel=16.0, error="DriverError: hipErrorInvalidImage"), "InvalidImage"),
    (
        "call-failed",
        replace(
            torch("2.12.0+rocm10.0", "10.0.1", call=None, torch_kernel=16.0, error="DriverError: hipErrorInvalidImage"),
            build=replace(_BUILD, torch="", rocm=""),
        ),
        "InvalidImage",
    ),
    (
        "nothing-launched",
        probed(call={**_CALL, "forward_error": float("nan"), "unwritten": ["out", "dq"]}),
        "flash_attn.backends.triton left out, dq unwritten, and the driver reported no error",
    ),
    (
        "torch-attention",
        probed(attention={"failure": "AcceleratorError: CUDA error: invalid argument"}),
        "it fails: AcceleratorError: CUDA error: invalid argument",
    ),
    (
        "torch-attention",
        replace(
            torch(
                "2.12.0+rocm7.14.0",
                "7.14.60850",
                attention={"error": float("nan"), "limit": 2.4e-2},
                devices=[{"name": "RX 7900 XTX", "target": "gfx1100", "memory_mib": 24560}],
            ),
            build=replace(_UNIVERSAL, targets=("gfx1100",)),
        ),
        "pip install amd-torch-device-gfx11==2.12.0+rocm7.14.0 --index-url https://repo.amd.com/rocm/whl-multi-arch/",
    ),
    ("torch-attention", probed(attention={"error": 1.0, "limit": 2.4e-2}), "it is wrong: error 1.0e+00"),
    ("call-failed", replace(probed(call=None), died="ended with signal 11"), "signal 11"),
    ("build-memory", replace(HEALTHY, variables={"MAX_JOBS": "64"}), "64000 MiB are free"),
    (
        "build-memory",
        replace(HEALTHY, log="error: a compiler process ended before it was done, most likely for want of memory"),
        "want of memory",
    ),
    ("wheel-module", replace(HEALTHY, log="error: invalid command 'bdist_wheel'"), "invalid command 'bdist_wheel'"),
]
LOGS = {
    "torch-missing": "ModuleNotFoundError: No module named 'torch'",
    "torch-minor": "ImportError: x.so: undefined symbol: _ZN3c105ErrorC2ENS_14SourceLocationE",
    "wheel-incomplete": "ModuleNotFoundError: No module named 'flash_attn._launcher'",
    "no-permission": "Unable to open /dev/kfd read-write: Permission denied",
    "target-missing": "RuntimeError: HIP error: invalid device function",
    "triton-not-selected": "ModuleNotFoundError: No module named 'flash_attn_2_cuda'",
    "build-memory": "c++: fatal error: Killed signal terminated program cc1plus",
    "wheel-module": "ModuleNotFoundError: No module named 'wheel'",
}


@pytest.mark.parametrize(("key", "facts", "said"), CASES, ids=[f"{key}-{i}" for i, (key, _, _) in enumerate(CASES)])
def test_the_doctor_finds(key: str, facts: Facts, said: str) -> None:
    found = findings.examine(facts)
    assert [finding.key for finding in found] == [key]
    assert said in f"{found[0].what} {found[0].remedy}".replace('"', "")
    assert found[0].remedy
    assert "{" not in found[0].remedy


_FOREIGN = re.compile(r"\b(sudo|export|unset|modprobe|dmesg|docker|LD_\w+)\b|/dev/|/proc/|&&|(?<!-m )\bpip install")


@pytest.mark.parametrize("executable", [r"C:\ComfyUI\python_embeded\python.exe", r"D:\My Programs\python.exe"])
def test_windows_gets_no_command_of_linux(executable: str) -> None:
    """In no trouble: each either has other words there or does not exist there."""
    seen = set()
    for _, facts, _ in CASES:
        for finding in findings.examine(replace(facts, windows=True, executable=executable)):
            seen.add(finding.key)
            remedy = re.sub(r"on Linux or in WSL: `[^`]*`", "", finding.remedy)  # the build of a wheel
            assert not _FOREIGN.search(remedy), finding
            assert "{" not in remedy, finding
    none_there = {trouble.key for trouble in TROUBLES if trouble.windows is None}
    assert seen == {trouble.key for trouble in TROUBLES} - none_there - {"two-hip-runtimes"}
    assert none_there >= {"no-kfd", "no-permission"}


def test_commands_of_windows() -> None:
    machine = replace(
        HEALTHY,
        windows=True,
        executable=r"C:\ComfyUI\python_embeded\python.exe",
        build=_UNIVERSAL,
        probe={"torch_error": ""},
    )
    known = commands.commands(machine)
    pip = r"C:\ComfyUI\python_embeded\python.exe -m pip"
    index = "--index-url https://repo.amd.com/rocm/whl-multi-arch/"
    assert known["torch"] == f'{pip} install "torch[device-all]" "torchvision[device-all]" torchaudio {index}'
    card = [{"name": "RX 7800 XT", "target": "gfx1101", "memory_mib": 16368}]
    known = commands.commands(replace(machine, probe={**_PROBE, "devices": card}))
    assert known["torch"] == (
        f"{pip} uninstall -y torch torchvision torchaudio`, then "
        f'`{pip} install "torch[device-gfx1101]" "torchvision[device-gfx1101]" torchaudio {index}'
    )
    assert known["unset"] == "`Remove-Item Env:HIP_VISIBLE_DEVICES` (PowerShell) or `set HIP_VISIBLE_DEVICES=` (cmd)"
    assert known["max_jobs"] == '`$env:MAX_JOBS = "45"` (PowerShell) or `set MAX_JOBS=45` (cmd)'
    assert commands.commands(replace(machine, executable=r"C:\A b\python.exe"))["python"] == r'& "C:\A b\python.exe"'
    named = replace(machine, build=replace(_UNIVERSAL, repository=""))
    assert commands.commands(named)["reinstall"].endswith(" flash_attn-2.8.3+rocm-cp310-abi3-win_amd64.whl")
    assert commands.amd_index("2.15.0+rocm10.0.0") == "https://stable.repo.amd.com/rocm/whl-next/"
    assert commands.amd_index("2.12.0+rocm7.14.0") == commands.amd_index("2.9.0+rocmsdk20251116") == commands.AMD_INDEX


def test_two_runtimes_are_no_trouble_on_windows_where_torch_names_one() -> None:
    both = probed(libraries=[r"C:\Windows\System32\amdhip64_7.dll", r"C:\torch\amdhip64_7.dll"])
    there = replace(both, windows=True)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(findings, "PLATFORM", SimpleNamespace(hip_library="amdhip64"))
        assert findings.examine(there) == []
        unbound = replace(there, probe={**there.probe, "info": {"launcher": None, "problems": []}})
        (finding,) = findings.examine(unbound)
    assert finding.key == "two-hip-runtimes"
    assert not _FOREIGN.search(finding.remedy)


def test_no_driver_is_missed_where_torch_is_not_for_rocm() -> None:
    info = {"problems": ["no GPU driver: libamdhip64 is not there"]}
    for facts in (torch("2.5.1", cuda="12.4", devices=[], info=info), torch("2.5.1+cpu", devices=[], info=info)):
        assert len(found := findings.examine(facts)) == 1
        assert found[0].key.startswith("torch-")


@pytest.mark.parametrize(
    ("torch", "rocm", "line"),
    [
        ("", "", _PIP_TORCH.format("2.14.0+rocm7.2", "rocm7.2")),
        ("", "6.2.4-116", _PIP_TORCH.format("2.6.0+rocm6.2.4", "rocm6.2.4")),
        ("", "5.7.1", _PIP_TORCH.format("2.14.0+rocm7.2", "rocm7.2")),
        ("2.6.0+cpu", "", _PIP_TORCH.format("2.6.0+rocm6.2.4", "rocm6.2.4")),
        ("2.5.1+cu124", "6.1.2", _PIP_TORCH.format("2.5.1+rocm6.1", "rocm6.1")),
        ("2.99.0", "6.2", _PIP_TORCH.format("2.6.0+rocm6.2.4", "rocm6.2.4")),
    ],
)
def test_the_line_that_installs_torch_for_a_wheel_of_every_torch(torch: str, rocm: str, line: str) -> None:
    assert commands.install_torch(_UNIVERSAL, torch=torch, rocm=rocm).replace('"', "") == line


def test_the_line_that_installs_the_wheel_again() -> None:
    def line(facts: Facts) -> str:
        return commands.commands(facts)["reinstall"].removeprefix("pip install --force-reinstall --no-deps ")

    cell = replace(HEALTHY, build=replace(_BUILD, repository="https://github.com/Owner/name"))
    address = "https://owner.github.io/name"
    assert line(HEALTHY) == "flash_attn-2.8.3+rocm62torch2.5triton-*.whl"
    assert line(replace(HEALTHY, origin="/tmp/my wheels/f.whl")) == "'/tmp/my wheels/f.whl'"
    assert line(cell) == (
        f'"flash_attn==2.8.3+rocm62torch2.5triton" --extra-index-url {address}/rocm6.2/torch2.5/simple/'
    )
    assert line(replace(HEALTHY, build=_UNIVERSAL)) == (f'"flash_attn==2.8.3+rocm" --extra-index-url {address}/simple/')
    assert commands.site("https://git.example.org/owner/name") == ""


def test_the_command_that_leaves_one_triton_installed() -> None:
    both = {"triton": "3.1.0", "pytorch-triton-rocm": "3.1.0"}
    told = commands.commands(replace(HEALTHY, tritons=both, torch_triton="pytorch-triton-rocm==3.1.0"))["triton"]
    assert told.replace('"', "") == (
        "pip uninstall -y triton pytorch-triton-rocm && "
        "pip install pytorch-triton-rocm==3.1.0 --index-url https://download.pytorch.org/whl/rocm6.2"
    )
    told = commands.commands(replace(HEALTHY, tritons=both))["triton"]
    assert told.replace('"', "").endswith(f"&& {_PIP_TORCH.format('2.5.1+rocm6.2', 'rocm6.2')} --force-reinstall")


def test_the_triton_requirement_of_torch_and_the_origin_of_the_wheel(monkeypatch: pytest.MonkeyPatch) -> None:
    needs = ["filelock", 'pytorch-triton-rocm==3.1.0; platform_system == "Linux"']
    monkeypatch.setattr(survey.metadata, "requires", lambda _: needs)
    assert survey.torch_triton() == "pytorch-triton-rocm==3.1.0"
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


def test_every_trouble_has_a_case() -> None:
    assert {key for key, _, _ in CASES} == {trouble.key for trouble in TROUBLES}
    assert set(LOGS) == {trouble.key for trouble in TROUBLES if trouble.log}


def test_a_healthy_machine_has_nothing_wrong() -> None:
    assert findings.examine(HEALTHY) == []
    page = doctor.report(HEALTHY)
    for part in (
        "2.8.3+rocm62torch2.5triton",
        "MI300X, gfx942",
        "HIP 6.2.41133",
        "root:render 660, allowed",
        "6.0e-03",
    ):
        assert part in page
    # Another GPU may be another user's.
    assert findings.examine(replace(HEALTHY, render=(*HEALTHY.render, _DENIED))) == []
    # A source tree on a machine without a GPU is no fault.
    plain = {"torch": {"version": "2.13.0+cpu", "hip": None, "cuda": None}, "devices": [], "call": _CALL}
    assert findings.examine(Facts(probe=plain)) == []
    assert "2.8.3, a source tree in" in doctor.report(Facts(probe=plain))


def test_a_package_compiled_by_pip_for_amd_gpus_needs_torch_for_rocm() -> None:
    built = BuildInfo(targets=("gfx942",), python="3.11", compiler="triton 3.7.1")
    driver = {"launcher": None, "problems": ["no GPU driver: no CUDA driver; install the NVIDIA driver"]}
    facts = replace(torch("2.5.1+cu124", cuda="12.4", devices=[], info=driver), build=built)
    (finding,) = findings.examine(facts)
    assert finding.key == "torch-cuda"
    assert finding.what == "this wheel is for ROCm, but torch 2.5.1+cu124 (CUDA 12.4) is not"
    assert "2.8.3, built by pip in" in doctor.report(facts)
    assert not BuildInfo(targets=("gfx942", "sm_90")).for_rocm
    # Built without kernels it names no GPU. The machine has an AMD GPU, whose torch is the one for ROCm.
    indexes = {"2.9.1": {"6.4": "rocm6.4"}}
    bare = replace(facts, build=BuildInfo(python="3.11", torch_indexes=indexes), kfd=_KFD)
    (finding,) = findings.examine(replace(bare, probe={**bare.probe, "info": {"problems": []}}))
    assert (finding.key, finding.what) == (
        "torch-cuda",
        "this wheel is for ROCm, but torch 2.5.1+cu124 (CUDA 12.4) is not",
    )
    line = 'pip install "torch==2.9.1+rocm6.4" --index-url https://download.pytorch.org/whl/rocm6.4'
    assert line in finding.remedy
    assert findings.examine(replace(bare, kfd=None, probe={**bare.probe, "info": {"problems": []}})) == []


@pytest.mark.parametrize("key", LOGS)
def test_it_reads_a_log(key: str) -> None:
    log = f"[1/9] compiling\n{LOGS[key]}\nninja: build stopped\n"
    assert [finding.key for finding in findings.examine(replace(HEALTHY, log=log))] == [key]
    assert findings.examine(replace(HEALTHY, log="[1/9] compiling\nSuccessfully built flash_attn\n")) == []


def test_missing_files_of_a_wheel_are_reported(tmp_path: Path) -> None:
    (tmp_path / "_kernels").mkdir()
    (tmp_path / "_kernels/gfx942.zip").write_bytes(b"no zip")
    missing, damaged, *files = survey.lacking(replace(_BUILD, backend="ck"), tmp_path)
    assert missing.startswith("_kernels/gfx90a.zip ([Errno 2]")
    assert damaged == "_kernels/gfx942.zip (File is not a zip file)"
    assert files == ["_launcher", "_ck_planner.so"]
    assert list(survey.lacking(BuildInfo(), tmp_path)) == []
    for target in _BUILD.targets:
        with zipfile.ZipFile(tmp_path / f"_kernels/{target}.zip", "w") as archive:
            archive.writestr("manifest.json", json.dumps({"format": store.FORMAT, "kernels": {}}))
    (tmp_path / "_launcher.abi3.so").touch()
    assert list(survey.lacking(_BUILD, tmp_path)) == []
    assert list(survey.lacking(replace(_BUILD, backend="ck"), tmp_path)) == ["_ck_planner.so"]
    (tmp_path / "_ck_planner.so").touch()
    assert list(survey.lacking(replace(_BUILD, backend="ck"), tmp_path)) == []
    with zipfile.ZipFile(tmp_path / "_kernels/gfx90a.zip", "w") as archive:
        archive.writestr("manifest.json", json.dumps({"format": store.FORMAT + 1, "kernels": {}}))
    (found,) = survey.lacking(_BUILD, tmp_path)
    assert f"has format {store.FORMAT + 1}" in found


def test_access_of_a_device(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    device = tmp_path / "kfd"
    assert survey.access(device) is None
    device.write_bytes(b"")
    device.chmod(0o641)
    monkeypatch.setattr(os, "access", lambda path, mode: (path, mode) == (device, os.R_OK | os.W_OK))
    found = survey.access(device)
    assert found is not None
    assert (found.mode, found.allowed) == ("641", True)


def test_the_facts_of_a_machine(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kfd, *render = (tmp_path / name for name in ("kfd", "renderD128", "renderD129"))
    for path in (kfd, *render, tmp_path / "card0"):
        path.touch()
    build = replace(_BUILD, targets=("gfx0",))
    files = {"meminfo": "MemTotal: 8192 kB\nMemAvailable: 2048 kB\n", "version": "6.8.5\n"}
    for name, value in (("KFD", kfd), ("RENDER_NODES", str(tmp_path)), ("_read", lambda _: ""),
                        ("run_probe", lambda: ({"torch": 1}, "ended with signal 9")),
                        ("installed", lambda: "/env/flash_attn"), ("TRITONS", ("pytest", "no-such-one"))):  # fmt: skip
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
    assert facts.tritons == {"pytest": pytest.__version__}
    assert (facts.memory_mib, facts.driver) == (2, "6.8.5")
    assert {"PYTORCH_ROCM_ARCH", "LD_LIBRARY_PATH"} <= facts.variables.keys()
    assert "GITHUB_TOKEN" not in facts.variables
    assert list(facts.variables) == sorted(facts.variables)


def test_facts_that_a_machine_does_not_provide(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "getgroups", list)
    monkeypatch.setattr(os, "getuid", lambda: 123456789)
    assert PLATFORM.user() == "123456789, in no further group"
    monkeypatch.setattr(linux, "_read", lambda _: "")
    assert (PLATFORM.available_mib(), PLATFORM.gpu_driver(), PLATFORM.libraries()) == (0, "", [])


def test_the_installed_wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    found = SimpleNamespace(locate_file=tmp_path.joinpath)
    monkeypatch.setattr(survey.metadata, "distribution", {"flash_attn": found}.__getitem__)
    assert survey.installed() is None  # an editable one
    (tmp_path / "flash_attn").mkdir()
    assert survey.installed() == str((tmp_path / "flash_attn").resolve())


def test_output_of_a_crashed_probe_is_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    text = 'print(\'{"torch": 1}\', flush=True); print("{", end="", flush=True); import os; os.kill(os.getpid(), 9)'
    monkeypatch.setattr(Path, "read_text", lambda *_, **__: text)
    assert survey.run_probe() == ({"torch": 1}, "ended with signal 9")
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
attention = torch.nn.functional.scaled_dot_product_attention
def broken(q, k, v):
    done = attention(q, k, v)
    return done if calls.append(0) or len(calls) == 1 else torch.zeros_like(done)
calls = []
torch.nn.functional.scaled_dot_product_attention = broken
"""


def test_the_probe_sees_launches_that_do_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A flash_attn that writes no result but dk, and a torch whose attention gives zeros."""
    package = tmp_path / "flash_attn"
    package.mkdir()
    (package / "__init__.py").write_text(_STAND_IN)
    (package / "runtime").mkdir()
    (package / "runtime/platform.py").write_text(
        "from types import SimpleNamespace\nPLATFORM = SimpleNamespace(libraries=list)\n"
    )
    (package / "backends.py").write_text(
        "from types import SimpleNamespace\nselect = lambda q: SimpleNamespace(name='x')\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    monkeypatch.setenv("HIP_VISIBLE_DEVICES", "-1")
    answers, died = survey.run_probe()
    assert not died
    assert answers["call"]["unwritten"] == ["out", "dq", "dv"]
    assert answers["attention"]["error"] == 1.0
    keys = [
        finding.key
        for finding in findings.examine(
            replace(HEALTHY, probe={**_PROBE, **answers, "torch": _PROBE["torch"], "devices": _PROBE["devices"]})
        )
    ]
    assert keys == ["nothing-launched", "torch-attention"]


def test_the_doctor_knows_all_variables_that_are_read() -> None:
    """By name: the doctor calls a variable unknown that nothing reads."""
    assert sources.VARIABLE == environment.KERNEL_SOURCE == "FLASH_ATTENTION_KERNEL_SOURCE"
    assert environment.TRITON_ENABLE == "FLASH_ATTENTION_TRITON_AMD_ENABLE"
    assert environment.TRITON_AUTOTUNE == "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"


def test_who_reads_its_first_lines_sees_no_traceback() -> None:
    text = "from flash_attn.diagnosis import doctor, survey; survey.run_probe = lambda: ({}, ''); doctor.main([])"
    reader, writer = os.pipe()
    os.close(reader)
    done = subprocess.run(
        [sys.executable, "-c", text], stdout=writer, stderr=subprocess.PIPE, cwd=_SOURCE, text=True, check=False
    )
    os.close(writer)
    assert (done.returncode, done.stderr) == (0, "looking; the first import of torch may take a while\n")


def test_doctor_and_pipeline_agree_on_memory_per_compiler() -> None:
    versions = pytest.importorskip("rocm_wheels.matrix.versions")
    assert max(each.job_memory_mib for each in versions.load().backends.values()) == commands.JOB_MIB


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A directory with the files of an installed wheel."""
    directory = tmp_path_factory.mktemp("wheel")
    labelled = {"FLASH_ATTN_LOCAL_VERSION": "rocm62torch2.5triton", "FLASH_ATTN_TORCH": "2.5", "FLASH_ATTN_ROCM": "6.2"}
    subprocess.run(
        [
            sys.executable,
            "-m",
            "build",
            "--wheel",
            "--no-isolation",
            "--skip-dependency-check",
            "--outdir",
            directory,
            _SOURCE,
        ],
        env={**os.environ, **labelled, "FLASH_ATTENTION_SKIP_CUDA_BUILD": "TRUE"},
        check=True,
        capture_output=True,
    )
    (built,) = directory.glob("*.whl")
    with zipfile.ZipFile(built) as archive:
        archive.extractall(directory / "site")
    return directory / "site"


def run(python: Path, where: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    variables = {key: value for key, value in os.environ.items() if not key.startswith(("FLASH_ATT", "PYTHON"))}
    return subprocess.run(
        [python, *arguments],
        env={**variables, "PYTHONPATH": str(where), "OMP_NUM_THREADS": "1"},
        cwd="/",
        capture_output=True,
        text=True,
        check=False,
    )


def test_it_runs_without_torch(wheel: Path, tmp_path: Path) -> None:
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "env"], check=True)
    python = tmp_path / "env/bin/python"
    done = run(python, wheel, "-m", "flash_attn.doctor")
    assert done.returncode == 1, done.stderr
    assert "No torch: torch is not installed" in done.stdout
    assert 'pip install "torch==2.5.1+rocm6.2" --index-url https://download.pytorch.org/whl/rocm6.2`' in done.stdout
    assert "2.8.3+rocm62torch2.5triton" in done.stdout
    done = run(python, wheel, "-c", "import flash_attn")
    assert "ImportError: flash_attn 2.8.3 needs torch 2.5 for ROCm 6.2" in done.stderr
    assert "`python -m flash_attn.doctor` tells how" in done.stderr


def test_it_runs_with_another_torch(wheel: Path, tmp_path: Path) -> None:
    log = tmp_path / "build.log"
    log.write_bytes(b"caf\xe9: no such locale\nninja: fatal: Killed\n")
    done = run(Path(sys.executable), wheel, "-m", "flash_attn.doctor", "--json", "--log", str(log))
    assert done.returncode == 1, done.stderr
    found = json.loads(done.stdout)
    keys = [finding["key"] for finding in found["findings"]]
    assert keys[0] in ("torch-cpu", "torch-cuda")
    assert {"torch-minor", "build-memory"} < set(keys)
    assert found["location"] == str(wheel / "flash_attn")
    assert found["probe"]["call"]["forward_error"] <= found["probe"]["call"]["limit"]
    assert found["probe"]["call"]["unwritten"] == []
    assert found["probe"]["attention"]["error"] <= found["probe"]["attention"]["limit"]
    done = run(Path(sys.executable), wheel, "-m", "flash_attn.doctor", "--log", str(tmp_path / "none"))
    assert done.returncode == 2
    assert "No such file" in done.stderr


@pytest.mark.skipif(not (_SOURCE.parent / "docs").is_dir(), reason="the page is not in the sdist")
def test_the_page_is_the_table() -> None:
    script = _SOURCE.parent / "docs/generate_troubleshooting.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


def test_a_character_that_the_console_lacks_is_escaped() -> None:
    text = "from flash_attn.diagnosis import doctor, survey; survey.run_probe = lambda: ({}, ''); doctor.main([])"
    environment = {**os.environ, "PYTHONIOENCODING": "ascii", "FLASH_ATTENTION_PLACE": "J\xf6rg"}
    done = subprocess.run([sys.executable, "-c", text], cwd=_SOURCE, env=environment, capture_output=True, check=False)
    assert b"FLASH_ATTENTION_PLACE=J\\xf6rg" in done.stdout
    assert b"Traceback" not in done.stderr
