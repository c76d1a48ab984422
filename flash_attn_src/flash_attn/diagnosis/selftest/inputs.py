"""Random inputs of the selftest, and rotary embedding in fp32."""

from __future__ import annotations

import torch

DTYPES = {"fp32": torch.float32, "fp16": torch.float16, "bf16": torch.bfloat16}


class Draw:
    """Random tensors of one dtype on one device, the same in every run."""

    def __init__(self, device: str, dtype: torch.dtype, seed: int = 0) -> None:
        self.device, self.dtype = device, dtype
        self._generator = torch.Generator().manual_seed(seed)

    def __call__(self, *shape: int, grad: bool = True) -> torch.Tensor:
        drawn = torch.randn(*shape, generator=self._generator).to(self.device, self.dtype)
        return drawn.requires_grad_(grad)

    def slopes(self, heads: int) -> torch.Tensor:
        return torch.rand(heads, generator=self._generator).to(self.device) * 0.3


def angles(draw: Draw, places: int, dim: int) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of rotary embedding, (places, dim / 2)."""
    turns = torch.outer(torch.arange(places), 1e4 ** (-torch.arange(0, dim, 2) / dim)).to(draw.device)
    return turns.cos().to(draw.dtype), turns.sin().to(draw.dtype)


def turned(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """x (seqlen, heads, dim) turned by the first rows of the angles, halves as pairs, in fp32."""
    one, two = x.float().chunk(2, -1)
    cos, sin = (t[: len(x)].float()[:, None] for t in (cos, sin))
    return torch.cat([one * cos - two * sin, one * sin + two * cos], -1)
