"""Layer norm and RMS norm of rows, fused with the addition of a residual.

GPU tensors are served by kernels: one that adds and normalises forward, one backward. CPU tensors, and everything
under torch.compile, by PyTorch's own operations, which the compiler fuses and which are the kernels' oracle.
Dropout, rowscale and the second branch (x1) are PyTorch operations before the kernel everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.nn.functional import linear

from flash_attn.call.memory import check_outputs, refuse_shared
from flash_attn.call.tracing import is_traced
from flash_attn.core.api import by_name, parameters
from flash_attn.ops.checks import FLOATS, check_int, check_number, check_switches, check_tensor
from flash_attn.ops.triton.add_norm import add_norm, reference

Result = torch.Tensor | tuple[torch.Tensor | None, ...]


_RELEASES = {"zero_centered_weight": "2.8", "out_dtype": "2.8", "out": "2.7", "residual_out": "2.7"}


def layer_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    is_rms_norm: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> Result:
    """y = norm(z) * weight + bias with z = dropout(x * rowscale) + dropout(x1) + residual.

    x, x1, residual   (..., dim); weight, bias, weight1, bias1 (dim,); rowscale (...),
                      or any shape of as many elements
    weight1, bias1    a second y of the same z
    prenorm           z is returned too, in the dtype of residual; without one in fp32 if residual_in_fp32,
                      else x's
    zero_centered_weight  1 is added to the weights
    is_rms_norm       divides by the root mean square, subtracts no mean
    out_dtype         of y; default x's
    out, residual_out tensors that y and z are written to, without a history: gradients go through what is returned,
                      which shares their memory (under torch.compile it has their values)

    Returns y; then the second y, z and (mask, mask of x1) of what dropout kept (bool, None without dropout) where
    they are asked for. Raises TypeError or ValueError naming the argument, what came and what was wanted.
    """
    _check(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale)
    inputs = {
        "x": x, "weight": weight, "bias": bias, "residual": residual, "x1": x1, "weight1": weight1, "bias1": bias1,
        "rowscale": rowscale,
    }  # fmt: skip
    shared = _check_results(x, inputs, out_dtype, out, residual_out)
    check_switches(
        prenorm=prenorm, residual_in_fp32=residual_in_fp32, zero_centered_weight=zero_centered_weight,
        is_rms_norm=is_rms_norm, return_dropout_mask=return_dropout_mask,
    )  # fmt: skip
    x_type = x.dtype
    kept_type = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x_type
    result_type = x_type if out_dtype is None else out_dtype
    wide = torch.float64 if x_type is torch.float64 else torch.float32
    if rowscale is not None:
        x = x * rowscale.reshape(*x.shape[:-1], 1).to(x_type)
    x, mask = _dropout(x, dropout_p)
    x1, mask1 = (None, None) if x1 is None else _dropout(x1, dropout_p)
    if x1 is not None:
        residual = x1.to(wide) if residual is None else x1.to(wide) + residual.to(wide)
    exact = result_type is x_type or torch.promote_types(result_type, x_type) is x_type
    if x1 is not None or weight1 is not None or not exact:
        x = x.to(wide)
    # The kernels keep z in x's dtype or in fp32.
    inner_type = x.dtype if kept_type is x.dtype else wide
    if residual is not None:
        residual = residual.to(inner_type)
    y, z = add_norm(x, residual, weight, bias, eps, inner_type, zero_centered_weight, is_rms_norm)
    results: list[Any] = [y.to(result_type)]
    if weight1 is not None:
        y1, _ = add_norm(z, None, weight1, bias1, eps, z.dtype, zero_centered_weight, is_rms_norm)
        results.append(y1.to(result_type))
    z = z.to(kept_type)
    if shared:  # z may be x itself
        z = z.clone()
    if out is not None:
        results[0] = _written(out, results[0])
    if residual_out is not None:
        z = _written(residual_out, z)
    if prenorm:
        results.append(z)
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)


newest_layer_norm_fn = layer_norm_fn
layer_norm_fn = parameters(since=_RELEASES)(layer_norm_fn)


@parameters(since=_RELEASES)
def rms_norm_fn(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    x1: torch.Tensor | None = None,
    weight1: torch.Tensor | None = None,
    bias1: torch.Tensor | None = None,
    eps: float = 1e-6,
    dropout_p: float = 0.0,
    rowscale: torch.Tensor | None = None,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    zero_centered_weight: bool = False,
    return_dropout_mask: bool = False,
    out_dtype: torch.dtype | None = None,
    out: torch.Tensor | None = None,
    residual_out: torch.Tensor | None = None,
) -> Result:
    """layer_norm_fn with is_rms_norm."""
    return newest_layer_norm_fn(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


def layer_norm_linear_fn(
    x: torch.Tensor,
    norm_weight: torch.Tensor,
    norm_bias: torch.Tensor | None,
    linear_weight: torch.Tensor,
    linear_bias: torch.Tensor | None,
    residual: torch.Tensor | None = None,
    eps: float = 1e-6,
    prenorm: bool = False,
    residual_in_fp32: bool = False,
    is_rms_norm: bool = False,
) -> Result:
    """linear(y) of layer_norm_fn's y, or (linear(y), z) if prenorm. linear_weight is (features, dim).

    The product is in x's dtype, under autocast in autocast's dtype. y is kept for the backward.
    """
    check_switches(prenorm=prenorm)
    check_tensor("x", x)
    if x.dim() == 0:
        raise ValueError("x: got shape (), wanted (..., dim)")
    check_tensor("linear_weight", linear_weight, ("features", "dim"), like=x)
    if linear_weight.shape[1] != x.shape[-1]:
        raise ValueError(f"linear_weight: got shape {tuple(linear_weight.shape)}, wanted (features, {x.shape[-1]})")
    if linear_bias is not None:
        check_tensor("linear_bias", linear_bias, like=x, shape=(linear_weight.shape[0],))
    kind = x.device.type
    dtype = torch.get_autocast_dtype(kind) if torch.is_autocast_enabled(kind) else x.dtype
    y, z = newest_layer_norm_fn(
        x, norm_weight, norm_bias, residual, None, None, None, eps, 0.0, None, True, residual_in_fp32, False,
        is_rms_norm, False, dtype,
    )  # fmt: skip
    assert y is not None  # masks alone may be None
    out = linear(y, linear_weight.to(dtype), None if linear_bias is None else linear_bias.to(dtype))
    return (out, z) if prenorm else out


def _reference(is_rms: bool, arguments: dict[str, Any]) -> Result:
    """What the two references share: the parts of layer_norm_fn, each rounded to x's dtype unless upcast."""
    names = ("x", "weight", "bias", "residual", "x1", "weight1", "bias1", "eps", "dropout_p", "rowscale")
    _check(**{name: arguments[name] for name in names})
    for name in ("dropout_mask", "dropout_mask1"):
        if arguments[name] is not None:
            x = arguments["x"]
            check_tensor(name, arguments[name], like=x, shape=tuple(x.shape), dtypes=(torch.bool,))
    check_switches(**{name: arguments[name] for name in ("prenorm", "zero_centered_weight", "upcast")})
    upcast = arguments.pop("upcast")
    dtype = arguments["x"].dtype
    if upcast:
        arguments = {name: a.float() if isinstance(a, torch.Tensor) and a.is_floating_point() else a
                     for name, a in arguments.items()}  # fmt: skip
    x, x1, residual, rowscale = (arguments[name] for name in ("x", "x1", "residual", "rowscale"))
    if rowscale is not None:
        x = x * rowscale.reshape(*x.shape[:-1], 1)
    p = arguments["dropout_p"]
    x = _dropped(x, p, arguments["dropout_mask"])
    if x1 is not None:
        x = x + _dropped(x1, p, arguments["dropout_mask1"])
    z = x if residual is None else (x + residual).to(x.dtype)
    results = []
    for weight, bias in ((arguments["weight"], arguments["bias"]), (arguments["weight1"], arguments["bias1"])):
        if weight is not None:
            y, _ = reference(
                z, None, weight, bias, arguments["eps"], z.dtype, arguments["zero_centered_weight"], is_rms
            )
            results.append(y.to(dtype))
    if arguments["prenorm"]:
        results.append(z)
    return results[0] if len(results) == 1 else tuple(results)


