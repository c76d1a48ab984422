"""What the doctor says of made-up machines: every trouble of its table, and the commands."""

from __future__ import annotations

import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import pytest
from flash_attn.attention.backends import sources
from flash_attn.core import environment
from flash_attn.core.build_info import BuildInfo
from flash_attn.core.platform.base import LaunchLimit
from flash_attn.diagnosis import commands, doctor, findings, survey
from flash_attn.diagnosis.survey import Facts
from flash_attn.diagnosis.troubles import TROUBLES
from made_up_machines import (
    BUILD,
    CALL,
    CASES,
    DENIED,
    HEALTHY,
    KFD,
    LOGS,
    PIP_TORCH,
    PROBE,
    TORCH,
    UNIVERSAL,
    common_pc,
    probed,
    torch,
)  # fmt: skip

_SOURCE = Path(__file__).resolve().parent.parent


@pytest.mark.parametrize(("key", "facts", "said"), CASES, ids=[f"{key}-{i}" for i, (key, _, _) in enumerate(CASES)])
def test_the_doctor_finds(key: str, facts: Facts, said: str) -> None:
    result = findings.examine(facts)
    assert [finding.key for finding in result] == [key]
    assert said in f"{result[0].what} {result[0].remedy}".replace('"', "")
    assert result[0].remedy
    assert "{" not in result[0].remedy


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
        build=UNIVERSAL,
        probe={"torch_error": ""},
    )
    known = commands.commands(machine)
    pip = r"C:\ComfyUI\python_embeded\python.exe -m pip"
    index = "--index-url https://repo.amd.com/rocm/whl-multi-arch/"
    assert known["torch"] == f'{pip} install "torch[device-all]" "torchvision[device-all]" torchaudio {index}'
    card = [{"name": "RX 7800 XT", "target": "gfx1101", "memory_mib": 16368}]
    known = commands.commands(replace(machine, probe={**PROBE, "devices": card}))
    assert known["torch"] == (
        f"{pip} uninstall -y torch torchvision torchaudio`, then "
        f'`{pip} install "torch[device-gfx1101]" "torchvision[device-gfx1101]" torchaudio {index}'
    )
    assert known["unset"] == "`Remove-Item Env:HIP_VISIBLE_DEVICES` (PowerShell) or `set HIP_VISIBLE_DEVICES=` (cmd)"
    assert known["max_jobs"] == '`$env:MAX_JOBS = "45"` (PowerShell) or `set MAX_JOBS=45` (cmd)'
    assert commands.commands(replace(machine, executable=r"C:\A b\python.exe"))["python"] == r'& "C:\A b\python.exe"'
    named = replace(machine, build=replace(UNIVERSAL, repository=""))
    assert commands.commands(named)["reinstall"].endswith(" flash_attn-2.8.3+rocm-cp310-abi3-win_amd64.whl")
    for version, hip, name in (
        ("2.15.0+rocm10.0.0", "10.0.1", "stable.repo.amd.com/rocm/whl-next/"),
        ("2.12.0+rocm7.14.0", "7.14.60850", "repo.amd.com/rocm/whl-multi-arch/"),
        ("2.9.0+rocmsdk20251116", "7.2.53211", "repo.amd.com/rocm/whl-multi-arch/"),
    ):
        probe = {**PROBE, "torch": {"version": version, "hip": hip, "cuda": None}}
        assert commands.amd_index(replace(machine, probe=probe)) == f"https://{name}"


_INSIDE = "AMD Radeon(TM) Graphics, gfx1036, 1 MiB, no kernels in this wheel"


