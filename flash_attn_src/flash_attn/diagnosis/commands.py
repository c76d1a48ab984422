"""The commands in the doctor's remedies, made from the facts of a machine so that they run as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from flash_attn.core.build_info import build_command
from flash_attn.core.environment import TRITON_ENABLE
from flash_attn.diagnosis import advice
from flash_attn.diagnosis.shells import Posix, Shell, Windows
from flash_attn.diagnosis.survey import Facts
from flash_attn.kernels import targets
from flash_attn.kernels.switches import OLDEST_TORCH, OLDEST_TRITON

FAMILIES = {"gfx11": "gfx11", "gfx12": "gfx12-0"}  # target -> its family's name among the packages of AMD's torch
# What ROCm's runtime for Linux reads, and HIP on Windows does not.
OF_LINUX = ("ROCR_VISIBLE_DEVICES", "HSA_OVERRIDE_GFX_VERSION")
JOB_MIB = 1400  # of the largest compiler process, as rocm_wheels/versions.toml has it


def commands(facts: Facts) -> dict[str, str]:
    """The commands that a remedy may name in braces. Commands that set or remove a variable include their backticks."""
    target = next(iter(facts.unserved()), "gfx1100")
    shell = shell_of(facts)
    return {
        "python": shell.python,
        "pip": shell.pip,
        "torch": install_torch(facts),
        "triton": _install_triton(facts),
        "device_package": _device_package(facts),
        "family_package": _family_package(facts),
        "other_torch": _other_torch(facts),
        "or_override": _or_override(facts),
        "reinstall": _reinstall(facts),
        "kernels": _kernels(facts, target),
        "override": shell.assign(advice.OVERRIDE, (targets.override(target) or ("", "VALUE"))[1]),
        "leftovers": shell.delete(facts.leftovers or ["~lash_attn"]),
        "location": facts.location,
        "unset": shell.remove(facts.hiding() or ["HIP_VISIBLE_DEVICES"]),
        "other_gpu": shell.assign("HIP_VISIBLE_DEVICES", _number(facts)),
        "unset_linux": shell.remove([name for name in OF_LINUX if name in facts.variables] or OF_LINUX[:1]),
        "use_dxg": shell.assign("HSA_ENABLE_DXG_DETECTION", "1"),
        "system_runtime": _system_runtime(facts),
        "driver_log": _driver_log(facts),
        "unset_triton": shell.remove([TRITON_ENABLE]),
        "set_triton": shell.assign(TRITON_ENABLE, "TRUE"),
        "experimental": shell.assign("TORCH_ROCM_AOTRITON_ENABLE_EXPERIMENTAL", "1"),
        "log_level": shell.assign("AMD_LOG_LEVEL", "3"),
        "max_jobs": shell.assign("MAX_JOBS", str(max(1, facts.memory_mib // JOB_MIB) if facts.memory_mib else 2)),
        "groups": ",".join(sorted({each.group for each in (facts.kfd, *facts.render) if each and not each.allowed}))
        or "render,video",
        "issue": f"{facts.build.repository}/issues/new?template=report_bug.yml"
        if facts.build.repository
        else "the repository's issues",
    }


def install_torch(facts: Facts) -> str:
    """The lines that install torch for ROCm on this machine: the torch that the wheel names, else the recommended."""
    if not facts.known:
        return "pip install torch --index-url INDEX"  # a source tree that cannot read its own versions.toml
    answer = facts.advise()
    if not answer.torch:  # nothing serves this machine: the line for any GPU
        return _lines(facts, *advice.torch_line(facts.known, "", facts.system_name, "", _hip(facts)))
    # pip would keep a torch that is installed, also a broken one, where the line names no version.
    return _lines(facts, answer.torch, "==" not in answer.torch)


def _lines(facts: Facts, arguments: str, remove: bool) -> str:
    """pip's commands. remove: another torch, if one is installed, which pip would keep."""
    shell = shell_of(facts)
    installed = facts.probe.get("torch_error") != ""  # "" means that torch is not installed
    gone = [f"{shell.pip} uninstall -y torch torchvision torchaudio"] if remove and installed else []
    return shell.then([*gone, f"{shell.pip} {arguments}"])