def _dropped(x: torch.Tensor, p: float, kept: torch.Tensor | None) -> torch.Tensor:
    return _dropout(x, p)[0] if kept is None or p == 0.0 else torch.where(kept, x, 0.0) / (1.0 - p)


_of_reference = by_name(
    "x weight bias? residual? x1? weight1? bias1? eps dropout_p rowscale? prenorm zero_centered_weight dropout_mask? "
    "dropout_mask1? upcast",
    dict.fromkeys(("residual", "x1", "weight1", "bias1", "rowscale", "dropout_mask", "dropout_mask1"))
    | dict.fromkeys(("prenorm", "zero_centered_weight", "upcast"), False)
    | {"eps": 1e-6, "dropout_p": 0.0},
)


@parameters(since=_RELEASES)
@_of_reference
def layer_norm_ref(named: dict[str, Any]) -> Result:
    """layer_norm_fn by PyTorch's operations, on the dropout masks that it returned; upcast: in fp32 throughout."""
    return _reference(False, named)


@parameters(since=_RELEASES)
@_of_reference
def rms_norm_ref(named: dict[str, Any]) -> Result:
    """layer_norm_ref with the root mean square in place of mean and variance."""
    return _reference(True, named)


class RMSNorm(torch.nn.Module):
    """RMS norm of the last dimension, `hidden_size` elements, with the addition of a residual before.

    zero_centered_weight: the weight is kept less 1.
    """

    @parameters(since={"zero_centered_weight": "2.8"})
    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        dropout_p: float = 0.0,
        zero_centered_weight: bool = False,
        device: torch.device | str | None = None,
        dtype: torch.dtype | None = None,
    ) -> None:
        super().__init__()
        check_int("hidden_size", hidden_size, 1)
        check_switches(zero_centered_weight=zero_centered_weight)
        self.eps = check_number("eps", eps, 0.0, float("inf"), below=True)
        self.dropout_p = check_number("dropout_p", dropout_p, 0.0, 1.0, below=True)
        self.zero_centered_weight = zero_centered_weight
        self.weight = torch.nn.Parameter(torch.empty(hidden_size, device=device, dtype=dtype))
        self.register_parameter("bias", None)
        self.reset_parameters()

    def reset_parameters(self) -> None:
        torch.nn.init.constant_(self.weight, 0.0 if self.zero_centered_weight else 1.0)

    def forward(
        self,
        x: torch.Tensor,
        residual: torch.Tensor | None = None,
        prenorm: bool = False,
        residual_in_fp32: bool = False,
    ) -> Result:
        """y, or (y, x + residual) if prenorm."""
        dropout_p = self.dropout_p if self.training else 0.0
        return newest_layer_norm_fn(
            x, self.weight, None, residual, None, None, None, self.eps, dropout_p, None, prenorm, residual_in_fp32,
            self.zero_centered_weight, True, False, None, None, None,
        )  # fmt: skip


