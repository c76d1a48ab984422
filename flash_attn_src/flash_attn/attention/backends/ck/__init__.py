"""The Composable Kernel backend: from validated tensors to planned launches of the wheel's CK kernels."""

from __future__ import annotations

from typing import TYPE_CHECKING

import torch

from flash_attn.attention.backends.ck import attention, cache
from flash_attn.attention.backends.ck import gradients as ck_gradients
from flash_attn.attention.backends.ck.fallback import Fallback
from flash_attn.call.calls import AttentionCall, CacheCall, ForwardResult, Fp8Result, GradientCall

if TYPE_CHECKING:
    from flash_attn.attention.backends.protocol import Backend


class ComposableKernel:
    """Serves attention in fp16 and bf16 with CK's kernels, and every other call with another backend."""

    name = "flash_attn.attention.backends.ck"

    def __init__(self, triton: Backend, *, alone: bool = False) -> None:
        """triton:

        the backend for calls without a CK kernel. alone: attention in fp16 and bf16 must not use that backend; such a
        call raises NotImplementedError.
        """
        self._triton = triton
        self._fallback = Fallback(triton, alone)

    def forward(self, call: AttentionCall) -> ForwardResult:
        return attention.forward(call, self._fallback)

    def backward(self, gradients: GradientCall) -> torch.Tensor:
        return ck_gradients.backward(gradients, self._fallback)

    def kvcache(self, call: CacheCall) -> tuple[torch.Tensor, torch.Tensor]:
        return cache.kvcache(call, self._fallback)

    def fp8_forward(self, call: AttentionCall) -> Fp8Result:
        return self._triton.fp8_forward(call)

    def fp8_format(self, x: torch.Tensor) -> torch.dtype:
        return self._triton.fp8_format(x)

    def int8_forward(self, call: AttentionCall, mean: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
        return self._triton.int8_forward(call, mean)

    def combine(self, partial: torch.Tensor, partial_lse: torch.Tensor, out: torch.Tensor) -> torch.Tensor:
        return self._triton.combine(partial, partial_lse, out)
