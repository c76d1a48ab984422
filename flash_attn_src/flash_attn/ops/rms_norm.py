"""RMS norm under the names of upstream's fused kernels."""

from __future__ import annotations

import torch

from flash_attn.ops.checks import check_int, check_number
from flash_attn.ops.dropout_add_norm import DropoutAddNorm, functions
from flash_attn.ops.triton.layer_norm import rms_norm_fn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x (..., dim) over its root mean square, times weight (dim,)."""
    y = rms_norm_fn(x, weight, None, eps=epsilon)
    assert isinstance(y, torch.Tensor)
    return y


dropout_add_rms_norm, dropout_add_rms_norm_subset, dropout_add_rms_norm_parallel_residual = functions(is_rms_norm=True)


class RMSNorm(torch.nn.Module):
    """RMS norm of the last dimension, `hidden_size` elements."""

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        self.eps = check_number("eps", eps, 0.0, float("inf"), below=True)
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return rms_norm(x, self.weight, self.eps)


class DropoutAddRMSNorm(DropoutAddNorm):
    """RMS norm of dropout(x0) + residual."""

    norm = staticmethod(dropout_add_rms_norm)
    has_bias = False
