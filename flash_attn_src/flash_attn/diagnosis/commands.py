"""The commands in the doctor's remedies, made from the facts of a machine so that they run as they are."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from urllib.parse import urlsplit

from flash_attn.diagnosis.shells import Posix, Shell, Windows
from flash_attn.diagnosis.survey import Facts
from flash_attn.kernels.targets import override
from flash_attn.runtime.build_info import BuildInfo, build_command
from flash_attn.runtime.environment import TRITON_ENABLE

INDEX = "https://download.pytorch.org/whl"
FAMILIES = {"gfx11": "gfx11", "gfx12": "gfx12-0"}  # target -> its family's name among the packages of AMD's torch
AMD_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"
AMD_NEXT_INDEX = "https://stable.repo.amd.com/rocm/whl-next/"  # from ROCm 10.0 on
JOB_MIB = 1400  # of the largest compiler process, as rocm_wheels/versions.toml has it


def commands(facts: Facts) -> dict[str, str]:
    """The commands that a remedy may name in braces. Commands that set or remove a variable include their backticks."""
    target = next(iter(facts.unserved()), "gfx1100")
    shell = _shell(facts)
    return {
        "python": shell.python,
        "pip": shell.pip,
        "torch": _torch(facts),
        "triton": _install_triton(facts),
        "device_package": _device_package(facts),
        "family_package": _family_package(facts),
        "amd_torch": _amd_torch(facts),
        "reinstall": _reinstall(facts),
        "build": _build(facts.build, target, windows=facts.windows),
        "override": shell.assign("HSA_OVERRIDE_GFX_VERSION", (override(target) or ("", "10.3.0"))[1]),
        "unset": shell.remove(_hiding(facts) or ["HIP_VISIBLE_DEVICES"]),
        "other_gpu": shell.assign("HIP_VISIBLE_DEVICES", "1"),
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


def install_torch_on_windows(shell: Shell, *, targets: Sequence[str] = (), installed: bool = False) -> str:
    """The lines that install AMD's torch for Windows, with kernels for these GPU targets, or for every GPU.

    installed: whether another torch is there. pip would keep it.
    """
    extras = ",".join(f"device-{target}" for target in targets) or "device-all"
    line = f'{shell.pip} install "torch[{extras}]" "torchvision[{extras}]" torchaudio --index-url {AMD_INDEX}'
    gone = f"{shell.pip} uninstall -y torch torchvision torchaudio"
    return shell.then([gone, line] if installed else [line])


def install_torch(build: BuildInfo, *, torch: str = "", rocm: str = "") -> str:
    """The line that installs torch for ROCm:

    the versions that the wheel names, else the arguments, else the newest versions. `torch` and `rocm` are versions of
    which the first two numbers count.
    """
    indexes = build.torch_indexes
    minor = build.torch_minor or _minor(torch)
    found = [version for version in indexes if _minor(version) == minor] or list(indexes)
    if not found:  # a source tree, whose build info has no table
        return f'pip install "torch=={minor}.*" --index-url {INDEX}/rocm{build.rocm or _minor(rocm)}'
    wanted = build.rocm or _minor(rocm)
    version = max([version for version in found if wanted in indexes[version]] or found, key=_numbers)
    directories = indexes[version]
    directory = directories.get(wanted) or directories[max(directories, key=_numbers)]
    return f'pip install "torch=={version}+{directory}" --index-url {INDEX}/{directory}'


def site(repository: str) -> str:
    """Where GitHub Pages serves the package index of a repository, "" for a repository elsewhere."""
    parts = urlsplit(repository)
    owner, _, name = parts.path.strip("/").partition("/")
    return f"https://{owner.lower()}.github.io/{name}/" if parts.hostname == "github.com" and name else ""


def _torch(facts: Facts) -> str:
    """The lines that install torch for ROCm on this machine."""
    if facts.windows:
        installed = facts.probe.get("torch_error") != ""  # "" means that torch is not installed
        return install_torch_on_windows(_shell(facts), targets=_targets(facts), installed=installed)
    return install_torch(facts.build, torch=_installed(facts), rocm=_rocm(facts))


def _reinstall(facts: Facts) -> str:
    """The line that installs the same wheel again: from its file if the installer recorded it."""
    build, shell = facts.build, _shell(facts)
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
    shell = _shell(facts)
    gone = f"{shell.pip} uninstall -y {' '.join(facts.tritons) or 'triton pytorch-triton-rocm triton-rocm'}"
    if facts.windows:
        return shell.then([gone, f'{shell.pip} install "{facts.torch_triton or "triton-windows"}"'])
    directory = re.search(r"\+(rocm[\d.]+)", _installed(facts))
    if not facts.torch_triton or directory is None:
        return shell.then([gone, f"{_torch(facts)} --force-reinstall"])
    return shell.then([gone, f'{shell.pip} install "{facts.torch_triton}" --index-url {INDEX}/{directory[1]}'])


def _device_package(facts: Facts) -> str:
    """The line that adds the kernels of this machine's GPUs to the installed torch, from ROCm 10.0 on."""
    targets, installed = _targets(facts) or ["gfx942"], _installed(facts)
    extras = ",".join(f"device-{target}" for target in targets)
    _, _, directory = installed.partition("+")
    # PyTorch's wheels name two numbers of ROCm, +rocm10.0, and AMD's wheels three.
    of_amd = facts.windows or re.fullmatch(r"rocm(sdk\d+|\d+\.\d+\.\d+)", directory)
    index = amd_index(installed) if of_amd else f"{INDEX}/{directory or 'rocm10.0'}"
    return f'{_shell(facts).pip} install "torch[{extras}]=={installed}" --index-url {index}'


