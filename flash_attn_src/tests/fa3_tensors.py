"""Random tensors for the tests of FlashAttention-3's functions, on the GPU where there is one."""

from __future__ import annotations

import torch

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"


def draw(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed)).to(DEVICE)


def qkv() -> tuple[torch.Tensor, ...]:
    """q (2, 6, 4, 16), k and v (2, 9, 2, 16)."""
    return draw(2, 6, 4, 16), draw(2, 9, 2, 16, seed=1), draw(2, 9, 2, 16, seed=2)


def index(*numbers: int) -> torch.Tensor:
    return torch.tensor(numbers, dtype=torch.int32, device=DEVICE)
