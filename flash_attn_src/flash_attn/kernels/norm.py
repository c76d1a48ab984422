"""Layer norm and RMS norm of rows, with the residual that is added before.

In every kernel rows are dense; row strides and dim come in units of UNIT elements, whole 16 bytes or 1. `flags` holds
the bits NORM_* of flash_attn.kernels.flags; a pointer without its bit is never followed. Statistics are fp32.

A program has tiles of BLOCK_M rows and BLOCK_N columns: one short row would leave most of its threads without work.
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
def _present(row, rows, BLOCK_M: tl.constexpr):
    """Which rows of a tile there are: a tile of one row has it, and knowing that saves registers."""
    return row >= row if BLOCK_M == 1 else row < rows


@triton.jit
def _columns(start, dim, present, BLOCK_N: tl.constexpr):
    """Of a tile whose rows are `present`, (BLOCK_M, BLOCK_N) each: (columns from `start`; those that there are)."""
    cols = (start + tl.arange(0, BLOCK_N))[None, :]
    return tl.broadcast(cols, present[:, None] & (cols < dim))


@triton.jit
def _under(flag, inside):
    """The mask `inside` under a flag. Compared as one number that would be no mask in Triton 3.9's interpreter."""
    return inside & (tl.broadcast_to(flag, inside.shape) != 0)


@triton.jit
def _input(x, residual, cols, inside, flags):
    """x + residual of rows, to which the pointers point, (BLOCK_M, 1): fp32, 0 outside."""
    z = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    return z + tl.load(residual + cols, mask=_under(flags & HAS_RESIDUAL, inside), other=0.0).to(tl.float32)


