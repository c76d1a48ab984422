"""Who computes: `triton` (or `ck`) on the GPU, `torch` for everything else. One contract, chosen by the tensor."""

from __future__ import annotations

from types import ModuleType

import torch as _torch

from flash_attn.backends import torch as torch_backend
from flash_attn.backends import triton as triton_backend


def select(tensor: _torch.Tensor) -> ModuleType:
    """The backend that serves a tensor: the wheel's GPU backend for GPU tensors, else pure PyTorch."""
    return triton_backend if tensor.is_cuda else torch_backend
