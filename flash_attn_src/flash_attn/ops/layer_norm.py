"""Layer norm under the names of upstream's fused kernels."""

from __future__ import annotations

import torch

from flash_attn.ops.dropout_add_norm import DropoutAddNorm, functions
from flash_attn.ops.triton.layer_norm import layer_norm_fn


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Layer norm of x (..., dim), times weight (dim,), plus bias (dim,)."""
    y = layer_norm_fn(x, weight, bias, eps=epsilon)
    assert isinstance(y, torch.Tensor)
    return y


dropout_add_layer_norm, dropout_add_layer_norm_subset, dropout_add_layer_norm_parallel_residual = functions(
    is_rms_norm=False
)


class DropoutAddLayerNorm(DropoutAddNorm):
    """Layer norm of dropout(x0) + residual."""

    norm = staticmethod(dropout_add_layer_norm)
    has_bias = True
