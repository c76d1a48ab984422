"""Tiny wheels with the names, metadata and test reports of real wheels."""

from __future__ import annotations

import base64
import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import Cell, Claim
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.matrix.platforms import platform_of
from rocm_wheels.wheel import contents
from rocm_wheels.wheel.verdict import FAILED, GPU, PASSED, STAGES, TESTED

NEWEST = versions.load().flash_attn[-1]
CELL = (NEWEST, "3.11", "2.5.1", "6.2")  # the versions of the README, as on a command line
PLATFORM = "manylinux_2_17_x86_64"
MI300X = {"index": 0, "target": "gfx942", "name": "AMD Instinct MI300X", "driver": "6.8.5"}
W7900 = {"index": 0, "target": "gfx1100", "name": "AMD Radeon PRO W7900", "driver": "6.8.5"}
H200 = {"index": 0, "target": "sm_90", "name": "NVIDIA H200", "driver": "570"}
COMMIT = "c0ffee" + 34 * "0"
OTHER_COMMIT = "beef" + 36 * "0"
NOT_ON_LINUX = "not run: Linux cannot run a wheel for Windows"
NO_GPU = "not run: the machine that tested it has no AMD or NVIDIA GPU"


def cell(text: str, backend: str = "triton") -> Cell:
    flash_attn, python, torch, rocm = text.split()
    return Cell(flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=backend)


def verdict(
    path: Path, *, targets: Sequence[str], device: dict[str, Any] | None, ok: bool, commit: str, beside: Sequence[Path]
) -> dict[str, Any]:
    """The test report that `build` writes for a wheel."""
    gpu: dict[str, Any] = {"status": NO_GPU, "seconds": 0.0, "details": {}}
    if device is not None:
        details = {"devices": [device], "worst error": {"bfloat16 backward": 5e-3}}
        gpu = {"status": PASSED, "seconds": 7.5, "details": details}
    cpu = {"status": PASSED, "seconds": 20.0, "details": {"worst error": {"bfloat16 forward": 4e-3, "float32": 2e-7}}}
    stages: dict[str, Any] = {name: {"status": PASSED, "seconds": 0.0, "details": {}} for name in STAGES}
    if platform_of(path.name).name == "windows":
        cpu = {"status": NOT_ON_LINUX, "seconds": 0.0, "details": {}}
        stages |= dict.fromkeys(TESTED, cpu)
        gpu = gpu if device else cpu
    if not ok:
        stages["import"]["status"] = FAILED
    return {
        "ok": ok,
        "wheel": path.name,
        "sha256": hashlib.sha256(path.read_bytes()).hexdigest(),
        "size": path.stat().st_size,
        "contents": _digest(path),
        "commit": commit,
        "cell": {},
        "targets": list(targets),
        "torch_source": "PyPI 2.5.1+cpu: the ROCm index could not be reached",
        "python": "3.11.7",
        "platform": "Linux",
        "stages": {**stages, "cpu numerics": cpu, GPU: gpu},
        "tests": {PASSED: 12, FAILED: int(not ok)},
        "failures": [] if ok else ["test_import.py::test_it"],
        "beside": {each.name: _digest(each) for each in beside},
    }


def _digest(path: Path) -> str:
    """The digest that `contents.read` gives, also of a wheel that it refuses to read."""
    with contents.Contents(path) as opened:
        return opened.digest()