def _dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Returns x with dropout (kept elements scaled up), and the mask of kept elements."""
    if p == 0.0:
        return x, None
    kept = torch.rand(x.shape, dtype=torch.float32, device=x.device) >= p
    return torch.where(kept, x, 0.0) * (1.0 / (1.0 - p)), kept


class _Written(torch.autograd.Function):
    """An alias of a buffer that was filled with a tensor, with that tensor's gradient."""

    @staticmethod
    def forward(ctx: Any, buffer: torch.Tensor, filling: torch.Tensor) -> torch.Tensor:
        ctx.dtype = filling.dtype
        return buffer.copy_(filling).detach()

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[None, torch.Tensor]:
        return None, gradient.to(ctx.dtype)


def _written(buffer: torch.Tensor, filling: torch.Tensor) -> torch.Tensor:
    """filling in the memory and dtype of buffer, which gets no history: the next call fills it again."""
    if is_traced(filling):
        buffer.detach().copy_(filling.detach())
        return filling.to(buffer.dtype)
    if not (torch.is_grad_enabled() and filling.requires_grad):
        with torch.no_grad():
            return buffer.copy_(filling)
    return _Written.apply(buffer, filling)


def _check(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    x1: torch.Tensor | None,
    weight1: torch.Tensor | None,
    bias1: torch.Tensor | None,
    eps: float,
    dropout_p: float,
    rowscale: torch.Tensor | None,
) -> None:
    check_tensor("x", x)
    if x.dim() == 0 or x.shape[-1] == 0:
        raise ValueError(f"x: got shape {tuple(x.shape)}, wanted (..., dim)")
    check_tensor("weight", weight, like=x, shape=(x.shape[-1],))
    for name, vector in (("bias", bias), ("weight1", weight1), ("bias1", bias1)):
        if vector is not None:
            check_tensor(name, vector, like=x, shape=(x.shape[-1],))
    if bias1 is not None and weight1 is None:
        raise ValueError("bias1: got a tensor, wanted None without weight1")
    for name, tensor in (("residual", residual), ("x1", x1)):
        if tensor is not None:
            check_tensor(name, tensor, like=x, shape=tuple(x.shape))
    if rowscale is not None:
        check_tensor("rowscale", rowscale, like=x)
        if rowscale.numel() * x.shape[-1] != x.numel():
            raise ValueError(f"rowscale: got shape {tuple(rowscale.shape)}, wanted {tuple(x.shape[:-1])}")
    check_number("eps", eps, 0.0, float("inf"), below=True)
    check_number("dropout_p", dropout_p, 0.0, 1.0, below=True)


def _check_results(
    x: torch.Tensor,
    inputs: dict[str, torch.Tensor | None],
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
) -> bool:
    """Whether a result is written into the memory of an input, which a backward must not need."""
    for name, tensor in (("out", out), ("residual_out", residual_out)):
        if tensor is not None:
            check_tensor(name, tensor, like=x, shape=tuple(x.shape))
    if out_dtype is not None and out_dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"out_dtype: got {out_dtype!r}, wanted a floating-point torch.dtype")
    outputs = {"out": out, "residual_out": residual_out}
    if torch.is_grad_enabled() and any(y is not None and y.requires_grad for y in inputs.values()):
        refuse_shared(outputs, inputs)
        return False
    return bool(check_outputs(outputs, inputs))
