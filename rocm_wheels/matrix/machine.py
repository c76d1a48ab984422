"""This machine: cores, memory, GPUs, ROCm. Standard library only; nothing is compiled or loaded."""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

KFD_NODES = Path("/sys/class/kfd/kfd/topology/nodes")
CGROUP = Path("/sys/fs/cgroup")
MEMINFO = Path("/proc/meminfo")
_AMD = "0x1002"  # vendor of a PCI device


@dataclass(frozen=True, kw_only=True)
class Machine:
    """The facts that a plan needs: memory in MiB, gfx targets of the GPUs, whether a ROCm compiler is installed."""

    cores: int
    available_mib: int
    gpus: tuple[str, ...] = ()
    rocm: bool = False


def survey(env: Mapping[str, str]) -> Machine:
    """The facts of this machine, within the limits of its container."""
    return Machine(cores=_cores(), available_mib=_available_mib(), gpus=detect_targets(), rocm=_has_rocm(env))


def detect_targets(nodes: Path = KFD_NODES) -> tuple[str, ...]:
    """The gfx targets of the local AMD GPUs, sorted; empty without a GPU or its driver."""
    names = {gfx_name(int(version)) for version in _kfd_versions(nodes) if int(version)}
    return tuple(sorted(names or _enumerated()))


def why_no_gpu(root: Path = Path("/")) -> str:
    """Why no AMD GPU was found on a machine, with what to do about it: a sentence."""
    vendors = [
        path.with_name("vendor") for path in sorted(root.glob("sys/bus/pci/devices/*/class")) if _is_display(path)
    ]
    if (root / "dev/dxg").exists():
        return "This is WSL: ROCm's rocminfo names the GPU, if ROCm and librocdxg are installed."
    if any((root / mark).exists() for mark in (".dockerenv", "run/.containerenv")) and not (root / "dev/kfd").exists():
        return "This is a container without the GPU: start it with --device=/dev/kfd --device=/dev/dri."
    if any(_read(vendor) == _AMD for vendor in vendors) and not (root / "dev/kfd").exists():
        return "There is an AMD GPU, but its driver is not loaded: sudo modprobe amdgpu."
    return "This machine has no AMD GPU."


def _is_display(path: Path) -> bool:
    """Whether the class of a PCI device is a display controller."""
    return _read(path).startswith("0x03")


def gfx_name(version: int) -> str:
    """The target of the kernel driver's decimal MMmmss: 90402 -> gfx942, 90010 -> gfx90a."""
    major, rest = divmod(version, 10000)
    minor, stepping = divmod(rest, 100)
    return f"gfx{major}{minor:x}{stepping:x}"


def _kfd_versions(nodes: Path) -> list[str]:
    versions = []
    for properties in sorted(nodes.glob("*/properties")):
        try:
            text = properties.read_text()
        except OSError:  # a container may see the device file of a GPU that it must not use
            continue
        versions += re.findall(r"^gfx_target_version (\d+)$", text, re.MULTILINE)
    return versions


def _enumerated() -> set[str]:
    """The targets that ROCm's own tool reports; it also finds GPUs without the kfd driver (WSL)."""
    tool = shutil.which("rocm_agent_enumerator") or shutil.which("/opt/rocm/bin/rocm_agent_enumerator")
    if tool is None:
        return set()
    try:
        done = subprocess.run([tool], capture_output=True, text=True, timeout=20, check=True)
    except (OSError, subprocess.SubprocessError):
        return set()
    return set(re.findall(r"^gfx(?!000$)[0-9a-f]+$", done.stdout, re.MULTILINE))


def _has_rocm(env: Mapping[str, str]) -> bool:
    """Whether a ROCm with a compiler is installed."""
    return Path(env.get("ROCM_PATH") or "/opt/rocm", "llvm/bin/clang").exists()


def _cores() -> int:
    cores = len(os.sched_getaffinity(0))
    quota, _, period = _read(CGROUP / "cpu.max").partition(" ")
    if quota.isdigit() and period.isdigit():
        cores = min(cores, -(-int(quota) // int(period)))
    return max(cores, 1)


def _available_mib() -> int:
    match = re.search(r"^MemAvailable:\s+(\d+) kB$", _read(MEMINFO), re.MULTILINE)
    limits = [int(match[1]) // 1024] if match else []
    group = _read(CGROUP / "memory.max")
    if group.isdigit():
        limits.append(int(group) // 2**20)
    return min(limits, default=0)


def _read(path: Path) -> str:
    try:
        return path.read_text().strip()
    except OSError:
        return ""
