"""Small tensors for valid calls, on the device of the tests."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def floats(*shape: int) -> torch.Tensor:
    return torch.randn(shape, device=DEVICE)


def halves(*shape: int) -> torch.Tensor:
    return floats(*shape).bfloat16()


def bytes8(*shape: int) -> torch.Tensor:
    return floats(*shape).to(torch.float8_e4m3fn)


def ints(*values: int, dtype: torch.dtype = torch.int32) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype, device=DEVICE)


def flags(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bool, device=DEVICE)
