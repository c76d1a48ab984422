"""The kernel sources in flash_attn_src/: found, imported without torch, digested."""

from __future__ import annotations

import ast
import hashlib
import importlib
import sys
import types
from functools import cache
from typing import Any

from rocm_wheels.paths import FLASH_ATTN_SRC


def module(name: str) -> Any:
    """Import a torch-free module of flash_attn, such as "kernels.variants".

    `flash_attn/__init__.py` imports torch, which the compile stage does not have; a bare package with the same
    search path stands in for it.
    """
    if "flash_attn" not in sys.modules:
        package = types.ModuleType("flash_attn")
        package.__path__ = [str(FLASH_ATTN_SRC / "flash_attn")]
        sys.modules["flash_attn"] = package
    return importlib.import_module(f"flash_attn.{name}")


@cache
def kernel_files(name: str) -> tuple[str, ...]:
    """The files of a kernel module and of every kernel module whose code it takes, itself or through others."""
    found = {name}
    missing = [name]
    while missing:
        for other in _kernel_imports(missing.pop()) - found:
            found.add(other)
            missing.append(other)
    return tuple(f"flash_attn/kernels/{each}.py" for each in sorted(found))


def _kernel_imports(name: str) -> set[str]:
    package = "flash_attn.kernels"
    tree = ast.parse((FLASH_ATTN_SRC / f"flash_attn/kernels/{name}.py").read_text(encoding="utf-8"))
    found = set()
    for node in ast.walk(tree):
        if isinstance(node, ast.ImportFrom) and node.module == package:
            found |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and node.module.startswith(f"{package}."):
            found.add(node.module.removeprefix(f"{package}."))
    return found


@cache
def digest(*files: str) -> str:
    """sha256 over files of the source tree, named relative to it."""
    total = hashlib.sha256()
    for file in files:
        content = (FLASH_ATTN_SRC / file).read_bytes()
        total.update(f"{file}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
