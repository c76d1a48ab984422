"""Layer norm and RMS norm of rows, with the residual that is added before.

In every kernel rows are dense; row strides and dim come in units of UNIT elements, whole 16 bytes or 1. `flags` holds
the bits NORM_* of flash_attn.kernels.flags; a pointer without its bit is never followed. Statistics are fp32.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import flags

HAS_BIAS = tl.constexpr(flags.NORM_HAS_BIAS)
HAS_RESIDUAL = tl.constexpr(flags.NORM_HAS_RESIDUAL)
STORE_Z = tl.constexpr(flags.NORM_STORE_Z)
IS_RMS = tl.constexpr(flags.NORM_IS_RMS)

_RUNTIME_ARGUMENTS = (
    "eps", "shift", "rows", "dim", "stride_x", "stride_r", "stride_n", "stride_z", "stride_dy", "stride_dz",
    "stride_dx", "groups", "flags",
)  # fmt: skip


@triton.jit
def _input(x, residual, start, dim, flags, BLOCK_N: tl.constexpr):
    """Columns from `start` of a row that is normalised: (x + residual in fp32, 0 outside; columns; inside)."""
    cols = start + tl.arange(0, BLOCK_N)
    inside = cols < dim
    z = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    z += tl.load(residual + cols, mask=inside & ((flags & HAS_RESIDUAL) != 0), other=0.0).to(tl.float32)
    return z, cols, inside


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_fwd(
    x, residual, weight, bias, normal, z, mean, rstd, eps, shift,
    stride_x, stride_r, stride_n, stride_z, dim, flags, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """normal = (z - mean) * rstd * (weight + shift) + bias with z = x + residual, which is stored under STORE_Z.
    One program a row; the row is read once for each statistic and once for normal, from the cache after the first."""
    dim *= UNIT
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    x += row64 * (stride_x * UNIT)
    residual += row64 * (stride_r * UNIT)
    normal += row64 * (stride_n * UNIT)
    z += row64 * (stride_z * UNIT)
    centre = 0.0
    if flags & IS_RMS == 0:
        total = tl.zeros((BLOCK_N,), tl.float32)
        for start in range(0, dim, BLOCK_N):
            value, _, _ = _input(x, residual, start, dim, flags, BLOCK_N)
            total += value
        centre = tl.sum(total, 0) / dim
        tl.store(mean + row, centre)
    squares = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, dim, BLOCK_N):
        value, _, inside = _input(x, residual, start, dim, flags, BLOCK_N)
        value = tl.where(inside, value - centre, 0.0)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / dim + eps)
    tl.store(rstd + row, scale)
    for start in range(0, dim, BLOCK_N):
        value, cols, inside = _input(x, residual, start, dim, flags, BLOCK_N)
        tl.store(z + cols, value.to(z.dtype.element_ty), mask=inside & ((flags & STORE_Z) != 0))
        w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + shift
        b = tl.load(bias + cols, mask=inside & ((flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
        tl.store(normal + cols, ((value - centre) * scale * w + b).to(normal.dtype.element_ty), mask=inside)


@triton.jit
def _gradient(z, dy, weight, shift, centre, scale, start, dim, BLOCK_N: tl.constexpr):
    """Columns from `start` of a row: (normalised input, gradient with respect to it, columns, inside)."""
    cols = start + tl.arange(0, BLOCK_N)
    inside = cols < dim
    value = tl.load(z + cols, mask=inside, other=0.0).to(tl.float32)
    normal = tl.where(inside, (value - centre) * scale, 0.0)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + shift
    grad = tl.load(dy + cols, mask=inside, other=0.0).to(tl.float32) * w
    return normal, grad, cols, inside


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_bwd(
    z, weight, dy, dz, dx, dresidual, mean, rstd, shift,
    stride_z, stride_dy, stride_dz, stride_dx, dim, flags, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Gradient of z, plus dz (the gradient of the stored z) under HAS_RESIDUAL: into dx, and under STORE_Z into
    dresidual too, whose rows are dim apart. One program a row."""
    dim *= UNIT
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    z += row64 * (stride_z * UNIT)
    dy += row64 * (stride_dy * UNIT)
    dz += row64 * (stride_dz * UNIT)
    dx += row64 * (stride_dx * UNIT)
    dresidual += row64 * dim
    scale = tl.load(rstd + row)
    centre = tl.load(mean + row, mask=(flags & IS_RMS) == 0, other=0.0)
    products = tl.zeros((BLOCK_N,), tl.float32)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    for start in range(0, dim, BLOCK_N):
        normal, grad, _, _ = _gradient(z, dy, weight, shift, centre, scale, start, dim, BLOCK_N)
        products += normal * grad
        sums += grad
    along = tl.sum(products, 0) / dim
    level = tl.where((flags & IS_RMS) == 0, tl.sum(sums, 0) / dim, 0.0)
    for start in range(0, dim, BLOCK_N):
        normal, grad, cols, inside = _gradient(z, dy, weight, shift, centre, scale, start, dim, BLOCK_N)
        total = (grad - normal * along - level) * scale
        total += tl.load(dz + cols, mask=inside & ((flags & HAS_RESIDUAL) != 0), other=0.0).to(tl.float32)
        tl.store(dx + cols, total.to(dx.dtype.element_ty), mask=inside)
        tl.store(dresidual + cols, total.to(dresidual.dtype.element_ty), mask=inside & ((flags & STORE_Z) != 0))


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_bwd_weights(
    z, dy, mean, rstd, dweight, dbias, stride_z, stride_dy, rows, dim, groups, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Partial sums over every groups-th block of rows: dweight, dbias (groups, dim). Grid: column blocks * groups."""
    dim *= UNIT
    pid = tl.program_id(0)
    group = pid % groups
    cols = (pid // groups) * BLOCK_N + tl.arange(0, BLOCK_N)
    weight_sum = tl.zeros((BLOCK_N,), tl.float32)
    bias_sum = tl.zeros((BLOCK_N,), tl.float32)
    for first in range(group * BLOCK_M, rows, groups * BLOCK_M):
        offs = first + tl.arange(0, BLOCK_M)
        inside = (offs < rows)[:, None] & (cols < dim)[None, :]
        scale = tl.load(rstd + offs, mask=offs < rows, other=0.0)
        centre = tl.load(mean + offs, mask=(offs < rows) & ((flags & IS_RMS) == 0), other=0.0)
        row64 = offs.to(tl.int64)[:, None]
        value = tl.load(z + (row64 * (stride_z * UNIT) + cols[None, :]), mask=inside, other=0.0).to(tl.float32)
        grad = tl.load(dy + (row64 * (stride_dy * UNIT) + cols[None, :]), mask=inside, other=0.0).to(tl.float32)
        weight_sum += tl.sum(grad * (value - centre[:, None]) * scale[:, None], 0)
        bias_sum += tl.sum(grad, 0)
    place = group.to(tl.int64) * dim + cols
    tl.store(dweight + place, weight_sum, mask=cols < dim)
    tl.store(dbias + place, bias_sum, mask=(cols < dim) & ((flags & HAS_BIAS) != 0))
