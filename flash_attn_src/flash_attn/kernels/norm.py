"""Layer norm and RMS norm of rows, with the residual that is added before.

In every kernel rows are dense. Row strides and dim are in units of UNIT elements: 16 bytes, or 1 element. `flags` holds
the bits NORM_* of flash_attn.kernels.flags. A pointer without its bit is never read. Statistics are fp32.

A program has tiles of BLOCK_M rows and BLOCK_N columns, because one short row would leave most threads without work.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import NORM_HAS_BIAS, NORM_HAS_RESIDUAL, NORM_IS_RMS, NORM_STORE_Z

_RUNTIME_ARGUMENTS = (
    "eps", "shift", "rows", "dim", "stride_x", "stride_r", "stride_n", "stride_z", "stride_dy", "stride_dz",
    "stride_dx", "groups", "flags",
)  # fmt: skip


@triton.jit
def _present(row, rows, BLOCK_M: tl.constexpr):
    """Which rows of a tile exist. In a tile of one row the row always exists, and saying so saves registers."""
    return row >= row if BLOCK_M == 1 else row < rows


@triton.jit
def _columns(start, dim, present, BLOCK_N: tl.constexpr):
    """(columns from `start`, whether they exist) of a tile whose rows are `present`, [BLOCK_M, BLOCK_N] each."""
    cols = (start + tl.arange(0, BLOCK_N))[None, :]
    return tl.broadcast(cols, present[:, None] & (cols < dim))


@triton.jit
def _under(flag, inside):
    """The mask `inside` where a flag is set. The flag is a tile because Triton 3.9's interpreter needs one."""
    return inside & (tl.broadcast_to(flag, inside.shape) != 0)


@triton.jit
def _input(x, residual, cols, inside, flags):
    """x + residual, fp32 [BLOCK_M, BLOCK_N], 0 outside. The pointers point to rows, [BLOCK_M, 1]."""
    z = tl.load(x + cols, mask=inside, other=0.0).to(tl.float32)
    return z + tl.load(residual + cols, mask=_under(flags & NORM_HAS_RESIDUAL, inside), other=0.0).to(tl.float32)


