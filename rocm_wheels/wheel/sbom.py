"""The software bill of materials of a wheel (PEP 770): CycloneDX JSON about what is compiled into it.

Standard library only, since the build hook of a user's own build writes it too.
"""

from __future__ import annotations

import hashlib
import json
import time
import uuid
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rocm_wheels.compile import manifest
from rocm_wheels.compile.asm import package as asm_package
from rocm_wheels.compile.ck import sources as ck_sources
from rocm_wheels.environment import OLDEST_EPOCH
from rocm_wheels.matrix import versions
from rocm_wheels.matrix.platforms import PLATFORMS

FILE_NAME = "flash_attn.cdx.json"
PLANNER = "flash_attn/_ck_planner.so"
LAUNCHERS = frozenset(f"flash_attn/{platform.launcher}" for platform in PLATFORMS.values())
# Compiler -> its licence. The ROCm of a machine has a clang of its own.
_LICENCES = {
    "clang-tidy": "Apache-2.0 WITH LLVM-exception",
    "ROCm clang": "Apache-2.0 WITH LLVM-exception",
    "triton": "MIT",
    "ziglang": "MIT",
}
# Namespace of the serial numbers: the same contents have the same serial number.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "flash_attn wheels for ROCm")


@dataclass(frozen=True, kw_only=True)
class Subject:
    """The wheel that the SBOM describes: its version with the label, and the facts in its METADATA.

    repository: an address; commit: the commit it is built from; both are "" if the build does not know them. epoch: the
    date of the wheel, in seconds since 1970.
    """

    version: str
    license: str
    requires: tuple[str, ...] = ()
    repository: str = ""
    commit: str = ""
    epoch: int = OLDEST_EPOCH


def document(subject: Subject, files: Mapping[str, Path]) -> dict[str, Any]:
    """The SBOM of a wheel. files: the binary files by their path in the wheel.

    The compilers are read from the manifests of the kernel stores. A planner among the files means kernels of
    Composable Kernel. Kernels with names in asm- are AMD's assembly. zig compiles the launcher and the planner. The
    same input gives the same SBOM.
    """
    version = subject.version
    compilers: dict[str, str] = {}
    if PLANNER in files or LAUNCHERS & files.keys():
        compilers["ziglang"] = versions.load().compilers["ziglang"]
    parts = [_composable_kernel()] if PLANNER in files else []
    assembly = False
    for name, path in sorted(files.items()):
        properties = []
        if path.suffix == ".zip":
            made = manifest.read(path)
            # Of Composable Kernel: "ziglang" and "0.15.2, clang-tidy 20.1.0, triton 3.7.1".
            for made_by in "{name} {version}".format(**made["compiler"]).split(", "):
                compiler, _, release = made_by.rpartition(" ")
                compilers[compiler] = release
            assembly |= any(kernel.startswith("asm-") for kernel in made["kernels"])
            properties = [
                {"name": "target", "value": made["target"]},
                {"name": "kernels", "value": str(len(made["kernels"]))},
            ]
        part = {
            "type": "file",
            "bom-ref": name,
            "name": name,
            "hashes": [{"alg": "SHA-256", "content": hashlib.sha256(path.read_bytes()).hexdigest()}],
        }
        parts.append({**part, "properties": properties} if properties else part)
    if assembly:
        parts.append(_assembly_kernels())
    for requirement in sorted(subject.requires):
        package = requirement.partition("=")[0].partition(">")[0].strip()
        part = {"type": "library", "bom-ref": package, "name": package, "purl": f"pkg:pypi/{package}"}
        parts.append({**part, "properties": [{"name": "requirement", "value": requirement}]})
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "timestamp": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime(subject.epoch)),
            "tools": {"components": [_tool(name, compilers[name]) for name in sorted(compilers)]},
            **_supplier(subject.repository),
            "component": {
                "type": "library",
                "bom-ref": "flash_attn",
                "name": "flash_attn",
                "version": version,
                "licenses": [{"expression": subject.license}],
                "purl": f"pkg:pypi/flash-attn@{quote(version, safe='')}",
                **({"properties": [{"name": "commit", "value": subject.commit}]} if subject.commit else {}),
            },
        },
        "components": parts,
        "dependencies": [{"ref": "flash_attn", "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    serial = uuid.uuid5(_NAMESPACE, json.dumps(bill, sort_keys=True))
    return {**bill, "serialNumber": f"urn:uuid:{serial}"}


def _tool(name: str, version: str) -> dict[str, Any]:
    tool: dict[str, Any] = {"type": "application", "name": name, "version": version}
    return tool | ({"licenses": [{"expression": _LICENCES[name]}]} if name in _LICENCES else {})


def _supplier(repository: str) -> dict[str, Any]:
    """The publisher of the repository: "owner" of https://github.com/owner/name; empty if unknown."""
    if not repository:
        return {}
    return {"supplier": {"name": repository.rstrip("/").split("/")[-2], "url": [repository]}}


def _composable_kernel() -> dict[str, Any]:
    source = ck_sources.load()
    return {
        "type": "library",
        "bom-ref": "composable_kernel",
        "name": "composable_kernel",
        "version": source.revision,
        "hashes": [{"alg": "SHA-256", "content": source.sha256}],
        "licenses": [{"license": {"id": "MIT"}}],
        "purl": f"pkg:github/rocm/composable_kernel@{source.revision}",
        "properties": [
            {"name": "archive", "value": f"{source.package} {source.version}, {source.directory}: the hash is its own"},
            {"name": "fixes", "value": str(len(source.fixes))},
        ],
    }


def _assembly_kernels() -> dict[str, Any]:
    package = asm_package.load()
    return {
        "type": "library",
        "bom-ref": package.name,
        "name": package.name,
        "version": package.version,
        "hashes": [{"alg": "SHA-256", "content": package.sha256}],
        "licenses": [{"license": {"id": package.license}}],
        "purl": f"pkg:pypi/{package.name}@{package.version}",
        "properties": [{"name": "directory", "value": f"{package.directory}: code objects, as they are there"}],
    }


def write(directory: Path, subject: Subject, files: Mapping[str, Path]) -> Path:
    """Writes the SBOM into `directory` under the file name that it has in a wheel."""
    path = directory / FILE_NAME
    path.write_text(json.dumps(document(subject, files), indent=1) + "\n", encoding="utf-8")
    return path
