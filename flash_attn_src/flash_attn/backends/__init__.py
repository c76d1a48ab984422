"""Who computes: `triton` on the GPU, `torch` for everything else. One contract, chosen by the tensor.

FLASH_ATTENTION_TRITON_AMD_ENABLE=FALSE asks for the Composable Kernel backend, as it does upstream.
"""

from __future__ import annotations

import os
from types import ModuleType

import torch as _torch

from flash_attn.backends import autotune
from flash_attn.backends import torch as torch_backend
from flash_attn.backends import triton as triton_backend

_TRITON = "FLASH_ATTENTION_TRITON_AMD_ENABLE"


def problem() -> str | None:
    """Why no backend serves GPU tensors here, with the remedy; None where one does."""
    asked = os.environ.get(_TRITON, "").strip().upper()
    if asked in ("", "1", "TRUE"):
        return None
    if asked in ("0", "FALSE"):
        return f"{_TRITON}={asked} asks for the CK backend, which this wheel does not have: unset it"
    return f"{_TRITON}={asked} is neither TRUE nor FALSE: unset it, or set it to TRUE"


_problem = problem()
_gpu_backend = autotune if autotune.wanted() else triton_backend


def select(tensor: _torch.Tensor) -> ModuleType:
    """The backend that serves a tensor: the wheel's GPU backend for GPU tensors, else pure PyTorch.

    Raises RuntimeError where the environment, when flash_attn was imported, asked for one that is not there.
    """
    if not tensor.is_cuda:
        return torch_backend
    if _problem is not None:
        raise RuntimeError(_problem)
    return _gpu_backend