def write(
    directory: Path,
    made_for: Claim,
    *,
    platform: str = PLATFORM,
    targets: Sequence[str] = ("gfx90a", "gfx942"),
    device: dict[str, Any] | None = None,
    ok: bool = True,
    payload: str = "",
    commit: str = COMMIT,
    build: int = 0,
    beside: Sequence[Path] = (),
    stores: Sequence[Path] = (),
    launcher: Path | None = None,
) -> Path:
    """Writes a wheel with a flash_attn that prints its name, and its test report. stores: its kernel stores. launcher:
    without which no wheel for Windows is published.
    """
    directory.mkdir(parents=True, exist_ok=True)
    version = names.version(made_for)
    info = f"{names.DISTRIBUTION}-{version}.dist-info"
    tag = f"{made_for.python_tag}-{made_for.abi_tag}-{platform}"
    requires = [f"torch=={made_for.torch_minor}.*", "einops"] if isinstance(made_for, Cell) else ["einops"]
    metadata = ["Metadata-Version: 2.4", "Name: flash_attn", f"Version: {version}", "Requires-Python: >=3.10"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    name = names.wheel_name(made_for, platform)
    path = directory / (name.replace(f"{version}-", f"{version}-{build}-") if build else name)
    module = f"label = {version!r}\nbackend = {made_for.backend!r}\n{payload}"
    about = {"version": made_for.flash_attn, "targets": list(targets), "commit": commit or None}
    files: dict[str, str | bytes] = {
        "flash_attn/__init__.py": module,
        "flash_attn/_build_info.json": json.dumps(about),
        f"{info}/METADATA": "\n".join(metadata) + "\n",
        **{f"flash_attn/_kernels/{store.name}": store.read_bytes() for store in stores},
        **({f"flash_attn/{platform_of(path.name).launcher}": launcher.read_bytes()} if launcher else {}),
    }
    _zip(path, info, tag, files, pure=False, build=build)
    write_verdict(path, targets=targets, device=device, ok=ok, commit=commit, beside=beside)
    return path


def write_verdict(
    path: Path,
    *,
    targets: Sequence[str] = ("gfx90a", "gfx942"),
    device: dict[str, Any] | None = None,
    ok: bool = True,
    commit: str = COMMIT,
    beside: Sequence[Path] = (),
) -> Path:
    """Writes a test report next to the wheel in a file."""
    content = verdict(path, targets=targets, device=device, ok=ok, commit=commit, beside=beside)
    written = path.with_name(path.name + VERDICT)
    written.write_text(json.dumps(content), encoding="utf-8")
    return written


def write_with_fa3(directory: Path, made_for: Claim) -> tuple[Path, Path]:
    """Writes a wheel that was tested together with the wheel of flash-attn-3, and that wheel."""
    directory.mkdir(parents=True, exist_ok=True)
    fa3 = write_fa3(directory, made_for)
    return write(directory, made_for, beside=[fa3]), fa3


def write_fa3(directory: Path, made_for: Claim) -> Path:
    """Writes the wheel of flash-attn-3 that accompanies a wheel of `write`."""
    return write_interface(directory, made_for, "flash_attn_3")


def write_interface(directory: Path, made_for: Claim, name: str) -> Path:
    """Writes the wheel of an interface of versions.toml that accompanies a wheel of `write`."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / names.interface_wheel_name(versions.load().interfaces[name], made_for)
    version = path.name.split("-")[1]
    info = f"{name}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.4", f"Name: {name}", f"Version: {version}", "Requires-Python: >=3.10"]
    metadata.append(f"Requires-Dist: flash_attn=={names.version(made_for)}")
    files: dict[str, str | bytes] = {
        "flash_attn_interface.py": "from flash_attn import label\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
    }
    _zip(path, info, "py3-none-any", files, pure=True)
    return path


def _zip(path: Path, info: str, tag: str, files: dict[str, str | bytes], *, pure: bool, build: int = 0) -> None:
    lines = ["Wheel-Version: 1.0", *([f"Build: {build}"] if build else []), "Generator: tests"]
    lines += [f"Root-Is-Purelib: {str(pure).lower()}", f"Tag: {tag}", ""]
    files[f"{info}/WHEEL"] = "\n".join(lines)
    rows = []
    for name, text in files.items():
        content = text.encode() if isinstance(text, str) else text
        digest = base64.urlsafe_b64encode(hashlib.sha256(content).digest()).rstrip(b"=").decode()
        rows.append(f"{name},sha256={digest},{len(content)}\n")
    files[f"{info}/RECORD"] = "".join([*rows, f"{info}/RECORD,,\n"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
