"""Fast attention: the API of flash-attn, with kernels compiled ahead of time."""

from __future__ import annotations

import importlib
import sys
from types import ModuleType

from flash_attn.core.build_info import load as _load
from flash_attn.core.platform import PLATFORM as _PLATFORM
from flash_attn.moved import MOVED as _MOVED
from flash_attn.moved import Aliases as _Aliases

sys.meta_path.insert(0, _Aliases())

_build = _load()
__version__ = _build.version

# The program of `python -m flash_attn.PROGRAM`, else "". While Python looks for a module to run, argv is ["-m", ...].
_programs = [word for word in sys.orig_argv if word.startswith("flash_attn.")] if sys.argv[:1] == ["-m"] else []
_program = _programs[0] if _programs else ""


def _refuse(message: str, cause: ImportError | None = None) -> None:
    """Raises ImportError. Ends a program of this package with the message alone, unless it is asked for its help."""
    if not _program:
        raise ImportError(message) from cause
    if _program != "flash_attn.selftest" or not {"-h", "--help"} & {*sys.orig_argv}:
        raise SystemExit(f"error: {message}")


if _program != "flash_attn.doctor":  # which has to run where torch is missing or broken
    try:
        from torch import __version__ as _torch

        # The universal wheel's metadata names no version of torch: an installer would replace the user's torch.
        if [int(part) for part in _torch.split(".")[:2]] < [2, 5]:
            _refuse(
                f"flash_attn {__version__} needs torch 2.5 or newer, torch {_torch} is installed. "
                f"`{_PLATFORM.python} -m flash_attn.doctor` prints the line that replaces it"
            )
        from flash_attn.attention.operators import flops as _flops
        from flash_attn.diagnosis.info import backend_info
        from flash_attn.flash_attn_interface import (
            flash_attn_func,
            flash_attn_kvpacked_func,
            flash_attn_qkvpacked_func,
            flash_attn_varlen_func,
            flash_attn_varlen_kvpacked_func,
            flash_attn_varlen_qkvpacked_func,
            flash_attn_with_kvcache,
        )
        from flash_attn.fp8 import (
            flash_attn_fp8_func,
            flash_attn_qkvpacked_fp8_func,
            flash_attn_varlen_fp8_func,
            flash_attn_varlen_qkvpacked_fp8_func,
        )
        from flash_attn.sdpa import sdpa_report, use_for_sdpa

        _flops.offer()
    except ModuleNotFoundError as error:
        if error.name != "torch":
            raise
        _wanted = f"torch {_build.torch_minor}" if _build.torch else "torch 2.5 or newer"
        _refuse(
            f"flash_attn {__version__} needs {_wanted}{f' for ROCm {_build.rocm}' if _build.rocm else ''}, "
            f"and no torch is installed: install it first. `{_PLATFORM.python} -m flash_attn.doctor` tells how",
            error,
        )

# Submodules that are attributes of the package without an import of their own: who loads it by the package `kernels`
# cannot write `from flash_attn.flex import ...`. They are imported at their first use, because flex takes seconds.
_AT_FIRST_USE = ("flex", "int8", "sparse")


def __getattr__(name: str) -> ModuleType:
    if name not in _AT_FIRST_USE and name not in _MOVED:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return importlib.import_module(f"{__name__}.{name}")


__all__ = [
    "__version__",
    "backend_info",
    "flash_attn_fp8_func",
    "flash_attn_func",
    "flash_attn_kvpacked_func",
    "flash_attn_qkvpacked_fp8_func",
    "flash_attn_qkvpacked_func",
    "flash_attn_varlen_fp8_func",
    "flash_attn_varlen_func",
    "flash_attn_varlen_kvpacked_func",
    "flash_attn_varlen_qkvpacked_fp8_func",
    "flash_attn_varlen_qkvpacked_func",
    "flash_attn_with_kvcache",
    "sdpa_report",
    "use_for_sdpa",
]