def test_a_processor_with_a_gpu_beside_the_card() -> None:
    """An RX 7800 XT and a Ryzen, with a wheel for the card. No remedy selects the GPU inside the processor."""
    assert findings.examine(common_pc("card", "inside")) == []
    page = doctor.report(common_pc("card", "inside"))
    assert "Radeon RX 7800 XT, gfx1101, 1 MiB\n" in page
    assert _INSIDE in page
    assert commands.commands(common_pc("inside", "card"))["torch"].count("device-gfx1101") == 2  # not gfx1036
    for variables, number in (
        ({}, "1"), ({"HIP_VISIBLE_DEVICES": "1,0"}, "0"), ({"CUDA_VISIBLE_DEVICES": "2, 3"}, "3"),
    ):  # fmt: skip
        (finding,) = findings.examine(common_pc("inside", "card", variables=variables))
        assert finding.key == "another-gpu"
        assert f'`$env:HIP_VISIBLE_DEVICES = "{number}"` (PowerShell)' in finding.remedy
    # The one GPU that torch sees is the wrong one: a variable may hide the other, and there is no number to name.
    for variables, keys in (
        ({"HIP_VISIBLE_DEVICES": "0"}, ["gpu-hidden", "target-missing"]), ({}, ["target-missing"]),
        ({"ROCR_VISIBLE_DEVICES": "0"}, ["target-missing", "variable-of-linux"]),
    ):  # fmt: skip
        result = findings.examine(common_pc("inside", variables=variables))
        assert [finding.key for finding in result] == keys
        assert not any("HIP_VISIBLE_DEVICES = " in finding.remedy for finding in result)
    assert result[0].what == "a GPU here is a gfx1036, the wheel is for gfx1101"


def test_the_number_of_the_first_gpu_hides_nothing() -> None:
    for variables in ({}, {"HIP_VISIBLE_DEVICES": "0"}, {"HIP_VISIBLE_DEVICES": "0,1"}, {"ROCR_VISIBLE_DEVICES": "5"}):
        keys = [finding.key for finding in findings.examine(common_pc(variables=variables))]
        assert keys[0] == "no-device-of-windows", variables
    for variables in ({"HIP_VISIBLE_DEVICES": "1"}, {"HIP_VISIBLE_DEVICES": ""}, {"CUDA_VISIBLE_DEVICES": "-1"}):
        (finding,) = findings.examine(common_pc(variables=variables))
        assert finding.key == "gpu-hidden", variables
    ours = replace(probed(devices=[]), variables={"ROCR_VISIBLE_DEVICES": "5"})
    assert [finding.key for finding in findings.examine(ours)] == ["gpu-hidden"]  # Linux reads it


def test_the_call_is_judged_on_the_gpu_of_the_wheel() -> None:
    """torch has kernels for the card alone."""
    broken = common_pc("inside", "card")
    for words in ("invalid device function", "invalid kernel file", "device kernel image is invalid"):
        broken = replace(broken, probe={**broken.probe, "call": None, "error": f"HIP error: {words}"})
        assert [finding.key for finding in findings.examine(broken)] == ["another-gpu"]  # the GPU in the processor


def test_a_card_counts_before_a_processor_whatever_the_wheel_serves() -> None:
    """The universal wheel serves both."""
    both = replace(UNIVERSAL, targets=("gfx10-3-generic", "gfx11-generic"))
    first = replace(common_pc("inside", "card"), build=both)
    assert first.place() == 1
    assert first.targets() == ["gfx1101"]
    assert [finding.key for finding in findings.examine(first)] == ["another-gpu"]
    assert "is inside the processor" in findings.examine(first)[0].what
    assert findings.examine(replace(common_pc("card", "inside"), build=both)) == []
    hidden = replace(common_pc("inside", variables={"HIP_VISIBLE_DEVICES": "0"}), build=both)
    assert [finding.key for finding in findings.examine(hidden)] == ["gpu-hidden"]


@pytest.mark.parametrize(
    ("name", "target", "extras"),
    [
        ("AMD Radeon RX 7900 XTX [ZLUDA]", "sm_88", "device-gfx1100"),
        ("Radeon RX 580 Series", "gfx803", "device-all"),
        ("AMD Radeon RX 9070 XT", "gfx1201", "device-gfx1201"),
    ],
)
def test_torch_of_windows_has_packages_of_known_gpus_alone(name: str, target: str, extras: str) -> None:
    device = {"name": name, "target": target, "memory_mib": 1}
    machine = replace(common_pc(), probe={**PROBE, "devices": [device]})
    assert f'"torch[{extras}]" "torchvision[{extras}]"' in commands.commands(machine)["torch"]


@pytest.mark.parametrize("driver", ["32.0.21025.1024 (AMD Radeon RX 7800 XT)", "32.0.1 (AMD Radeon(TM) Graphics)", ""])
def test_without_torch_the_driver_names_the_gpu(driver: str) -> None:
    extras = "device-gfx1101" if "7800" in driver else "device-all"
    machine = replace(common_pc(), driver=driver, probe={"torch_error": ""})
    assert f'"torch[{extras}]"' in commands.commands(machine)["torch"]


def test_wsl_has_the_log_of_windows() -> None:
    failed = probed(call=None, error="RuntimeError: no")
    wsl = replace(failed, kfd=None, has_kfd=False, dxg=replace(KFD, path="/dev/dxg", group="root", mode="666"))
    (finding,) = findings.examine(wsl)
    assert "dmesg" not in finding.remedy
    assert "in PowerShell: `wevtutil qe System" in finding.remedy
    assert "/dev/dxg        root:root 666, allowed" in doctor.report(wsl)
    assert "`sudo dmesg | grep amdgpu` may have one" in findings.examine(failed)[0].remedy
    (finding,) = findings.examine(replace(wsl, windows=True, dxg=None))
    assert "may have one: `wevtutil" in finding.remedy


def test_what_a_user_of_windows_is_told_to_install_for_triton() -> None:
    machine = common_pc("inside", tritons={})
    python = r"C:\p\python.exe -m pip install"
    told = commands.commands(machine)["kernels"]
    assert "on Linux or in WSL: `PYTORCH_ROCM_ARCH=gfx1036 ./build_rocm.sh 2.8.3 --platform windows`" in told
    assert told.endswith(f"Install it: `{python} triton-windows`.")
    told = commands.commands(replace(machine, torch_triton="triton==3.7.1"))["kernels"]
    assert told.endswith(f'`{python} "triton==3.7.1" --index-url https://repo.amd.com/rocm/whl-multi-arch/`.')
    # AMD's own Triton is there, and triton-windows would be a second one.
    assert "Install it" not in commands.commands(replace(machine, tritons={"triton": "3.7.1"}))["kernels"]
    vega = {**machine.probe, "devices": [{"name": "Radeon VII", "target": "gfx906", "memory_mib": 1}]}
    assert "build_rocm" not in commands.commands(replace(machine, probe=vega))["kernels"]


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
        assert len(result := findings.examine(facts)) == 1
        assert result[0].key.startswith("torch-")


@pytest.mark.parametrize(
    ("build", "torch", "line"),
    [
        (UNIVERSAL, None, TORCH),
        (UNIVERSAL, "2.6.0+cpu", TORCH),
        (UNIVERSAL, "2.99.0", TORCH),
        (BUILD, None, PIP_TORCH.format("2.5.1+rocm6.2", "rocm6.2")),
        (BUILD, "2.14.1+rocm7.2", PIP_TORCH.format("2.5.1+rocm6.2", "rocm6.2")),
        (replace(BUILD, torch="2.15", rocm="7.14"), None, PIP_TORCH.format("2.15.0+rocm7.14", "rocm7.14")),
    ],
)
def test_the_line_that_installs_torch(build: BuildInfo, torch: str | None, line: str) -> None:
    """An uncertain torch is named for the wheel that needs it alone."""
    probe = {"torch_error": ""} if torch is None else {"torch": {"version": torch, "hip": None, "cuda": None}}
    assert commands.install_torch(replace(HEALTHY, build=build, probe=probe)).replace('"', "") == line


