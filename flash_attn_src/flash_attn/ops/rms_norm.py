"""RMS norm under the names of the older fused kernels; all of it is flash_attn.ops.triton.layer_norm, whose names of
arguments the errors give: x for x0, weight for weight0, bias for bias0, eps for epsilon."""

from __future__ import annotations

import torch

from flash_attn.ops.checks import check_int, check_number
from flash_attn.ops.layer_norm import DropoutAddNorm, scaled
from flash_attn.ops.triton.layer_norm import Result, rms_norm_fn


def rms_norm(x: torch.Tensor, weight: torch.Tensor, epsilon: float) -> torch.Tensor:
    """x (..., dim) over its root mean square, times weight (dim,)."""
    y = rms_norm_fn(x, weight, None, eps=epsilon)
    assert isinstance(y, torch.Tensor)
    return y


def dropout_add_rms_norm(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    rowscale: torch.Tensor | None = None,
    layerscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Result:
    """RMS norm of dropout(x0 * rowscale) * layerscale + residual; with prenorm also that sum, with
    return_dropout_mask also what dropout kept (bool, None without dropout)."""
    results = rms_norm_fn(
        scaled(x0, layerscale), weight, bias, residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale,
        prenorm=prenorm, residual_in_fp32=residual_in_fp32, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    if not return_dropout_mask:
        return results
    *values, mask, _ = results
    return (*values, mask)


def dropout_add_rms_norm_parallel_residual(
    x0: torch.Tensor,
    x1: torch.Tensor | None,
    residual: torch.Tensor | None,
    weight0: torch.Tensor,
    bias0: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Result:
    """RMS norms, by both weights, of dropout(x0) + dropout(x1) + residual: (y0, y1 or None), then as above."""
    results = rms_norm_fn(
        x0, weight0, bias0, residual, x1, weight1, bias1, eps=epsilon, dropout_p=dropout_p, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    results = results if isinstance(results, tuple) else (results,)
    return results if weight1 is not None else (results[0], None, *results[1:])


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
