"""Layer norm under the names of upstream's fused kernels; all of it is flash_attn.ops.triton.layer_norm, whose names of
arguments the errors give: x for x0, weight for weight0, bias for bias0, eps for epsilon."""

from __future__ import annotations

from collections.abc import Callable

import torch

from flash_attn.ops.checks import check_int, check_number, check_switches, check_tensor
from flash_attn.ops.triton.layer_norm import Result, layer_norm_fn

_INTS = (torch.int32, torch.int64)


def layer_norm(x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, epsilon: float) -> torch.Tensor:
    """Layer norm of x (..., dim), times weight (dim,), plus bias (dim,)."""
    y = layer_norm_fn(x, weight, bias, eps=epsilon)
    assert isinstance(y, torch.Tensor)
    return y


def scaled(x0: torch.Tensor, layerscale: torch.Tensor | None) -> torch.Tensor:
    """x0 times layerscale (dim,), which commutes with dropout."""
    if layerscale is None:
        return x0
    check_tensor("x", x0)
    check_tensor("layerscale", layerscale, like=x0, shape=tuple(x0.shape[-1:]))
    return x0 * layerscale.to(x0.dtype)


def _masks(*masks: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """uint8, 1 where dropout kept an element; all 1 without dropout."""
    ones = torch.ones(like.shape, dtype=torch.uint8, device=like.device)
    return tuple(ones if mask is None else mask.to(torch.uint8) for mask in masks)


def dropout_add_layer_norm(
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
    """Layer norm of dropout(x0 * rowscale) * layerscale + residual; with prenorm also that sum, with
    return_dropout_mask also what dropout kept (uint8, shaped as x0)."""
    results = layer_norm_fn(
        scaled(x0, layerscale), weight, bias, residual, eps=epsilon, dropout_p=dropout_p, rowscale=rowscale,
        prenorm=prenorm, residual_in_fp32=residual_in_fp32, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    if not return_dropout_mask:
        return results
    *values, mask, _ = results
    return (*values, *_masks(mask, like=x0))


def dropout_add_layer_norm_subset(
    x0: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    dropout_p: float,
    epsilon: float,
    layerscale: torch.Tensor | None = None,
    x0_subset: torch.Tensor | None = None,
    out_subset: torch.Tensor | None = None,
    rowscale_const: float = 1.0,
    out_numrows: int = 0,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    return_dropout_mask: bool = False,
) -> Result:
    """dropout_add_layer_norm of some rows, whose results are (rows, dim).

    x0_subset, out_subset   int (rows,): the place of each row in x0, or in the result, counted from 1; 0 for a row that
                            x0 lacks, or that the result leaves out. None: every row, in its place
    rowscale_const          factor of x0
    out_numrows             rows of the result
    """
    check_tensor("x", x0)
    check_number("rowscale_const", rowscale_const, -3.0e38, 3.0e38)
    rows = x0.reshape(-1, x0.shape[-1]) * rowscale_const
    if x0_subset is not None:
        check_tensor("x0_subset", x0_subset, like=x0, dtypes=_INTS)
        places = x0_subset.reshape(-1).long()
        rows = torch.cat((rows.new_zeros(1, rows.shape[-1]), rows)).index_select(0, places)
    flat = None if residual is None else residual.reshape(-1, residual.shape[-1])
    y: torch.Tensor | None
    results: tuple[torch.Tensor | None, ...]
    y, z, mask, _ = layer_norm_fn(
        scaled(rows, layerscale), weight, bias, flat, eps=epsilon, dropout_p=dropout_p, prenorm=True,
        residual_in_fp32=residual_in_fp32, return_dropout_mask=True,
    )  # fmt: skip
    assert y is not None
    if out_subset is not None:
        check_tensor("out_subset", out_subset, like=x0, dtypes=_INTS)
        check_int("out_numrows", out_numrows, 0)
        kept = out_subset.reshape(-1).long()
        y = y.new_zeros(out_numrows + 1, y.shape[-1]).index_copy(0, kept, y)[1:]
    results = (y, z) if prenorm else (y,)
    if return_dropout_mask:
        results += _masks(mask, like=rows)
    return y if len(results) == 1 else results


def dropout_add_layer_norm_parallel_residual(
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
    """Layer norms, by both weights, of dropout(x0) + dropout(x1) + residual: (y0, y1 or None), with prenorm also that
    sum, with return_dropout_mask also what dropout kept of x0 and of x1."""
    result = layer_norm_fn(
        x0, weight0, bias0, residual, x1, weight1, bias1, eps=epsilon, dropout_p=dropout_p, prenorm=prenorm,
        residual_in_fp32=residual_in_fp32, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    results = result if isinstance(result, tuple) else (result,)
    if weight1 is None:
        results = (results[0], None, *results[1:])
    return (*results[:-2], *_masks(*results[-2:], like=x0)) if return_dropout_mask else results


class DropoutAddNorm(torch.nn.Module):
    """A norm of dropout(x0) + residual: `norm`, with a bias or None in its place."""

    norm: Callable[..., Result]
    has_bias: bool
    bias: torch.nn.Parameter | None

    def __init__(
        self,
        hidden_size: int,
        prenorm: bool = False,
        p: float = 0.0,
        eps: float = 1e-5,
        residual_in_fp32: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        check_switches(prenorm=prenorm, residual_in_fp32=residual_in_fp32)
        self.prenorm = prenorm
        self.p = check_number("p", p, 0.0, 1.0, below=True)
        self.eps = check_number("eps", eps, 0.0, float("inf"), below=True)
        self.residual_in_fp32 = residual_in_fp32
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        bias = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype)) if self.has_bias else None
        self.register_parameter("bias", bias)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.ones_(self.weight)
        if self.bias is not None:
            torch.nn.init.zeros_(self.bias)

    def forward(self, x0: torch.Tensor, residual: torch.Tensor | None = None) -> Result:
        return self.norm(
            x0, residual, self.weight, self.bias, self.p if self.training else 0.0, self.eps,
            prenorm=self.prenorm, residual_in_fp32=self.residual_in_fp32,
        )  # fmt: skip


class DropoutAddLayerNorm(DropoutAddNorm):
    """Layer norm of dropout(x0) + residual."""

    norm = staticmethod(dropout_add_layer_norm)
    has_bias = True