@triton.jit
def _output(value, cols, inside, weight, bias, normal, z, centre, scale, shift, flags):
    """Stores columns of z and of normal."""
    tl.store(z + cols, value.to(z.dtype.element_ty), mask=_under(flags & NORM_STORE_Z, inside))
    w = tl.load(weight + cols, mask=inside, other=0.0).to(tl.float32) + shift
    b = tl.load(bias + cols, mask=_under(flags & NORM_HAS_BIAS, inside), other=0.0).to(tl.float32)
    result = (value - centre[:, None]) * scale[:, None] * w + b
    tl.store(normal + cols, result.to(normal.dtype.element_ty), mask=inside)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_fwd(
    x, residual, weight, bias, normal, z, mean, rstd, eps, shift,
    stride_x, stride_r, stride_n, stride_z, rows, dim, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LONG_ROWS: tl.constexpr,
):  # fmt: skip
    """normal = (z - mean) * rstd * (weight + shift) + bias with z = x + residual. z is stored if NORM_STORE_Z is set.

    One program: one tile of rows. It reads their first BLOCK_N columns once. It reads further columns of HAS_LONG_ROWS
    rows for each statistic and for normal, after the first time from the cache.
    """
    dim *= UNIT
    offs_m = tl.program_id(0).to(tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    present = _present(offs_m, rows, BLOCK_M)  # [BLOCK_M]
    p_x = x + offs_m[:, None] * (stride_x * UNIT)
    p_residual = residual + offs_m[:, None] * (stride_r * UNIT)
    p_normal = normal + offs_m[:, None] * (stride_n * UNIT)
    p_z = z + offs_m[:, None] * (stride_z * UNIT)
    offs_n, inside = _columns(0, dim, present, BLOCK_N)  # [BLOCK_M, BLOCK_N] both
    b_z = _input(p_x, p_residual, offs_n, inside, flags)  # [BLOCK_M, BLOCK_N]
    b_mean = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    if flags & NORM_IS_RMS == 0:
        b_sum = b_z
        for start in range(BLOCK_N, dim if HAS_LONG_ROWS else 0, BLOCK_N):
            offs_later, there = _columns(start, dim, present, BLOCK_N)
            b_sum += _input(p_x, p_residual, offs_later, there, flags)
        b_mean = tl.sum(b_sum, 1) / dim  # [BLOCK_M]
        tl.store(mean + offs_m, b_mean, mask=present)
    b_squares = tl.where(inside, b_z - b_mean[:, None], 0.0)  # [BLOCK_M, BLOCK_N]
    b_squares *= b_squares
    for start in range(BLOCK_N, dim if HAS_LONG_ROWS else 0, BLOCK_N):
        offs_later, there = _columns(start, dim, present, BLOCK_N)
        b_later = tl.where(
            there, _input(p_x, p_residual, offs_later, there, flags) - b_mean[:, None], 0.0
        )  # [BLOCK_M, BLOCK_N]
        b_squares += b_later * b_later
    b_rstd = 1.0 / tl.sqrt(tl.sum(b_squares, 1) / dim + eps)  # [BLOCK_M]
    tl.store(rstd + offs_m, b_rstd, mask=present)
    _output(b_z, offs_n, inside, weight, bias, p_normal, p_z, b_mean, b_rstd, shift, flags)
    for start in range(BLOCK_N, dim if HAS_LONG_ROWS else 0, BLOCK_N):
        offs_later, there = _columns(start, dim, present, BLOCK_N)
        b_later = _input(p_x, p_residual, offs_later, there, flags)  # [BLOCK_M, BLOCK_N]
        _output(b_later, offs_later, there, weight, bias, p_normal, p_z, b_mean, b_rstd, shift, flags)


@triton.jit
def _pair(z, dy, cols, inside):
    """z and its gradient dy in their stored types, 0 outside. The pointers point to rows."""
    return tl.load(z + cols, mask=inside, other=0.0), tl.load(dy + cols, mask=inside, other=0.0)


@triton.jit
def _passed(dz, cols, inside, flags):
    """The gradient of the stored z, like `_pair`."""
    return tl.load(dz + cols, mask=_under(flags & NORM_HAS_RESIDUAL, inside), other=0.0)


@triton.jit
def _gradient(z, dy, w, shift, centre, scale):
    """(normalised input, dy, gradient of the normalised input), fp32. Outside the first is any number, the others 0."""
    dout = dy.to(tl.float32)
    return (z.to(tl.float32) - centre[:, None]) * scale[:, None], dout, dout * (w.to(tl.float32) + shift)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def norm_bwd(
    z, weight, dy, dz, dx, dresidual, mean, rstd, dweight, shift,
    stride_z, stride_dy, stride_dz, stride_dx, rows, dim, groups, flags,
    UNIT: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, HAS_LONG_ROWS: tl.constexpr,
    USE_PREFETCH: tl.constexpr,
):  # fmt: skip
    """The gradient of z into dx, and with NORM_STORE_Z into dresidual too, whose rows are dim elements apart.

    With NORM_HAS_RESIDUAL it includes dz, the gradient of the stored z. dweight: (groups, 1, dim), with NORM_HAS_BIAS
    (groups, 2, dim): the sums over every groups-th tile of rows of the gradients of weight and of bias.

    Grid: groups * column blocks. There is one column block unless HAS_LONG_ROWS. A program reads a row once. A program
    of HAS_LONG_ROWS rows reads the columns of the other blocks too, for the sums along the row. USE_PREFETCH, for tiles
    of one row that is not HAS_LONG_ROWS: a program reads the next row while it works on one. It then reads mean with
    NORM_IS_RMS too and does not use it.
    """
    dim *= UNIT
    group = tl.program_id(0) % groups
    begin = tl.program_id(0) // groups * BLOCK_N if HAS_LONG_ROWS else 0
    b_dweight = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    b_dbias = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    if USE_PREFETCH:
        tl.static_assert(BLOCK_M == 1 and not HAS_LONG_ROWS)
        offs_m = tl.cast(group, tl.int64) + tl.arange(0, 1)  # [BLOCK_M]
        # Weights are loaded once, because AMD GPUs wait for loads in their order: weights loaded with each row would
        # wait for the next row too.
        offs_n, inside = _columns(0, dim, offs_m >= offs_m, BLOCK_N)  # [BLOCK_M, BLOCK_N] both
        b_w = tl.load(weight + offs_n, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_N]
        p_z = z + offs_m[:, None] * (stride_z * UNIT)
        b_z_next, b_dy_next = _pair(
            p_z, dy + offs_m[:, None] * (stride_dy * UNIT), offs_n, inside
        )  # [BLOCK_M, BLOCK_N] both
        b_mean_next, b_rstd_next = tl.load(mean + offs_m), tl.load(rstd + offs_m)
    for tile in range(group, (rows - 1) // BLOCK_M + 1, groups):
        offs_m = tl.cast(tile, tl.int64) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        present = _present(offs_m, rows, BLOCK_M)  # [BLOCK_M]
        p_z = z + offs_m[:, None] * (stride_z * UNIT)
        p_dy = dy + offs_m[:, None] * (stride_dy * UNIT)
        p_dz = dz + offs_m[:, None] * (stride_dz * UNIT)
        if USE_PREFETCH:
            b_z, b_dy, b_rstd = b_z_next, b_dy_next, b_rstd_next
            b_mean = tl.where((flags & NORM_IS_RMS) == 0, b_mean_next, 0.0)  # [BLOCK_M]
            b_dz = _passed(p_dz, offs_n, inside, flags)  # [BLOCK_M, BLOCK_N]
            # No mask, because it would be a branch. The program of the last row reads that row again.
            offs_next = tl.minimum(offs_m + groups, rows - 1)  # [BLOCK_M]
            b_mean_next, b_rstd_next = tl.load(mean + offs_next), tl.load(rstd + offs_next)
            p_z_next = z + offs_next[:, None] * (stride_z * UNIT)
            b_z_next, b_dy_next = _pair(
                p_z_next, dy + offs_next[:, None] * (stride_dy * UNIT), offs_n, inside
            )  # [BLOCK_M, BLOCK_N] both
        else:
            b_rstd = tl.load(rstd + offs_m, mask=present, other=0.0)  # [BLOCK_M]
            b_mean = tl.load(mean + offs_m, mask=_under(~flags & NORM_IS_RMS, present), other=0.0)  # [BLOCK_M]
        b_along = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
        b_level = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
        if HAS_LONG_ROWS:
            for start in range(0, dim, BLOCK_N):
                if start != begin:
                    offs_n, inside = _columns(start, dim, present, BLOCK_N)  # [BLOCK_M, BLOCK_N] both
                    b_z, b_dy = _pair(p_z, p_dy, offs_n, inside)  # [BLOCK_M, BLOCK_N] both
                    b_w = tl.load(weight + offs_n, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_N]
                    b_normal, _, b_grad = _gradient(b_z, b_dy, b_w, shift, b_mean, b_rstd)
                    b_along += tl.sum(b_normal * b_grad, 1)
                    b_level += tl.sum(b_grad, 1)
        if not USE_PREFETCH:
            offs_n, inside = _columns(begin, dim, present, BLOCK_N)  # [BLOCK_M, BLOCK_N] both
            b_z, b_dy = _pair(p_z, p_dy, offs_n, inside)  # [BLOCK_M, BLOCK_N] both
            b_w = tl.load(weight + offs_n, mask=inside, other=0.0)  # [BLOCK_M, BLOCK_N]
        b_normal, b_dout, b_grad = _gradient(b_z, b_dy, b_w, shift, b_mean, b_rstd)  # [BLOCK_M, BLOCK_N] each
        b_dweight += b_dout * b_normal
        b_dbias += b_dout
        if not USE_PREFETCH:
            b_dz = _passed(p_dz, offs_n, inside, flags)  # [BLOCK_M, BLOCK_N]
        b_along = (b_along + tl.sum(b_normal * b_grad, 1)) / dim
        b_level = tl.where((flags & NORM_IS_RMS) == 0, (b_level + tl.sum(b_grad, 1)) / dim, 0.0)
        b_dx = (b_grad - b_normal * b_along[:, None] - b_level[:, None]) * b_rstd[:, None] + b_dz.to(
            tl.float32
        )  # [BLOCK_M, BLOCK_N]
        tl.store(dx + offs_m[:, None] * (stride_dx * UNIT) + offs_n, b_dx.to(dx.dtype.element_ty), mask=inside)
        if flags & NORM_STORE_Z:
            p_dresidual = dresidual + offs_m[:, None] * dim
            tl.store(p_dresidual + offs_n, b_dx.to(dresidual.dtype.element_ty), mask=inside)
    sums = 2 if flags & NORM_HAS_BIAS else 1
    dweight += tl.cast(group * sums, tl.int64) * dim
    # Vectors, not tiles of one row, because a tile's layout would spread to everything that it is computed from.
    offs_n = begin + tl.arange(0, BLOCK_N)
    tl.store(dweight + offs_n, tl.sum(b_dweight, 0), mask=offs_n < dim)
    if flags & NORM_HAS_BIAS:
        tl.store(dweight + dim + offs_n, tl.sum(b_dbias, 0), mask=offs_n < dim)