def site(repository: str) -> str:
    """Where GitHub Pages serves the package index of a repository, "" for a repository elsewhere."""
    parts = urlsplit(repository)
    owner, _, name = parts.path.strip("/").partition("/")
    return f"https://{owner.lower()}.github.io/{name}/" if parts.hostname == "github.com" and name else ""


def _reinstall(facts: Facts) -> str:
    """The line that installs the same wheel again: from its file if the installer recorded it."""
    build, shell = facts.build, shell_of(facts)
    again = f"{shell.pip} install --force-reinstall --no-deps"
    if facts.origin:
        return f"{again} {shell.quote(facts.origin)}"
    index = site(build.repository)
    if not index or not build.label:
        tag = "cp310-abi3-win_amd64" if facts.windows else "*"  # the shells of Windows expand no pattern
        return f"{again} flash_attn-{build.version}{f'+{build.label}' if build.label else ''}-{tag}.whl"
    directory = f"rocm{build.rocm}/torch{build.torch_minor}/simple/" if build.torch else "simple/"
    return f'{again} "flash_attn=={build.version}+{build.label}" --extra-index-url {index}{directory}'


def _install_triton(facts: Facts) -> str:
    """The lines that leave the one Triton that the installed torch requires."""
    shell = shell_of(facts)
    gone = f"{shell.pip} uninstall -y {' '.join(facts.tritons) or 'triton pytorch-triton-rocm triton-rocm'}"
    if facts.windows:
        return shell.then([gone, f"{shell.pip} install {_triton_on_windows(facts)}"])
    directory = re.search(r"\+(rocm[\d.]+)", _installed(facts))
    if not facts.torch_triton or directory is None:
        return shell.then([gone, f"{install_torch(facts)} --force-reinstall"])
    index = f"{advice.PYTORCH_INDEX}/{directory[1]}"
    return shell.then([gone, f'{shell.pip} install "{facts.torch_triton}" --index-url {index}'])


def _device_package(facts: Facts) -> str:
    """The line that adds the kernels of this machine's GPUs to the installed torch, from ROCm 10.0 on."""
    installed = _installed(facts)
    _, _, directory = installed.partition("+")
    of_amd = facts.windows or not advice.of_pytorch(installed)
    index = amd_index(facts) if of_amd else f"{advice.PYTORCH_INDEX}/{directory or 'rocm10.0'}"
    return f'{shell_of(facts).pip} install "torch[{_extras(facts)}]=={installed}" --index-url {index}'


def _other_torch(facts: Facts) -> str:
    """The lines that replace a torch without kernels for the GPU: the recommended one, AMD's if that is installed."""
    if facts.known and (line := facts.advise().torch) and f"=={_installed(facts)}" not in line:
        return install_torch(facts)
    also = ' "torchvision[{0}]" torchaudio' if facts.windows else ""
    arguments = f'install "torch[{{0}}]"{also} --index-url {amd_index(facts)}'
    return _lines(facts, arguments.format(_extras(facts)), True)


def _or_override(facts: Facts) -> str:
    """The variable that lets a GPU run a relative's kernels, as a sentence after another remedy; "" for none."""
    value = facts.advise().variables.get(advice.OVERRIDE) if facts.known else ""
    return f" Or {shell_of(facts).assign(advice.OVERRIDE, value)}, which AMD does not support." if value else ""


def _extras(facts: Facts) -> str:
    """The extras of torch with its kernels for this machine's GPUs."""
    known = facts.known
    return (advice.devices(known, facts.targets()) if known else "") or "device-all"


def _family_package(facts: Facts) -> str:
    """The line that adds AOTriton's kernels, which lie in a package of the GPU's family, in AMD's index."""
    target = next(iter(facts.targets()), "gfx1100")
    family = next((name for start, name in FAMILIES.items() if target.startswith(start)), target)
    version, _, label = _installed(facts).partition("+")
    pin = f"=={version}+{label}" if label else ""
    return f'{shell_of(facts).pip} install "amd-torch-device-{family}{pin}" --index-url {amd_index(facts)}'


def amd_index(facts: Facts) -> str:
    """AMD's index of torch for the ROCm of the installed torch."""
    return advice.amd_index(facts.known, _hip(facts)) if facts.known else "INDEX"


def _kernels(facts: Facts, target: str) -> str:
    """What to do about a GPU that the wheel has no kernels for, as sentences."""
    if not targets.compiled(target):
        return f"Triton does not compile for {target}, so no wheel has kernels for it. CPU tensors are served."
    line, where = build_command(facts.build.version, target, windows=facts.windows), ""
    if line and facts.build.repository:
        line = f"git clone {facts.build.repository} && cd {Path(facts.build.repository).name} && {line}"
    if facts.windows:
        where = " on Linux or in WSL"
    built = f"Build a wheel that has them{where}: `{line}`. Until then " if line else ""
    by_triton = f"{built}Triton compiles them at their first call: Triton {OLDEST_TRITON} or newer"
    if not facts.windows:
        return f"{by_triton}, which torch {OLDEST_TORCH} and newer for ROCm require."
    if facts.tritons:
        return f"{by_triton}."
    return f"{by_triton}. Install it: `{shell_of(facts).pip} install {_triton_on_windows(facts)}`."


def _triton_on_windows(facts: Facts) -> str:
    """What pip is told to install: the Triton that torch requires or AMD's own, where it is, else the one of PyPI."""
    if own := facts.torch_triton or ("triton" if "triton" in facts.tritons else ""):
        return f'"{own}" --index-url {amd_index(facts)}'
    return "triton-windows"


def shell_of(facts: Facts) -> Shell:
    """The shell of a machine's remedies."""
    return Windows(facts.executable) if facts.windows else Posix()


def _number(facts: Facts) -> str:
    """What HIP_VISIBLE_DEVICES names the GPU that the wheel is for. torch counts among the GPUs that it names now."""
    place = facts.place() or 1
    named = (facts.variables.get("HIP_VISIBLE_DEVICES") or facts.variables.get("CUDA_VISIBLE_DEVICES", "")).split(",")
    return (named[place].strip() if place < len(named) else "") or str(place)


def _system_runtime(facts: Facts) -> str:
    """The line that puts the machine's ROCm runtime, which reaches Windows, in the place of torch's."""
    library = Path(facts.torch_runtime or "torch/lib/libhsa-runtime64.so.1")
    return f"rm {library.parent}/libhsa-runtime64.so* && cp /opt/rocm/lib/libhsa-runtime64.so.1 {library}"


def _driver_log(facts: Facts) -> str:
    """Where the GPU driver's messages are: a part of a sentence."""
    if facts.has_kfd and not facts.windows:
        return "`sudo dmesg | grep amdgpu` may have one"
    where = "" if facts.windows else ", in PowerShell"
    query = "wevtutil qe System /c:5 /rd:true /f:text /q:\"*[System[Provider[@Name='Display']]]\""
    return f"the log of Windows may have one{where}: `{query}`"


def _installed(facts: Facts) -> str:
    """The version of the installed torch, "" if torch is not installed."""
    torch: Mapping[str, str] = facts.probe.get("torch") or {}
    return torch.get("version", "")


def _hip(facts: Facts) -> str:
    """The HIP that the installed torch is built for, "" for none."""
    torch: Mapping[str, str | None] = facts.probe.get("torch") or {}
    return torch.get("hip") or ""
