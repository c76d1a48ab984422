"""Layer norm and RMS norm of rows, fused with the addition of a residual.

GPU tensors are served by kernels: one pass adds and normalises forward, two backward. CPU tensors, and everything
under torch.compile, by PyTorch's own operations, which the compiler fuses and which are the kernels' oracle.
Dropout, rowscale and the second branch (x1) are PyTorch operations before the kernel everywhere.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from flash_attn.api import parameters
from flash_attn.custom_ops import is_traced
from flash_attn.kernels.flags import NORM_HAS_BIAS, NORM_HAS_RESIDUAL, NORM_IS_RMS, NORM_STORE_Z
from flash_attn.ops.checks import FLOATS, check_number, check_tensor
from flash_attn.runtime import layer

# Programs that share the rows when gradients of weights are summed: enough for the largest GPUs.
_SUMMING_PROGRAMS = 1024

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

    x, x1, residual   (..., dim); weight, bias, weight1, bias1 (dim,); rowscale (...)
    weight1, bias1    a second y of the same z
    prenorm           z is returned too, in the residual's dtype: that of residual, else fp32 if residual_in_fp32,
                      else x's
    zero_centered_weight  1 is added to the weights
    is_rms_norm       divides by the root mean square, subtracts no mean
    out_dtype         of y; default x's. out, residual_out: tensors that y and z are written to

    Returns y; then the second y, z and (mask, mask of x1) of what dropout kept (bool, None without dropout) where
    they are asked for. Raises TypeError or ValueError naming the argument, what came and what was wanted.
    """
    _check(x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, out_dtype, out, residual_out)
    kept_type = residual.dtype if residual is not None else torch.float32 if residual_in_fp32 else x.dtype
    result_type = x.dtype if out_dtype is None else out_dtype
    wide = torch.promote_types(x.dtype, torch.float32)
    if rowscale is not None:
        x = x * rowscale.unsqueeze(-1).to(x.dtype)
    x, mask = _dropout(x, dropout_p)
    x1, mask1 = (None, None) if x1 is None else _dropout(x1, dropout_p)
    if x1 is not None:
        residual = x1.to(wide) if residual is None else x1.to(wide) + residual.to(wide)
    if x1 is not None or weight1 is not None or torch.promote_types(result_type, x.dtype) is not x.dtype:
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
    if out is not None:
        results[0] = out.copy_(results[0])
    if residual_out is not None:
        z = residual_out.copy_(z)
    if prenorm:
        results.append(z)
    if return_dropout_mask:
        results += [mask, mask1]
    return results[0] if len(results) == 1 else tuple(results)


_newest = layer_norm_fn
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
    return _newest(
        x, weight, bias, residual, x1, weight1, bias1, eps, dropout_p, rowscale, prenorm, residual_in_fp32,
        zero_centered_weight, True, return_dropout_mask, out_dtype, out, residual_out,
    )  # fmt: skip


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
        self.eps = eps
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
        return _newest(
            x, self.weight, None, residual, None, None, None, self.eps, dropout_p, None, prenorm, residual_in_fp32,
            self.zero_centered_weight, True, False, None, None, None,
        )  # fmt: skip


