"""The norm of one branch with the residual that is added before: by the kernels, and by PyTorch, their oracle."""

from __future__ import annotations

from typing import Any

import torch

from flash_attn.call.tracing import arrived, is_traced
from flash_attn.core import device, layer
from flash_attn.core.protocol import launch
from flash_attn.kernels.flags import NORM_HAS_BIAS, NORM_HAS_RESIDUAL, NORM_IS_RMS, NORM_STORE_Z

# Elements in the hands of the backward's programs on one compute unit: as many programs as it runs at once.
_AT_ONCE = 8192


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
    if x.is_cuda and not is_traced(x, residual, weight, bias) and x.numel():
        learns = x.requires_grad or weight.requires_grad or (bias is not None and bias.requires_grad)
        if torch.is_grad_enabled() and (learns or (residual is not None and residual.requires_grad)):
            y, z = _AddNorm.apply(x, residual, weight, bias, eps, kept_type, zero_centered, is_rms)
        else:
            y, z, _, _ = launch_forward(x, residual, weight, bias, eps, kept_type, float(zero_centered), is_rms)
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
        types = (x.dtype, weight.dtype, None if bias is None else bias.dtype)
        ctx.options = (types, residual is not None, eps, shift, is_rms)
        ctx.set_materialize_grads(False)
        return y, z

    @staticmethod
    def backward(ctx: Any, dy: torch.Tensor | None, dz: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
        z, weight, mean, rstd = ctx.saved_tensors
        (x_type, weight_type, bias_type), has_residual, eps, shift, is_rms = ctx.options
        dy = torch.zeros(z.shape, dtype=x_type, device=z.device) if dy is None else arrived(dy)
        dz = None if dz is None else arrived(dz)
        if torch.is_grad_enabled():  # for a second derivative
            total, weight_sum, bias_sum = _gradients(z, weight, dy, dz, eps, shift, is_rms)
            residual_part = total.to(z.dtype) if has_residual else None
            bias_part = None if bias_type is None else bias_sum.to(bias_type)
            return total.to(x_type), residual_part, weight_sum.to(weight_type), bias_part, None, None, None, None
        has_bias = bias_type is not None
        dx, dresidual, sums = launch_backward(z, weight, dy, dz, mean, rstd, shift, has_bias, is_rms, x_type)
        dweight = dbias = None
        if ctx.needs_input_grad[2] or ctx.needs_input_grad[3]:
            dweight, dbias = _totals(sums, weight_type, bias_type)
        return dx, dresidual if has_residual else None, dweight, dbias, None, None, None, None


def _totals(
    sums: torch.Tensor, weight_type: torch.dtype, bias_type: torch.dtype | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """The gradients of weight and bias from their sums over groups of rows, in as few launches as there can be."""
    total = sums.sum(0) if sums.shape[0] > 1 else sums.select(0, 0)
    if bias_type is None or bias_type is weight_type:
        total = total.to(weight_type)
    dweight = total.select(0, 0).to(weight_type)
    return dweight, None if bias_type is None else total.select(0, 1).to(bias_type)


def _gradients(
    z: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    dz: torch.Tensor | None,
    eps: float,
    shift: float,
    is_rms: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The gradients of z, weight and bias by PyTorch's operations, fp32, which autograd can differentiate."""
    centred = z.float()
    if not is_rms:
        centred = centred - centred.mean(-1, keepdim=True)
    rstd = torch.rsqrt(centred.square().mean(-1, keepdim=True) + eps)
    normal = centred * rstd
    dout = dy.float()
    grad = dout * (weight.float() + shift)
    along = normal * (normal * grad).mean(-1, keepdim=True)
    total = (grad - along if is_rms else grad - along - grad.mean(-1, keepdim=True)) * rstd
    if dz is not None:
        total = total + dz.float()
    dweight, dbias = ((dout * x).reshape(-1, z.shape[-1]).sum(0) for x in (normal, 1.0))
    return total, dweight, dbias


def _rows(tensor: torch.Tensor) -> tuple[torch.Tensor, int]:
    """(a tensor with these rows, each dense and the first on 16 bytes; elements from one row to the next)."""
    dim = tensor.shape[-1]
    if tensor.is_contiguous() and not tensor.data_ptr() & 15:
        return tensor, dim
    tensor = layer.dense_rows(tensor.reshape(-1, dim))
    return tensor, tensor.stride(0)


def _vector(weight: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A weight or bias as the kernels take it."""
    return layer.dense_rows(weight if weight.dtype is dtype else weight.to(dtype))


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
    """(y, z or None where it is x, mean, rstd) of the kernel; statistics fp32 (rows,), mean a stand-in if is_rms."""
    shape, x_type = x.shape, x.dtype
    dim = shape[-1]
    rows = x.numel() // dim
    y = torch.empty_like(x, memory_format=torch.contiguous_format)
    x, stride_x = _rows(x)
    suffix, weight_type = _mode(x_type, kept_type, weight)
    weight = _vector(weight, weight_type)
    kept = residual is not None or kept_type is not x_type
    z = torch.empty_like(y, dtype=kept_type) if kept else None
    rstd = x.new_empty(rows, dtype=torch.float32)
    mean = rstd if is_rms else torch.empty_like(rstd)
    flags = (NORM_IS_RMS if is_rms else 0) | (NORM_STORE_Z if kept else 0)
    # The kernel never reads an absent tensor, so a tensor of the same type is passed instead.
    shown = y if z is None else z
    added, stride_added, offset = shown, dim, weight
    if residual is not None:
        added, stride_added = _rows(residual)
        flags |= NORM_HAS_RESIDUAL
    if bias is not None:
        offset, flags = _vector(bias, weight_type), flags | NORM_HAS_BIAS
    kernel, unit = layer.find(f"norm-fwd{suffix}", x, dim, dim, stride_x, stride_added)
    launch(
        kernel,
        (-(-rows // kernel.block_m), 1, 1),
        {
            "x": x, "residual": added, "weight": weight, "bias": offset, "normal": y, "z": shown,
            "mean": mean, "rstd": rstd, "eps": eps, "shift": shift,
            "stride_x": stride_x // unit, "stride_r": stride_added // unit,
            "stride_n": dim // unit, "stride_z": dim // unit, "rows": rows, "dim": dim // unit, "flags": flags,
        },
    )  # fmt: skip
    return y, z, mean, rstd


def launch_backward(
    z: torch.Tensor,
    weight: torch.Tensor,
    dy: torch.Tensor,
    dz: torch.Tensor | None,
    mean: torch.Tensor,
    rstd: torch.Tensor,
    shift: float,
    has_bias: bool,
    is_rms: bool,
    x_type: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(dx, dresidual, sums): the first two one tensor where both have one dtype; sums over groups of rows of the
    gradients of weight and, with has_bias, bias, fp32 (groups, 1 or 2, dim), the same in every run."""
    dim, kept_type = z.shape[-1], z.dtype
    rows = z.numel() // dim
    twice = kept_type is not x_type
    dx = torch.empty_like(z, dtype=x_type, memory_format=torch.contiguous_format)
    dresidual = torch.empty_like(dx, dtype=kept_type) if twice else dx
    (z, stride_z), (dy, stride_dy) = _rows(z), _rows(dy)
    suffix, weight_type = _mode(x_type, kept_type, weight)
    weight = _vector(weight, weight_type)
    flags = (NORM_IS_RMS if is_rms else 0) | (NORM_STORE_Z if twice else 0) | (NORM_HAS_BIAS if has_bias else 0)
    passed, stride_dz = z, stride_z
    if dz is not None:
        passed, stride_dz = _rows(dz)
        flags |= NORM_HAS_RESIDUAL
    kernel, unit = layer.find(f"norm-bwd{suffix}", dx, dim, dim, stride_z, stride_dy, stride_dz)
    blocks = -(-dim // kernel.block_n)
    units = device.of(dx.get_device()).compute_units
    programs = units * (_AT_ONCE // (kernel.block_m * kernel.block_n))
    groups = max(1, min(-(-rows // kernel.block_m), programs // blocks))
    sums = z.new_empty((groups, 2 if has_bias else 1, dim), dtype=torch.float32)
    launch(
        kernel,
        (groups * blocks, 1, 1),
        {
            "z": z, "weight": weight, "dy": dy, "dz": passed, "dx": dx, "dresidual": dresidual,
            "mean": mean, "rstd": rstd, "dweight": sums, "shift": shift,
            "stride_z": stride_z // unit, "stride_dy": stride_dy // unit, "stride_dz": stride_dz // unit,
            "stride_dx": dim // unit, "rows": rows, "dim": dim // unit, "groups": groups, "flags": flags,
        },
    )  # fmt: skip
    return dx, dresidual, sums
