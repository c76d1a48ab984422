"""The software bill of materials of a wheel (PEP 770): CycloneDX JSON about what is compiled into it.

Standard library only, since the build hook of a user's own build writes it too.
"""

from __future__ import annotations

import hashlib
import json
import uuid
import zipfile
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any
from urllib.parse import quote

from rocm_wheels.compile.asm import package as asm_package
from rocm_wheels.compile.ck import sources as ck_sources

FILE_NAME = "flash_attn.cdx.json"
PLANNER = "flash_attn/_ck_planner.so"
# The namespace of the serial numbers: the same contents have the same one.
_NAMESPACE = uuid.uuid5(uuid.NAMESPACE_URL, "flash_attn wheels for ROCm")


def document(version: str, requires: Iterable[str], files: Mapping[str, Path]) -> dict[str, Any]:
    """The bill of a wheel: `version` with its label, requirements, and the binary files by their place in the wheel.

    The compilers come from the manifests of the kernel stores among the files; a planner among them means kernels of
    Composable Kernel. Kernels with names in asm- are AMD's assembly. The same input gives the same bill.
    """
    compilers: dict[str, str] = {}
    parts = [_composable_kernel()] if PLANNER in files else []
    assembly = False
    for name, path in sorted(files.items()):
        properties = []
        if path.suffix == ".zip":
            with zipfile.ZipFile(path) as archive:
                manifest = json.loads(archive.read("manifest.json"))
            # Of Composable Kernel: "ziglang" and "0.15.2, clang-tidy 20.1.0, triton 3.7.1".
            for made_by in "{name} {version}".format(**manifest["compiler"]).split(", "):
                compiler, _, release = made_by.rpartition(" ")
                compilers[compiler] = release
            assembly |= any(kernel.startswith("asm-") for kernel in manifest["kernels"])
            properties = [
                {"name": "target", "value": manifest["target"]},
                {"name": "kernels", "value": str(len(manifest["kernels"]))},
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
    for requirement in sorted(requires):
        package = requirement.partition("=")[0].partition(">")[0].strip()
        part = {"type": "library", "bom-ref": package, "name": package, "purl": f"pkg:pypi/{package}"}
        parts.append({**part, "properties": [{"name": "requirement", "value": requirement}]})
    bill = {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "version": 1,
        "metadata": {
            "tools": {
                "components": [
                    {"type": "application", "name": name, "version": compilers[name]} for name in sorted(compilers)
                ]
            },
            "component": {
                "type": "library",
                "bom-ref": "flash_attn",
                "name": "flash_attn",
                "version": version,
                "licenses": [{"license": {"id": "BSD-3-Clause"}}],
                "purl": f"pkg:pypi/flash-attn@{quote(version, safe='')}",
            },
        },
        "components": parts,
        "dependencies": [{"ref": "flash_attn", "dependsOn": [part["bom-ref"] for part in parts]}],
    }
    serial = uuid.uuid5(_NAMESPACE, json.dumps(bill, sort_keys=True))
    return {**bill, "serialNumber": f"urn:uuid:{serial}"}


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


def write(directory: Path, version: str, requires: Iterable[str], files: Mapping[str, Path]) -> Path:
    """Writes the bill into `directory` under the name that it has in a wheel."""
    path = directory / FILE_NAME
    path.write_text(json.dumps(document(version, requires, files), indent=1) + "\n", encoding="utf-8")
    return path