def test_the_line_that_installs_the_wheel_again() -> None:
    def line(facts: Facts) -> str:
        return commands.commands(facts)["reinstall"].removeprefix("pip install --force-reinstall --no-deps ")

    cell = replace(HEALTHY, build=replace(BUILD, repository="https://github.com/Owner/name"))
    address = "https://owner.github.io/name"
    assert line(HEALTHY) == "flash_attn-2.8.3+rocm62torch2.5triton-*.whl"
    assert line(replace(HEALTHY, origin="/tmp/my wheels/f.whl")) == "'/tmp/my wheels/f.whl'"
    assert line(cell) == (
        f'"flash_attn==2.8.3+rocm62torch2.5triton" --extra-index-url {address}/rocm6.2/torch2.5/simple/'
    )
    assert line(replace(HEALTHY, build=UNIVERSAL)) == (f'"flash_attn==2.8.3+rocm" --extra-index-url {address}/simple/')
    assert commands.site("https://git.example.org/owner/name") == ""


def test_the_command_that_leaves_one_triton_installed() -> None:
    both = {"triton": "3.1.0", "pytorch-triton-rocm": "3.1.0"}
    told = commands.commands(replace(HEALTHY, tritons=both, torch_triton="pytorch-triton-rocm==3.1.0"))["triton"]
    assert told.replace('"', "") == (
        "pip uninstall -y triton pytorch-triton-rocm && "
        "pip install pytorch-triton-rocm==3.1.0 --index-url https://download.pytorch.org/whl/rocm6.2"
    )
    told = commands.commands(replace(HEALTHY, tritons=both))["triton"]
    assert told.replace('"', "").endswith(f"&& {PIP_TORCH.format('2.5.1+rocm6.2', 'rocm6.2')} --force-reinstall")


def test_every_trouble_has_a_case() -> None:
    assert {key for key, _, _ in CASES} == {trouble.key for trouble in TROUBLES}
    assert set(LOGS) == {trouble.key for trouble in TROUBLES if trouble.log}


def test_without_known_versions_the_doctor_still_answers(monkeypatch: pytest.MonkeyPatch) -> None:
    """A source tree whose versions.toml this Python cannot read."""
    monkeypatch.setattr(survey, "_of_the_sources", dict)
    for key, machine, _ in CASES:
        if machine.windows or key in ("another-gpu", "torch-unsuitable"):
            continue
        bare = replace(machine, build=replace(machine.build, advice={}))
        assert all(finding.remedy for finding in findings.examine(bare))


def test_a_healthy_machine_has_nothing_wrong() -> None:
    assert findings.examine(HEALTHY) == []
    page = doctor.report(replace(HEALTHY, plug_ins={"vllm-flash-rocm": "0.1.0+rocm", "vllm": "0.33.0"}))
    assert "plug-in         vllm-flash-rocm 0.1.0+rocm for vllm 0.33.0\n" in page
    limited = doctor.report(replace(HEALTHY, limit=LaunchLimit(0.5, "Somebody resets a GPU")))
    assert "long calls      in pieces of 0.5 s: Somebody resets a GPU\n" in limited
    assert "long calls" not in page
    for part in (
        "2.8.3+rocm62torch2.5triton",
        "MI300X, gfx942",
        "HIP 6.2.41133",
        "root:render 660, allowed",
        "6.0e-03",
    ):
        assert part in page
    # Another GPU may be another user's.
    assert findings.examine(replace(HEALTHY, render=(*HEALTHY.render, DENIED))) == []
    # A source tree on a machine without a GPU is no fault.
    plain = {"torch": {"version": "2.13.0+cpu", "hip": None, "cuda": None}, "devices": [], "call": CALL}
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
    bare = replace(facts, build=BuildInfo(python="3.11"), kfd=KFD)
    (finding,) = findings.examine(replace(bare, probe={**bare.probe, "info": {"problems": []}}))
    assert (finding.key, finding.what) == (
        "torch-cuda",
        "this wheel is for ROCm, but torch 2.5.1+cu124 (CUDA 12.4) is not",
    )
    assert TORCH in finding.remedy.replace('"', "")
    # Without the driver of AMD too, unless torch sees a GPU of NVIDIA, for which Triton compiles.
    undriven = replace(bare, kfd=None, probe={**bare.probe, "info": {"problems": []}})
    assert [finding.key for finding in findings.examine(undriven)] == ["torch-cuda"]
    nvidia = {"name": "H100", "target": "sm_90", "memory_mib": 81559}
    assert findings.examine(replace(undriven, probe={**undriven.probe, "devices": [nvidia]})) == []
    cpu = {**undriven.probe, "torch": {"version": "2.9.1+cpu", "hip": None, "cuda": None}}
    assert findings.examine(replace(undriven, probe=cpu)) == []


