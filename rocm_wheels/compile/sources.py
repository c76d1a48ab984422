"""Finds the kernel sources in flash_attn_src/, imports them without torch, and hashes them."""

from __future__ import annotations

import ast
import hashlib
from functools import cache

from rocm_wheels.package_modules import module
from rocm_wheels.paths import FLASH_ATTN_SRC

__all__ = ["digest", "kernel_files", "module"]


@cache
def kernel_files(name: str) -> tuple[str, ...]:
    """The file of a kernel module and the files of all kernel modules that it imports, directly or indirectly."""
    modules = {name}
    missing = [name]
    while missing:
        for other in _kernel_imports(missing.pop()) - modules:
            modules.add(other)
            missing.append(other)
    return tuple(f"flash_attn/kernels/{each}.py" for each in sorted(modules))


def _kernel_imports(name: str) -> set[str]:
    package = "flash_attn.kernels"
    tree = ast.parse((FLASH_ATTN_SRC / f"flash_attn/kernels/{name}.py").read_text(encoding="utf-8"))
    modules = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            modules |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            modules.add(node.module.removeprefix(f"{package}."))
    return modules


@cache
def digest(*files: str) -> str:
    """sha256 over files of the source tree and their relative paths."""
    total = hashlib.sha256()
    for file in files:
        content = (FLASH_ATTN_SRC / file).read_bytes()
        total.update(f"{file}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
