"""Modules of flash_attn that need no torch, imported by the pipeline."""

from __future__ import annotations

import importlib
import importlib.util
import sys
import types
from typing import Any

from rocm_wheels.paths import FLASH_ATTN_SRC


def module(name: str) -> Any:
    """Imports a torch-free module of flash_attn, such as "kernels.variants".

    `flash_attn/__init__.py` imports torch, which the compile stage does not have. So a bare package with the same
    search path stands in for it.
    """
    if "flash_attn" not in sys.modules:
        package = types.ModuleType("flash_attn")
        package.__path__ = [str(FLASH_ATTN_SRC / "flash_attn")]
        sys.modules["flash_attn"] = package
    return importlib.import_module(f"flash_attn.{name}")


def single_file(name: str) -> Any:
    """A module of flash_attn that imports nothing of the package, such as "diagnosis.advice", outside the package. The
    file is read at the first use of the module.
    """
    path = FLASH_ATTN_SRC / "flash_attn" / f"{name.replace('.', '/')}.py"
    spec = importlib.util.spec_from_file_location(f"single_file_{path.stem}", path)
    assert spec is not None
    assert spec.loader is not None
    spec.loader = importlib.util.LazyLoader(spec.loader)
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded
