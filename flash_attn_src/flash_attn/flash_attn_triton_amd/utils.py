"""The part of upstream's module of this name that scripts for AMD GPUs use: the backend, and the GPU."""

from __future__ import annotations

import torch

from flash_attn.attention import backends
from flash_attn.core import device
from flash_attn.kernels import targets

DEBUG = False  # if it is set, flash-attn 2.7's tests print what they compare
USE_TRITON_ROCM = backends.gpu_backend().name != "flash_attn.attention.backends.ck"


def is_hip() -> bool:
    """Whether torch is built for ROCm."""
    return torch.version.hip is not None


def get_arch() -> str:
    """The target of the current GPU: "gfx942". RuntimeError without one."""
    return device.of(torch.cuda.current_device()).target


def is_cdna() -> bool:
    """Whether the current GPU is an Instinct one, with matrix cores and wavefronts of 64."""
    return is_hip() and targets.get(get_arch()).family == "cdna"


def is_rdna() -> bool:
    """Whether the current GPU is a Radeon one, with wavefronts of 32."""
    return is_hip() and not is_cdna()