def add_norm(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kept_type: torch.dtype,
    zero_centered: bool,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(y in x's dtype, z = x + residual in kept_type, which is x's dtype or fp32, and residual's)."""
    if x.is_cuda and not is_traced(x) and x.numel():
        y, z = _AddNorm.apply(x, residual, weight, bias, eps, kept_type, zero_centered, is_rms)
        return y, x if z is None else z
    return reference(x, residual, weight, bias, eps, kept_type, zero_centered, is_rms)


def reference(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kept_type: torch.dtype,
    zero_centered: bool,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """add_norm by PyTorch's operations, differentiable; in fp32, for fp64 in fp64."""
    wide = torch.promote_types(x.dtype, torch.float32)
    z = x.to(wide) if residual is None else x.to(wide) + residual.to(wide)
    centred = z if is_rms else z - z.mean(-1, keepdim=True)
    y = centred * torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps) * (weight.to(wide) + float(zero_centered))
    if bias is not None:
        y = y + bias.to(wide)
    return y.to(x.dtype), z.to(kept_type)


class _AddNorm(torch.autograd.Function):
    """add_norm by the kernels; z is None where it would be x."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        kept_type: torch.dtype,
        zero_centered: bool,
        is_rms: bool,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        shift = float(zero_centered)
        y, z, mean, rstd = launch_forward(x, residual, weight, bias, eps, kept_type, shift, is_rms)
        ctx.save_for_backward(x if z is None else z, weight, mean, rstd)
        ctx.has_residual, ctx.has_bias = residual is not None, bias is not None
        ctx.types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.shift, ctx.is_rms = shift, is_rms
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, dy: torch.Tensor | None, dz: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        z, weight, mean, rstd = ctx.saved_tensors
        x_type, weight_type, bias_type = ctx.types
        if dy is None:
            dy = torch.zeros(z.shape, dtype=x_type, device=z.device)
        dx, dresidual = launch_backward(z, weight, dy, dz, mean, rstd, ctx.shift, ctx.is_rms, x_type)
        dweight = dbias = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            dweight, dbias = launch_weights(z, dy, mean, rstd, ctx.has_bias, ctx.is_rms)
            dweight = dweight.to(weight_type)
            dbias = dbias.to(bias_type) if ctx.has_bias else None
        return dx, dresidual if ctx.has_residual else None, dweight, dbias, *(None,) * 4


def _rows(tensor: torch.Tensor) -> torch.Tensor:
    """(rows, dim), each row dense and the first on 16 bytes."""
    return layer.dense_rows(tensor.reshape(-1, tensor.shape[-1]))


def _mode(x_type: torch.dtype, kept_type: torch.dtype, weight: torch.Tensor) -> tuple[str, torch.dtype]:
    """(suffix of the operation, dtype that it takes weights in)."""
    if kept_type is not x_type:
        return "-r32", torch.float32
    if weight.dtype is x_type or x_type is torch.float32:
        return "", x_type
    return "-w32", torch.float32


def launch_forward(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kept_type: torch.dtype,
    shift: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor]:
    """(y, z or None where it is x, mean, rstd) of the kernel; statistics fp32 (rows,), mean not set if is_rms."""
    shape = x.shape
    x = _rows(x)
    rows, dim = x.shape
    suffix, weight_type = _mode(x.dtype, kept_type, weight)
    weight = layer.dense_rows(weight.to(weight_type))
    y = torch.empty((rows, dim), dtype=x.dtype, device=x.device)
    kept = residual is not None or kept_type is not x.dtype
    z = torch.empty((rows, dim), dtype=kept_type, device=x.device) if kept else None
    mean, rstd = (torch.empty(rows, dtype=torch.float32, device=x.device) for _ in range(2))
    flags = (NORM_IS_RMS if is_rms else 0) | (NORM_STORE_Z if kept else 0)
    # What is absent is never read: a tensor of its type stands in.
    added, shown, offset = y if z is None else z, y if z is None else z, weight
    if residual is not None:
        added, flags = _rows(residual), flags | NORM_HAS_RESIDUAL
    if bias is not None:
        offset, flags = layer.dense_rows(bias.to(weight_type)), flags | NORM_HAS_BIAS
    kernel, unit, device, stream = layer.find(f"norm-fwd{suffix}", x, dim, dim, x.stride(0), added.stride(0))
    pointer = kernel.pointer
    kernel.launch(
        device, stream, rows, 1, 1,
        pointer(x), pointer(added), pointer(weight), pointer(offset), pointer(y), pointer(shown), pointer(mean),
        pointer(rstd), eps, shift, x.stride(0) // unit, added.stride(0) // unit, dim // unit, dim // unit,
        dim // unit, flags,
    )  # fmt: skip
    return y.view(shape), None if z is None else z.view(shape), mean, rstd


def launch_backward(
    z: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    dz: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    shift: float,
    is_rms: bool,
    x_type: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dx, dresidual): one tensor where both have one dtype."""
    shape = z.shape
    z, dy = _rows(z), _rows(dy)
    rows, dim = z.shape
    suffix, weight_type = _mode(x_type, z.dtype, weight)
    weight = layer.dense_rows(weight.to(weight_type))
    dx = torch.empty((rows, dim), dtype=x_type, device=z.device)
    twice = z.dtype is not x_type
    dresidual = torch.empty((rows, dim), dtype=z.dtype, device=z.device) if twice else dx
    flags = (NORM_IS_RMS if is_rms else 0) | (NORM_STORE_Z if twice else 0)
    passed = z
    if dz is not None:
        passed, flags = _rows(dz), flags | NORM_HAS_RESIDUAL
    sizes = (z.stride(0), dy.stride(0), passed.stride(0), dim)
    kernel, unit, device, stream = layer.find(f"norm-bwd{suffix}", dx, dim, dim, *sizes)
    pointer = kernel.pointer
    kernel.launch(
        device, stream, rows, 1, 1,
        pointer(z), pointer(weight), pointer(dy), pointer(passed), pointer(dx), pointer(dresidual), pointer(mean),
        pointer(rstd), shift, *(size // unit for size in sizes), dim // unit, flags,
    )  # fmt: skip
    return dx.view(shape), dresidual.view(shape)


def launch_weights(
    z: torch.Tensor, dy: torch.Tensor, mean: torch.Tensor, rstd: torch.Tensor, has_bias: bool, is_rms: bool
) -> tuple[torch.Tensor, torch.Tensor]:
    """(dweight, dbias), fp32 (dim,); every sum has a fixed order. dbias is not set without has_bias."""
    z, dy = _rows(z), _rows(dy)
    rows, dim = z.shape
    op = "norm-bwd-weights" if z.dtype is dy.dtype else "norm-bwd-weights-r32"
    kernel, unit, device, stream = layer.find(op, dy, dim, dim, z.stride(0), dy.stride(0))
    blocks = -(-dim // kernel.block_n)
    groups = max(1, min(-(-rows // kernel.block_m), _SUMMING_PROGRAMS // blocks))
    dweight, dbias = (torch.empty((groups, dim), dtype=torch.float32, device=z.device) for _ in range(2))
    pointer = kernel.pointer
    kernel.launch(
        device, stream, blocks * groups, 1, 1,
        pointer(z), pointer(dy), pointer(mean), pointer(rstd), pointer(dweight), pointer(dbias),
        z.stride(0) // unit, dy.stride(0) // unit, rows, dim // unit, groups,
        (NORM_HAS_BIAS if has_bias else 0) | (NORM_IS_RMS if is_rms else 0),
    )  # fmt: skip
    return dweight.sum(0), dbias.sum(0)


def _dropout(x: torch.Tensor, p: float) -> tuple[torch.Tensor, torch.Tensor | None]:
    """(x with elements dropped and the others scaled up, what was kept)."""
    if p == 0.0:
        return x, None
    kept = torch.rand(x.shape, device=x.device) >= p
    return torch.where(kept, x, 0.0) * (1.0 / (1.0 - p)), kept


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
    out_dtype: torch.dtype | None,
    out: torch.Tensor | None,
    residual_out: torch.Tensor | None,
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
    for name, tensor in (("residual", residual), ("x1", x1), ("out", out), ("residual_out", residual_out)):
        if tensor is not None:
            check_tensor(name, tensor, like=x, shape=tuple(x.shape))
    if rowscale is not None:
        check_tensor("rowscale", rowscale, like=x, shape=tuple(x.shape[:-1]))
    check_number("eps", eps, 0.0, float("inf"), below=True)
    check_number("dropout_p", dropout_p, 0.0, 1.0, below=True)
    if out_dtype is not None and out_dtype not in (*FLOATS, torch.float64):
        raise TypeError(f"out_dtype: got {out_dtype!r}, wanted a floating-point torch.dtype")
