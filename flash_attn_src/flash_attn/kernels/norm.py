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


@triton.jit
def _output(value, cols, inside, weight, bias, normal, z, centre, scale, shift, flags):
    """Store columns of z, and of normal."""
    tl.store(z + cols, value.to(z.dtype.element_ty), mask=inside & ((flags & STORE_Z) != 0))
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + shift
    b = tl.load(bias + cols, mask=inside & ((flags & HAS_BIAS) != 0), other=0.0).to(tl.float32)
    tl.store(normal + cols, ((value - centre) * scale * w + b).to(normal.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_fwd(
    x, residual, weight, bias, normal, z, mean, rstd, eps, shift,
    stride_x, stride_r, stride_n, stride_z, dim, flags, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """normal = (z - mean) * rstd * (weight + shift) + bias with z = x + residual, which is stored under STORE_Z.
    One program a row, whose first BLOCK_N columns are read once; what there is beyond is read for each statistic and
    for normal, from the cache after the first."""
    dim *= UNIT
    row = tl.program_id(0)
    row64 = row.to(tl.int64)
    x += row64 * (stride_x * UNIT)
    residual += row64 * (stride_r * UNIT)
    normal += row64 * (stride_n * UNIT)
    z += row64 * (stride_z * UNIT)
    first, cols, inside = _input(x, residual, 0, dim, flags, BLOCK_N)
    centre = 0.0
    if flags & IS_RMS == 0:
        total = first
        for start in range(BLOCK_N, dim, BLOCK_N):
            value, _, _ = _input(x, residual, start, dim, flags, BLOCK_N)
            total += value
        centre = tl.sum(total, 0) / dim
        tl.store(mean + row, centre)
    squares = tl.where(inside, first - centre, 0.0)
    squares *= squares
    for start in range(BLOCK_N, dim, BLOCK_N):
        value, _, inside_too = _input(x, residual, start, dim, flags, BLOCK_N)
        value = tl.where(inside_too, value - centre, 0.0)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, 0) / dim + eps)
    tl.store(rstd + row, scale)
    _output(first, cols, inside, weight, bias, normal, z, centre, scale, shift, flags)
    for start in range(BLOCK_N, dim, BLOCK_N):
        value, cols, inside = _input(x, residual, start, dim, flags, BLOCK_N)
        _output(value, cols, inside, weight, bias, normal, z, centre, scale, shift, flags)


@triton.jit
def _gradient(z, dy, weight, shift, centre, scale, cols, inside):
    """Of columns of a row: (normalised input, dy, gradient of the normalised input), fp32. The first is anything
    outside, the others 0."""
    normal = (tl.load(z + cols, mask=inside, other=0.0).to(tl.float32) - centre) * scale
    dout = tl.load(dy + cols, mask=inside, other=0.0).to(tl.float32)
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + shift
    return normal, dout, dout * w


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_bwd(
    z, weight, dy, dz, dx, dresidual, mean, rstd, dweight, shift,
    stride_z, stride_dy, stride_dz, stride_dx, rows, dim, groups, flags,
    UNIT: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """Gradient of z, plus dz (the gradient of the stored z) under HAS_RESIDUAL: into dx, and under STORE_Z into
    dresidual too, whose rows are dim apart. dweight: (groups, 1, dim), under HAS_BIAS (groups, 2, dim), the sums over
    every groups-th row of the gradients of weight and of bias.

    Grid: groups * column blocks, of which there is one unless LONG. A row is read once; a program of a longer one
    reads the other blocks' columns too, for the sums along the row.
    """
    dim *= UNIT
    group = tl.program_id(0) % groups
    begin = tl.program_id(0) // groups * BLOCK_N if LONG else 0
    cols = tl.arange(0, BLOCK_N)
    inside = cols < dim - begin
    weight_sum = tl.zeros((BLOCK_N,), tl.float32)
    bias_sum = tl.zeros((BLOCK_N,), tl.float32)
    for row in range(group, rows, groups):
        row64 = tl.cast(row, tl.int64)
        z_row = z + row64 * (stride_z * UNIT)
        dy_row = dy + row64 * (stride_dy * UNIT)
        dz_row = dz + row64 * (stride_dz * UNIT) + begin
        dx_row = dx + row64 * (stride_dx * UNIT) + begin
        scale = tl.load(rstd + row)
        centre = tl.load(mean + row, mask=(flags & IS_RMS) == 0, other=0.0)
        along = 0.0
        level = 0.0
        if LONG:
            for start in range(0, dim, BLOCK_N):
                if start != begin:
                    normal, _, grad = _gradient(
                        z_row + start, dy_row + start, weight + start, shift, centre, scale, cols, cols < dim - start
                    )
                    along += tl.sum(normal * grad, 0)
                    level += tl.sum(grad, 0)
        normal, dout, grad = _gradient(
            z_row + begin, dy_row + begin, weight + begin, shift, centre, scale, cols, inside
        )
        weight_sum += dout * normal
        bias_sum += dout
        passed = tl.load(dz_row + cols, mask=inside & ((flags & HAS_RESIDUAL) != 0), other=0.0).to(tl.float32)
        along = (along + tl.sum(normal * grad, 0)) / dim
        level = (level + tl.sum(grad, 0)) / dim if flags & IS_RMS == 0 else 0.0
        total = (grad - normal * along - level) * scale + passed
        tl.store(dx_row + cols, total.to(dx.dtype.element_ty), mask=inside)
        if flags & STORE_Z:
            dresidual_row = dresidual + row64 * dim + begin
            tl.store(dresidual_row + cols, total.to(dresidual.dtype.element_ty), mask=inside)
    sums = 2 if flags & HAS_BIAS else 1
    dweight += tl.cast(group * sums, tl.int64) * dim + begin
    tl.store(dweight + cols, weight_sum, mask=inside)
    if flags & HAS_BIAS:
        tl.store(dweight + dim + cols, bias_sum, mask=inside)
