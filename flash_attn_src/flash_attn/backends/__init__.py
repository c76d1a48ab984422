"""Who computes: `ck` or `triton` on the GPU, `torch` for everything else. One contract, chosen by the tensor.

The wheel says which of the two; FLASH_ATTENTION_TRITON_AMD_ENABLE overrides it, as upstream: TRUE asks for Triton,
FALSE for Composable Kernel alone. Without it a wheel with Composable Kernel runs Triton's kernels where CK has none.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch as _torch

from flash_attn.backends import ck as ck_backend
from flash_attn.backends import torch as torch_backend
from flash_attn.backends import triton as triton_backend
from flash_attn.backends.ck import calls as ck_calls
from flash_attn.backends.triton import autotune
from flash_attn.runtime import build_info, ck_planner, recording

_TRITON = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


def _asked() -> str:
    return os.environ.get(_TRITON, "").strip().upper()


def problem() -> str | None:
    """Why no backend serves GPU tensors here, with the remedy; None where one does."""
    asked, has_ck = _asked(), build_info.load().backend == "ck"
    if asked not in ("", "0", "1", "FALSE", "TRUE"):
        return f"{_TRITON}={asked} is neither TRUE nor FALSE: unset it, or set it to TRUE"
    if asked in ("0", "FALSE") and not has_ck:
        return f"{_TRITON}={asked} asks for the CK backend, which this wheel does not have: unset it"
    if has_ck and asked not in ("1", "TRUE"):
        try:
            ck_planner.library()
        except ImportError as error:
            return str(error)
    return None


_problem = problem()
_triton_backend = autotune if autotune.wanted() else triton_backend
_gpu_backend = ck_backend if build_info.load().backend == "ck" and _asked() not in ("1", "TRUE") else _triton_backend
ck_calls.alone = _asked() in ("0", "FALSE")


def select(tensor: _torch.Tensor) -> ModuleType:
    """The backend that serves a tensor: the wheel's GPU backend for GPU tensors, else pure PyTorch.

    Raises RuntimeError where the environment, when flash_attn was imported, asked for one that is not there.
    """
    if not tensor.is_cuda:
        return torch_backend if recording.current is None else ck_backend
    if _problem is not None:
        raise RuntimeError(_problem)
    return _gpu_backend