def _amd_torch(facts: Facts) -> str:
    """The lines that replace torch by AMD's, which has kernels for more GPUs than PyTorch's."""
    shell = _shell(facts)
    if facts.windows:
        return install_torch_on_windows(shell, targets=_targets(facts), installed=True)
    extras = ",".join(f"device-{target}" for target in _targets(facts) or ["all"])
    return shell.then(
        [f"{shell.pip} uninstall -y torch", f'{shell.pip} install "torch[{extras}]" --index-url {AMD_INDEX}']
    )


def _family_package(facts: Facts) -> str:
    """The line that adds AOTriton's kernels, which lie in a package of the GPU's family, in AMD's index."""
    targets = _targets(facts) or ["gfx1100"]
    family = next((name for start, name in FAMILIES.items() if targets[0].startswith(start)), targets[0])
    version, _, label = _installed(facts).partition("+")
    pin = f"=={version}+{label}" if label else ""
    return f'{_shell(facts).pip} install "amd-torch-device-{family}{pin}" --index-url {amd_index(_installed(facts))}'


def amd_index(torch: str) -> str:
    """AMD's index of torch that has a version such as 2.15.0+rocm10.0."""
    major = re.search(r"\+rocm(?:sdk)?(\d+)\.", torch)
    return AMD_NEXT_INDEX if major and int(major[1]) >= 10 else AMD_INDEX


def _build(build: BuildInfo, target: str, *, windows: bool) -> str:
    """The line that builds a wheel for a GPU target, which runs beside every torch. It is for a shell of Linux."""
    clone = f"git clone {build.repository} && cd {Path(build.repository).name} && " if build.repository else ""
    return f"{clone}{build_command(build.version, target, windows=windows)}"


def _shell(facts: Facts) -> Shell:
    return Windows(facts.executable) if facts.windows else Posix()


def _targets(facts: Facts) -> list[str]:
    """The distinct targets of the GPUs here, sorted."""
    return sorted({device["target"] for device in facts.probe.get("devices", [])})


def _hiding(facts: Facts) -> list[str]:
    return [name for name in facts.variables if name.endswith("_VISIBLE_DEVICES")]


def _installed(facts: Facts) -> str:
    """The version of the installed torch, "" if torch is not installed."""
    torch: Mapping[str, str] = facts.probe.get("torch") or {}
    return torch.get("version", "")


def _rocm(facts: Facts) -> str:
    """The ROCm to install torch for: the installed torch's, else the machine's."""
    torch: Mapping[str, str | None] = facts.probe.get("torch") or {}
    return torch.get("hip") or facts.rocm


def _minor(version: str) -> str:
    match = re.match(r"\d+\.\d+", version)
    return match[0] if match else ""


def _numbers(version: str) -> list[int]:
    return [int(part) for part in version.split(".")]
