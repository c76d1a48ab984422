"""The commands in the doctor's remedies, made from the facts of a machine so that they run as they are."""

from __future__ import annotations

import re
import shlex
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import urlsplit

from flash_attn.diagnosis.overrides import OVERRIDES
from flash_attn.diagnosis.survey import Facts
from flash_attn.runtime.build_info import BuildInfo

INDEX = "https://download.pytorch.org/whl"
FAMILIES = {"gfx11": "gfx11", "gfx12": "gfx12-0"}  # target -> its family's name among the packages of AMD's torch
AMD_INDEX = "https://repo.amd.com/rocm/whl-multi-arch/"
JOB_MIB = 1400  # of the largest compiler process, as rocm_wheels/versions.toml has it


def commands(facts: Facts) -> dict[str, str]:
    """The commands that a remedy may name in braces."""
    target = next(iter(facts.unserved()), "gfx1100")
    return {
        "torch": install_torch(facts.build, torch=_installed(facts), rocm=_rocm(facts)),
        "triton": _install_triton(facts),
        "device_package": _device_package(facts),
        "family_package": _family_package(facts),
        "reinstall": _reinstall(facts),
        "build": _build(facts.build, target),
        "override": f"export HSA_OVERRIDE_GFX_VERSION={OVERRIDES.get(target, ('', '10.3.0'))[1]}",
        "unset": f"unset {' '.join(_hiding(facts)) or 'HIP_VISIBLE_DEVICES'}",
        "groups": ",".join(sorted({each.group for each in (facts.kfd, *facts.render) if each and not each.allowed}))
        or "render,video",
        "jobs": str(max(1, facts.memory_mib // JOB_MIB) if facts.memory_mib else 2),
        "issue": f"{facts.build.repository}/issues/new?template=report_bug.yml"
        if facts.build.repository
        else "the repository's issues",
    }


def install_torch(build: BuildInfo, *, torch: str = "", rocm: str = "") -> str:
    """The line that installs torch for ROCm: the wheel's torch and ROCm where it names them, else the ones given, else
    the newest. `torch` and `rocm` are versions of which the first two numbers count."""
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


def _reinstall(facts: Facts) -> str:
    """The line that installs the same wheel again: from its file where the installer wrote that down."""
    build = facts.build
    again = "pip install --force-reinstall --no-deps"
    if facts.origin:
        return f"{again} {shlex.quote(facts.origin)}"
    index = site(build.repository)
    if not index or not build.label:
        return f"{again} flash_attn-{build.version}{f'+{build.label}' if build.label else ''}-*.whl"
    directory = f"rocm{build.rocm}/torch{build.torch_minor}/simple/" if build.torch else "simple/"
    return f'{again} "flash_attn=={build.version}+{build.label}" --extra-index-url {index}{directory}'


def _install_triton(facts: Facts) -> str:
    """The lines that leave the one Triton that the installed torch requires."""
    gone = f"pip uninstall -y {' '.join(facts.tritons) or 'triton pytorch-triton-rocm triton-rocm'}"
    directory = re.search(r"\+(rocm[\d.]+)", _installed(facts))
    if not facts.torch_triton or directory is None:
        return f"{gone} && {install_torch(facts.build, torch=_installed(facts), rocm=_rocm(facts))} --force-reinstall"
    return f'{gone} && pip install "{facts.torch_triton}" --index-url {INDEX}/{directory[1]}'


def _device_package(facts: Facts) -> str:
    """The line that adds the kernels of this machine's GPUs to the installed torch, from ROCm 10.0 on."""
    targets = sorted({device["target"] for device in facts.probe.get("devices", [])}) or ["gfx942"]
    extras, installed = ",".join(f"device-{target}" for target in targets), _installed(facts)
    _, _, directory = installed.partition("+")
    return f'pip install "torch[{extras}]=={installed}" --index-url {INDEX}/{directory or "rocm10.0"}'


def _family_package(facts: Facts) -> str:
    """The line that adds AOTriton's kernels, which lie in a package of the GPU's family, in AMD's index."""
    targets = sorted({device["target"] for device in facts.probe.get("devices", [])}) or ["gfx1100"]
    family = next((name for start, name in FAMILIES.items() if targets[0].startswith(start)), targets[0])
    version, _, label = _installed(facts).partition("+")
    pin = f"=={version}+{label}" if label else ""
    return f'pip install "amd-torch-device-{family}{pin}" --index-url {AMD_INDEX}'


def _build(build: BuildInfo, target: str) -> str:
    """The line that builds a wheel for a GPU target, which runs beside every torch."""
    clone = f"git clone {build.repository} && cd {Path(build.repository).name} && " if build.repository else ""
    return f"{clone}PYTORCH_ROCM_ARCH={target} ./build_rocm.sh {build.version}"


def _hiding(facts: Facts) -> list[str]:
    return [name for name in facts.variables if name.endswith("_VISIBLE_DEVICES")]


def _installed(facts: Facts) -> str:
    """The version of the installed torch, "" where there is none."""
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
