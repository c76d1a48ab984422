"""Upstream's fused functions of dropout, addition and a norm, for layer norm and RMS norm alike.

All of it is flash_attn.ops.triton.layer_norm, whose names of arguments the errors give: x for x0, weight for weight0,
bias for bias0, eps for epsilon.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from flash_attn.core.api import by_name
from flash_attn.ops.checks import check_int, check_number, check_switches, check_tensor
from flash_attn.ops.triton.layer_norm import Result
from flash_attn.ops.triton.layer_norm import newest_layer_norm_fn as layer_norm_fn

_INTS = (torch.int32, torch.int64)
_SWITCHES = dict.fromkeys(("prenorm", "residual_in_fp32", "return_dropout_mask"), False)
_ADD = by_name(
    "x0 residual? weight bias? dropout_p epsilon rowscale? layerscale? prenorm residual_in_fp32 return_dropout_mask",
    dict.fromkeys(("rowscale", "layerscale")) | _SWITCHES,
)
_SUBSET = by_name(
    "x0 residual? weight bias? dropout_p epsilon layerscale? x0_subset? out_subset? rowscale_const out_numrows prenorm "
    "residual_in_fp32 return_dropout_mask",
    dict.fromkeys(("layerscale", "x0_subset", "out_subset")) | {"rowscale_const": 1.0, "out_numrows": 0} | _SWITCHES,
)
_PARALLEL = by_name(
    "x0 x1? residual? weight0 bias0? weight1? bias1? dropout_p epsilon prenorm residual_in_fp32 return_dropout_mask",
    _SWITCHES,
)


def _scaled(x0: torch.Tensor, *scales: torch.Tensor | float | None) -> torch.Tensor:
    """x0 times the scales, in fp32 where there is one, so that their gradients keep their precision."""
    for scale in scales:
        if scale is not None:
            x0 = x0.to(torch.promote_types(x0.dtype, torch.float32)) * scale
    return x0


def _check(x0: torch.Tensor, layerscale: torch.Tensor | None) -> None:
    check_tensor("x", x0)
    if x0.dim() == 0:
        raise ValueError("x: got shape (), wanted (..., dim)")
    if layerscale is not None:
        check_tensor("layerscale", layerscale, like=x0, shape=tuple(x0.shape[-1:]))


def _masks(*masks: torch.Tensor | None, like: torch.Tensor) -> tuple[torch.Tensor, ...]:
    """uint8, 1 where dropout kept an element; all 1 without dropout."""
    ones = torch.ones(like.shape, dtype=torch.uint8, device=like.device)
    return tuple(ones if mask is None else mask.to(torch.uint8) for mask in masks)


def _places(name: str, subset: torch.Tensor | None, x0: torch.Tensor) -> torch.Tensor | None:
    if subset is None:
        return None
    check_tensor(name, subset, like=x0, dtypes=_INTS)
    return subset.reshape(-1).long()


def _flat(residual: torch.Tensor | None, x0: torch.Tensor) -> torch.Tensor | None:
    """The rows of a residual."""
    if residual is None:
        return None
    check_tensor("residual", residual, like=x0)
    if residual.shape[-1:] != x0.shape[-1:]:
        raise ValueError(f"residual: got shape {tuple(residual.shape)}, wanted (..., {x0.shape[-1]})")
    return residual.reshape(-1, x0.shape[-1])


def _results(
    named: dict[str, Any], y: torch.Tensor, z: torch.Tensor, mask: torch.Tensor | None, x0: torch.Tensor
) -> Result:
    """y, then z and the mask where they are asked for."""
    results: tuple[torch.Tensor, ...] = (y, z) if named["prenorm"] else (y,)
    if named["return_dropout_mask"]:
        results += _masks(mask, like=x0)
    return results if len(results) > 1 else y


def functions(is_rms_norm: bool) -> tuple[Callable[..., Result], ...]:
    """(add, subset, parallel residual) of layer norm or RMS norm."""

    def add_norm(x: torch.Tensor, x0: torch.Tensor, named: dict[str, Any], **more: Any) -> tuple[Any, ...]:
        """(y, z, mask) of x, which is x0 scaled, dtypes as for x0."""
        y, z, mask, _ = layer_norm_fn(
            x, named["weight"], named["bias"], eps=named["epsilon"], dropout_p=named["dropout_p"], prenorm=True,
            residual_in_fp32=named["residual_in_fp32"], return_dropout_mask=True, out_dtype=x0.dtype,
            is_rms_norm=is_rms_norm, **more,
        )  # fmt: skip
        assert z is not None
        return y, z if more["residual"] is not None or named["residual_in_fp32"] else z.to(x0.dtype), mask

    def add(named: dict[str, Any]) -> Result:
        """The norm of dropout(x0 * rowscale) * layerscale + residual; with prenorm also that sum, with
        return_dropout_mask also what dropout kept (uint8, shaped as x0)."""
        x0, rowscale, layerscale = (named[each] for each in ("x0", "rowscale", "layerscale"))
        _check(x0, layerscale)
        check_switches(prenorm=named["prenorm"], return_dropout_mask=named["return_dropout_mask"])
        x = _scaled(x0, layerscale, None if rowscale is None else 1.0)
        y, z, mask = add_norm(x, x0, named, residual=named["residual"], rowscale=rowscale)
        return _results(named, y, z, mask, x0)

    def subset(named: dict[str, Any]) -> Result:
        """The same of some rows; results are (rows, *x0.shape[1:]), the mask is shaped as x0.

        x0_subset, out_subset   int (rows,): the place of each row in x0, or in the result, counted from 1; 0 for a row
                                that x0 lacks, or that the result leaves out. None: every row, in its place
        rowscale_const          factor of x0
        out_numrows             rows of the result
        """
        x0, factor = named["x0"], named["rowscale_const"]
        _check(x0, named["layerscale"])
        check_number("rowscale_const", factor, -3.0e38, 3.0e38)
        check_switches(prenorm=named["prenorm"], return_dropout_mask=named["return_dropout_mask"])
        taken, put = (_places(each, named[each], x0) for each in ("x0_subset", "out_subset"))
        rows = _scaled(x0.reshape(-1, x0.shape[-1]), named["layerscale"], None if factor == 1.0 else factor)
        if taken is not None:
            rows = torch.cat((rows.new_zeros(1, rows.shape[-1]), rows)).index_select(0, taken)
        y, z, mask = add_norm(rows, x0, named, residual=_flat(named["residual"], x0))
        if put is not None:
            check_int("out_numrows", named["out_numrows"], 0)
            if put.shape[0] != y.shape[0]:
                raise ValueError(f"out_subset: got {put.shape[0]} places, wanted {y.shape[0]}, one for each row")
            y = y.new_zeros(named["out_numrows"] + 1, y.shape[-1]).index_copy(0, put, y)[1:]
        if mask is not None and taken is not None:
            whole = mask.new_ones(x0.numel() // x0.shape[-1] + 1, x0.shape[-1])
            mask = whole.index_copy(0, taken, mask)[1:]
        y, z = (each.reshape(-1, *x0.shape[1:]) for each in (y, z))
        return _results(named, y, z, None if mask is None else mask.reshape(x0.shape), x0)

    def parallel_residual(named: dict[str, Any]) -> Result:
        """The norms, by both weights, of dropout(x0) + dropout(x1) + residual: (y0, y1 or None), with prenorm also that
        sum, with return_dropout_mask also what dropout kept of x0 and of x1."""
        x0, weight, bias, epsilon = (named.pop(each) for each in ("x0", "weight0", "bias0", "epsilon"))
        result = layer_norm_fn(x0, weight, bias, eps=epsilon, is_rms_norm=is_rms_norm, **named)
        results = result if isinstance(result, tuple) else (result,)
        if named["weight1"] is None:
            results = (results[0], None, *results[1:])
        return (*results[:-2], *_masks(*results[-2:], like=x0)) if named["return_dropout_mask"] else results

    name = "rms_norm" if is_rms_norm else "layer_norm"
    result = []
    for signature, function in ((_ADD, add), (_SUBSET, subset), (_PARALLEL, parallel_residual)):
        suffix = "" if function is add else f"_{function.__name__}"
        function.__name__ = function.__qualname__ = f"dropout_add_{name}{suffix}"
        function.__module__ = f"flash_attn.ops.{name}"
        result.append(signature(function))
    return tuple(result)


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
