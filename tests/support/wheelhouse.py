"""Tiny wheels with the names, metadata and verdicts of real ones."""

from __future__ import annotations

import hashlib
import json
import zipfile
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from rocm_wheels.matrix import names, versions
from rocm_wheels.matrix.cells import Cell
from rocm_wheels.matrix.names import VERDICT
from rocm_wheels.wheel.verdict import GPU, PASSED

NEWEST = versions.load().flash_attn[-1]
CELL = (NEWEST, "3.11", "2.5.1", "6.2")  # the README's, as a command line names it
PLATFORM = "manylinux_2_17_x86_64"
MI300X = {"index": 0, "target": "gfx942", "name": "AMD Instinct MI300X", "driver": "6.8.5"}
H200 = {"index": 0, "target": "sm_90", "name": "NVIDIA H200", "driver": "570"}
NO_GPU = "not run: the machine that tested it has no AMD or NVIDIA GPU"


def cell(text: str, backend: str = "triton") -> Cell:
    flash_attn, python, torch, rocm = text.split()
    return Cell(flash_attn=flash_attn, python=python, torch=torch, rocm=rocm, backend=backend)


def verdict(
    content: bytes, wheel: str, *, targets: Sequence[str], device: dict[str, Any] | None, ok: bool
) -> dict[str, Any]:
    gpu: dict[str, Any] = {"status": NO_GPU, "seconds": 0.0, "details": {}}
    if device is not None:
        details = {"devices": [device], "worst error": {"bfloat16 backward": 5e-3}}
        gpu = {"status": PASSED, "seconds": 7.5, "details": details}
    cpu = {"status": PASSED, "seconds": 20.0, "details": {"worst error": {"bfloat16 forward": 4e-3, "float32": 2e-7}}}
    return {
        "ok": ok,
        "wheel": wheel,
        "sha256": hashlib.sha256(content).hexdigest(),
        "size": len(content),
        "targets": list(targets),
        "torch_source": "PyPI 2.5.1+cpu: the ROCm index could not be reached",
        "stages": {"repaired": {"status": PASSED, "seconds": 0.0, "details": {}}, "cpu numerics": cpu, GPU: gpu},
    }


def write(
    directory: Path,
    made_for: Cell,
    *,
    platform: str = PLATFORM,
    targets: Sequence[str] = ("gfx90a", "gfx942"),
    device: dict[str, Any] | None = None,
    ok: bool = True,
    payload: str = "",
) -> Path:
    """A wheel that installs a flash_attn which says what it is, and its verdict."""
    directory.mkdir(parents=True, exist_ok=True)
    version = names.version(made_for)
    info = f"{names.DISTRIBUTION}-{version}.dist-info"
    tag = f"{made_for.python_tag}-{made_for.python_tag}-{platform}"
    requires = [f"torch=={made_for.torch_minor}.*", "einops"]
    metadata = ["Metadata-Version: 2.4", "Name: flash_attn", f"Version: {version}", "Requires-Python: >=3.10"]
    metadata += [f"Requires-Dist: {requirement}" for requirement in requires]
    path = directory / names.wheel_name(made_for, platform)
    module = f"label = {version!r}\nbackend = {made_for.backend!r}\n{payload}"
    files = {"flash_attn/__init__.py": module, f"{info}/METADATA": "\n".join(metadata) + "\n"}
    _zip(path, info, tag, files, pure=False)
    content = verdict(path.read_bytes(), path.name, targets=targets, device=device, ok=ok)
    path.with_name(path.name + VERDICT).write_text(json.dumps(content), encoding="utf-8")
    return path


def write_interface(directory: Path, made_for: Cell) -> Path:
    """The wheel of flash-attn-3 that accompanies one of `write`."""
    path = directory / names.interface_wheel_name(made_for)
    version = path.name.split("-")[1]
    info = f"{names.INTERFACE}-{version}.dist-info"
    metadata = ["Metadata-Version: 2.4", "Name: flash-attn-3", f"Version: {version}", "Requires-Python: >=3.10"]
    metadata.append(f"Requires-Dist: flash_attn=={names.version(made_for)}")
    files = {
        "flash_attn_interface.py": "from flash_attn import label\n",
        f"{info}/METADATA": "\n".join(metadata) + "\n",
    }
    _zip(path, info, "py3-none-any", files, pure=True)
    return path


def _zip(path: Path, info: str, tag: str, files: dict[str, str], *, pure: bool) -> None:
    files[f"{info}/WHEEL"] = f"Wheel-Version: 1.0\nGenerator: tests\nRoot-Is-Purelib: {str(pure).lower()}\nTag: {tag}\n"
    files[f"{info}/RECORD"] = "".join(f"{name},,\n" for name in [*files, f"{info}/RECORD"])
    with zipfile.ZipFile(path, "w") as archive:
        for name, text in files.items():
            archive.writestr(zipfile.ZipInfo(name), text)