@triton.jit
def _output(value, cols, inside, weight, bias, normal, z, centre, scale, shift, flags):
    """Store columns of z, and of normal."""
    tl.store(z + cols, value.to(z.dtype.element_ty), mask=_under(flags & STORE_Z, inside))
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + shift
    b = tl.load(bias + cols, mask=_under(flags & HAS_BIAS, inside), other=0.0).to(tl.float32)
    result = (value - centre[:, None]) * scale[:, None] * w + b
    tl.store(normal + cols, result.to(normal.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_fwd(
    x, residual, weight, bias, normal, z, mean, rstd, eps, shift,
    stride_x, stride_r, stride_n, stride_z, rows, dim, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr,
):  # fmt: skip
    """normal = (z - mean) * rstd * (weight + shift) + bias with z = x + residual, which is stored under STORE_Z.
    One program a tile of rows, whose first BLOCK_N columns are read once; what LONG ones have beyond is read for each
    statistic and for normal, from the cache after the first."""
    dim *= UNIT
    row = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
    present = _present(row, rows, BLOCK_M)
    x += row[:, None] * (stride_x * UNIT)
    residual += row[:, None] * (stride_r * UNIT)
    normal += row[:, None] * (stride_n * UNIT)
    z += row[:, None] * (stride_z * UNIT)
    cols, inside = _columns(0, dim, present, BLOCK_N)
    first = _input(x, residual, cols, inside, flags)
    centre = tl.zeros((BLOCK_M,), tl.float32)
    if flags & IS_RMS == 0:
        total = first
        for start in range(BLOCK_N, dim if LONG else 0, BLOCK_N):
            later, there = _columns(start, dim, present, BLOCK_N)
            total += _input(x, residual, later, there, flags)
        centre = tl.sum(total, 1) / dim
        tl.store(mean + row, centre, mask=present)
    squares = tl.where(inside, first - centre[:, None], 0.0)
    squares *= squares
    for start in range(BLOCK_N, dim if LONG else 0, BLOCK_N):
        later, there = _columns(start, dim, present, BLOCK_N)
        value = tl.where(there, _input(x, residual, later, there, flags) - centre[:, None], 0.0)
        squares += value * value
    scale = 1.0 / tl.sqrt(tl.sum(squares, 1) / dim + eps)
    tl.store(rstd + row, scale, mask=present)
    _output(first, cols, inside, weight, bias, normal, z, centre, scale, shift, flags)
    for start in range(BLOCK_N, dim if LONG else 0, BLOCK_N):
        later, there = _columns(start, dim, present, BLOCK_N)
        value = _input(x, residual, later, there, flags)
        _output(value, later, there, weight, bias, normal, z, centre, scale, shift, flags)


@triton.jit
def _pair(z, dy, cols, inside):
    """z and its gradient dy of rows to which the pointers point, as they are stored, 0 outside."""
    return tl.load(z + cols, mask=inside, other=0.0), tl.load(dy + cols, mask=inside, other=0.0)


@triton.jit
def _passed(dz, cols, inside, flags):
    """The gradient of the stored z, likewise."""
    return tl.load(dz + cols, mask=_under(flags & HAS_RESIDUAL, inside), other=0.0)


@triton.jit
def _gradient(z, dy, w, shift, centre, scale):
    """(normalised input, dy, gradient of the normalised input), fp32. Outside the first is anything, the others 0."""
    dout = dy.to(tl.float32)
    return (z.to(tl.float32) - centre[:, None]) * scale[:, None], dout, dout * (w.to(tl.float32) + shift)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_bwd(
    z, weight, dy, dz, dx, dresidual, mean, rstd, dweight, shift,
    stride_z, stride_dy, stride_dz, stride_dx, rows, dim, groups, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, LONG: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """Gradient of z, plus dz (the gradient of the stored z) under HAS_RESIDUAL: into dx, and under STORE_Z into
    dresidual too, whose rows are dim apart. dweight: (groups, 1, dim), under HAS_BIAS (groups, 2, dim), the sums over
    every groups-th tile of rows of the gradients of weight and of bias.

    Grid: groups * column blocks, of which there is one unless LONG. A row is read once; a program of a longer one
    reads the other blocks' columns too, for the sums along the row. AHEAD, for tiles of one row that is not LONG: a
    row is read while the one before is worked on. mean is then followed under IS_RMS too, and not used.
    """
    dim *= UNIT
    group = tl.program_id(0) % groups
    begin = tl.program_id(0) // groups * BLOCK_N if LONG else 0
    weight_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    bias_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    if AHEAD:
        tl.static_assert(BLOCK_M == 1 and not LONG)
        row = tl.cast(group, tl.int64) + tl.arange(0, 1)
        # Weights once: AMD GPUs wait for loads in their order, so those of a row would wait for the next row, too.
        cols, inside = _columns(0, dim, row >= row, BLOCK_N)
        w = tl.load(weight + cols, mask=inside, other=0.0)
        z_row = z + row[:, None] * (stride_z * UNIT)
        z_next, dy_next = _pair(z_row, dy + row[:, None] * (stride_dy * UNIT), cols, inside)
        centre_next, scale_next = tl.load(mean + row), tl.load(rstd + row)
    for tile in range(group, (rows - 1) // BLOCK_M + 1, groups):
        row = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)
        present = _present(row, rows, BLOCK_M)
        z_row = z + row[:, None] * (stride_z * UNIT)
        dy_row = dy + row[:, None] * (stride_dy * UNIT)
        dz_row = dz + row[:, None] * (stride_dz * UNIT)
        if AHEAD:
            z_tile, dy_tile, scale = z_next, dy_next, scale_next
            centre = tl.where((flags & IS_RMS) == 0, centre_next, 0.0)
            passed = _passed(dz_row, cols, inside, flags)
            # Without a mask, which would be a branch: the last row's program reads it again.
            later = tl.minimum(row + groups, rows - 1)
            centre_next, scale_next = tl.load(mean + later), tl.load(rstd + later)
            z_later = z + later[:, None] * (stride_z * UNIT)
            z_next, dy_next = _pair(z_later, dy + later[:, None] * (stride_dy * UNIT), cols, inside)
        else:
            scale = tl.load(rstd + row, mask=present, other=0.0)
            centre = tl.load(mean + row, mask=_under(~flags & IS_RMS, present), other=0.0)
        along = tl.zeros((BLOCK_M,), tl.float32)
        level = tl.zeros((BLOCK_M,), tl.float32)
        if LONG:
            for start in range(0, dim, BLOCK_N):
                if start != begin:
                    cols, inside = _columns(start, dim, present, BLOCK_N)
                    z_tile, dy_tile = _pair(z_row, dy_row, cols, inside)
                    w = tl.load(weight + cols, mask=inside, other=0.0)
                    normal, _, grad = _gradient(z_tile, dy_tile, w, shift, centre, scale)
                    along += tl.sum(normal * grad, 1)
                    level += tl.sum(grad, 1)
        if not AHEAD:
            cols, inside = _columns(begin, dim, present, BLOCK_N)
            z_tile, dy_tile = _pair(z_row, dy_row, cols, inside)
            w = tl.load(weight + cols, mask=inside, other=0.0)
        normal, dout, grad = _gradient(z_tile, dy_tile, w, shift, centre, scale)
        weight_sum += dout * normal
        bias_sum += dout
        if not AHEAD:
            passed = _passed(dz_row, cols, inside, flags)
        along = (along + tl.sum(normal * grad, 1)) / dim
        level = tl.where((flags & IS_RMS) == 0, (level + tl.sum(grad, 1)) / dim, 0.0)
        total = (grad - normal * along[:, None] - level[:, None]) * scale[:, None] + passed.to(tl.float32)
        tl.store(dx + row[:, None] * (stride_dx * UNIT) + cols, total.to(dx.dtype.element_ty), mask=inside)
        if flags & STORE_Z:
            dresidual_row = dresidual + row[:, None] * dim
            tl.store(dresidual_row + cols, total.to(dresidual.dtype.element_ty), mask=inside)
    sums = 2 if flags & HAS_BIAS else 1
    dweight += tl.cast(group * sums, tl.int64) * dim
    # Vectors here, not tiles of one row: their layout would become that of all that leads to them.
    cols = begin + tl.arange(0, BLOCK_N)
    tl.store(dweight + cols, tl.sum(weight_sum, 0), mask=cols < dim)
    if flags & HAS_BIAS:
        tl.store(dweight + dim + cols, tl.sum(bias_sum, 0), mask=cols < dim)
