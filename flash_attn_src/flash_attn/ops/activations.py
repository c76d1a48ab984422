"""Activations with their gradients, in PyTorch's operations: computed in fp32 if the tensors are fp16 or bf16.

gelu is its tanh approximation. g is the gradient of the result; every tensor of a call has one shape, but bias (dim,).
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn import functional

from flash_attn.call.tracing import is_transformed
from flash_attn.ops.checks import check_tensor


def _exact(x: torch.Tensor) -> torch.Tensor:
    return x.float() if x.dtype in (torch.float16, torch.bfloat16) else x


def gelu_fwd(x: torch.Tensor) -> torch.Tensor:
    return functional.gelu(x, approximate="tanh")


def gelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x."""
    return torch.ops.aten.gelu_backward(_exact(g), _exact(x), approximate="tanh").to(x.dtype)


def bias_gelu(y: torch.Tensor, bias: torch.Tensor) -> torch.Tensor:
    """gelu of y (n, dim) + bias (dim,)."""
    return functional.gelu(_exact(bias) + _exact(y), approximate="tanh").to(y.dtype)


def bias_gelu_back(g: torch.Tensor, y: torch.Tensor, bias: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of y (n, dim) and bias (dim,)."""
    gradient = gelu_bwd(g, _exact(bias) + _exact(y))
    return gradient.to(y.dtype), gradient.sum(0).to(bias.dtype)


bias_gelu_impl, fast_gelu_impl = bias_gelu, gelu_fwd


def relu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x, which passes at 0."""
    return torch.where(x >= 0, g, 0.0).to(x.dtype)


def sqrelu_fwd(x: torch.Tensor) -> torch.Tensor:
    """relu(x) ** 2"""
    return functional.relu(x).square()


def sqrelu_bwd(g: torch.Tensor, x: torch.Tensor) -> torch.Tensor:
    """The gradient of x."""
    return (2.0 * g * functional.relu(x)).to(x.dtype)


def swiglu_fwd(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y"""
    return (functional.silu(_exact(x)) * _exact(y)).to(x.dtype)


def swiglu_bwd(x: torch.Tensor, y: torch.Tensor, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """The gradients of x and y."""
    x_exact, g_exact = _exact(x), _exact(g)
    dx = torch.ops.aten.silu_backward(g_exact * _exact(y), x_exact)
    return dx.to(x.dtype), (functional.silu(x_exact) * g_exact).to(y.dtype)


class SwiGLUFunction(torch.autograd.Function):
    """Keeps x and y alone for the backward, which PyTorch's operations one by one do not."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(x, y)
        return swiglu_fwd(x, y)

    @staticmethod
    def backward(ctx: Any, g: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        x, y = ctx.saved_tensors
        return swiglu_bwd(x, y, g)


def swiglu(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    """silu(x) * y, of one shape, dtype and device."""
    check_tensor("x", x)
    check_tensor("y", y, like=x, shape=tuple(x.shape), dtypes=(x.dtype,))
    return swiglu_fwd(x, y) if is_transformed() else SwiGLUFunction.apply(x, y)
