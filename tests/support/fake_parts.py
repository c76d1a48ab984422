"""Small stand-ins for the results of slow stages: a plan, kernel stores, a launcher."""

from __future__ import annotations

import hashlib
import io
import json
import subprocess
import sys
import tarfile
from pathlib import Path

from rocm_wheels.compile.compiler import Compiled
from rocm_wheels.compile.store import archive
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.machine import Machine
from rocm_wheels.matrix.plan import Plan, make_plan


def plan(*targets: str, python: str = "3.11", torch: str = "2.5.1", rocm: str = "6.2") -> Plan:
    """The plan of a Triton wheel for these targets."""
    return make_plan(
        versions.load(),
        flash_attn="2.8.3",
        python=python,
        torch=torch,
        rocm=rocm,
        backend="triton",
        env={"PYTORCH_ROCM_ARCH": ";".join(targets)},
        machine=Machine(cores=1, available_mib=1024),
    )


def store(
    directory: Path, target: str, *, name: str = "triton", compiler: str = "3.7.1", kernel_name: str = "k"
) -> Path:
    """A store with one kernel whose code object is a few bytes."""
    directory.mkdir(parents=True, exist_ok=True)
    image = f"code for {target}".encode()
    kernel = {
        "symbol": "k",
        "sha256": hashlib.sha256(image).hexdigest(),
        "threads": 64,
        "shared": 0,
        "params": "P",
    }
    path = directory / f"{target}.zip"
    compiled = Compiled(image, {kernel_name: kernel})
    path.write_bytes(archive(target, (name, compiler), {kernel_name: ("triton-k", compiled)}))
    return path


def crate(directory: Path, commit: str, *, name: str = "candle-flash-rocm-0.1.0", **files: str | None) -> Path:
    """The crate as `cargo package` packs it. files: additional members; None removes a member."""
    vcs = json.dumps({"git": {"sha1": commit}, "path_in_vcs": "candle-flash-rocm"})
    members = {"Cargo.toml": "[package]\n", ".cargo_vcs_info.json": vcs, "src/lib.rs": ""} | files
    path = directory / f"{name}.crate"
    with tarfile.open(path, "w:gz") as archive:
        for member, text in members.items():
            if text is not None:
                entry = tarfile.TarInfo(member if member.startswith("/") else f"{name}/{member}")
                entry.size = len(text)
                archive.addfile(entry, io.BytesIO(text.encode()))
    return path


def library(path: Path, code: str, *flags: str, glibc: str = "2.17") -> Path:
    """A shared library compiled from C for that glibc."""
    source = path.with_suffix(".c")
    source.write_text(code, encoding="utf-8")
    command = [
        sys.executable,
        "-m",
        "ziglang",
        "cc",
        "-target",
        f"x86_64-linux-gnu.{glibc}",
        "-shared",
        "-fPIC",
        "-s",
    ]
    subprocess.run([*command, "-o", str(path), str(source), *flags], check=True, capture_output=True)
    return path
