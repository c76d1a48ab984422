"""The kernel sources in flash_attn_src/: found, imported without torch, digested."""

from __future__ import annotations

import hashlib
import importlib
import sys
import types
from functools import lru_cache
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent


@lru_cache(maxsize=None)
def flash_attn_src() -> Path:
    """The source tree of the wheel: beside this package in the repository, above it in a source distribution."""
    for candidate in (ROOT / "flash_attn_src", ROOT):
        if (candidate / "flash_attn" / "kernels").is_dir():
            return candidate
    raise FileNotFoundError(f"no flash_attn_src/ beside {ROOT / 'rocm_wheels'}: run from a full checkout")


def module(name: str) -> Any:
    """Import a torch-free module of flash_attn, such as "runtime.variants".

    `flash_attn/__init__.py` imports torch, which the compile stage does not have; a bare package with the same
    search path stands in for it.
    """
    if "flash_attn" not in sys.modules:
        package = types.ModuleType("flash_attn")
        package.__path__ = [str(flash_attn_src() / "flash_attn")]
        sys.modules["flash_attn"] = package
    return importlib.import_module(f"flash_attn.{name}")


@lru_cache(maxsize=None)
def digest(*files: str) -> str:
    """sha256 over files of the source tree, named relative to it."""
    total = hashlib.sha256()
    for file in files:
        content = (flash_attn_src() / file).read_bytes()
        total.update(f"{file}\0{len(content)}\0".encode() + content)
    return total.hexdigest()