@pytest.mark.parametrize("key", LOGS)
def test_it_reads_a_log(key: str) -> None:
    log = f"[1/9] compiling\n{LOGS[key]}\nninja: build stopped\n"
    assert [finding.key for finding in findings.examine(replace(HEALTHY, log=log))] == [key]
    assert findings.examine(replace(HEALTHY, log="[1/9] compiling\nSuccessfully built flash_attn\n")) == []


def test_the_doctor_knows_all_variables_that_are_read() -> None:
    """By name: the doctor calls a variable unknown that nothing reads."""
    assert sources.VARIABLE == environment.KERNEL_SOURCE == "FLASH_ATTENTION_KERNEL_SOURCE"
    assert environment.TRITON_ENABLE == "FLASH_ATTENTION_TRITON_AMD_ENABLE"
    assert environment.TRITON_AUTOTUNE == "FLASH_ATTENTION_TRITON_AMD_AUTOTUNE"


def test_doctor_and_pipeline_agree_on_memory_per_compiler() -> None:
    versions = pytest.importorskip("rocm_wheels.matrix.versions")
    assert max(each.job_memory_mib for each in versions.load().backends.values()) == commands.JOB_MIB


@pytest.mark.skipif(not (_SOURCE.parent / "docs").is_dir(), reason="the page is not in the sdist")
def test_the_page_is_the_table() -> None:
    script = _SOURCE.parent / "docs/generate_troubleshooting.py"
    done = subprocess.run([sys.executable, script, "--check"], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize("also_broken", [False, True])
def test_a_note_is_no_problem(
    also_broken: bool, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """PyTorch's switched-off kernels are told with both ways out; the exit status is that of flash_attn."""
    attention = {"error": 1.0 if also_broken else 1e-3, "limit": 2.4e-2, "experimental": True}
    monkeypatch.setattr(doctor.survey, "survey", lambda _: probed(attention=attention))
    assert doctor.main([]) == int(also_broken)
    said = capsys.readouterr().out
    assert "export TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL=1" in said
    assert "-m flash_attn.sdpa FILE" in said
    assert ("nothing is wrong" in said) is not also_broken


def test_a_faulty_triton_matters_on_radeons_alone() -> None:
    """MI300X has no barriers that leave stores under way, and the mended commit is no trouble."""
    faulty = {"triton": "3.8.0+git4cff872c"}
    assert findings.examine(replace(HEALTHY, tritons=faulty)) == []
    (_, radeon, _), *_ = [case for case in CASES if case[0] == "triton-barriers"]
    assert findings.examine(replace(radeon, tritons={"triton": "3.8.0+git6cdb2d05"})) == []
    (finding,) = findings.examine(replace(radeon, tritons={"triton-rocm": "3.8.0+rocm10.1.0.gitfccf1665"}))
    assert finding.key == "triton-barriers"
