"""Casting to FP8 with one scale a batch entry and head."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import common
from flash_attn.kernels.common import HAS_CU_SEQLENS_Q, PACKED_BLOCKS, locate, query_span, row_stride
from flash_attn.kernels.tiles import load_tile, store_tile

# A sequence of v, transposed, starts on a multiple of this many columns, and is zero up to the next multiple: no
# block of keys reaches into another sequence, and none needs a mask along the columns.
COLUMNS = 128
_COLUMNS = tl.constexpr(COLUMNS)

_RUNTIME_ARGUMENTS = (
    *common.RUNTIME_ARGUMENTS,
    "seqlen", "limit", *(f"stride_{tensor}{axis}" for tensor in "xy" for axis in "bmh"),
)  # fmt: skip


@triton.jit
def first_column(batch, start, flags):
    """Where a sequence starts in transposed v: room for all before it, whatever their lengths."""
    units = batch * 0
    if flags & HAS_CU_SEQLENS_Q:
        units = (start + batch * _COLUMNS) // _COLUMNS
    return units * _COLUMNS


@triton.jit
def _first_part(m_blocks, nheads, batch, head, start, flags, BLOCK: tl.constexpr):
    """Where the blocks of a sequence and head begin in amax."""
    first = (batch * nheads + head) * m_blocks
    if flags & PACKED_BLOCKS:
        first = head * m_blocks + start // BLOCK + batch
    return first


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def fp8_amax(
    x, amax, cu_seqlens_q, stride_xb, stride_xm, stride_xh, nheads, seqlen, head_dim, m_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """The largest magnitude of BLOCK_M rows and BLOCK_D columns of a head, into amax, one for each program.

    Grid: (as `common.locate`, pieces of the head dim). x is (batch, seqlen, nheads, head_dim) or, with cu_seqlens_q,
    packed; its strides and head_dim in units of VEC elements (16 bytes).
    """
    block, blocks, batch, head = locate(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, 1)
    if (block < 0) | (block >= blocks):
        return
    start, length = query_span(batch, seqlen, cu_seqlens_q, flags)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = tl.program_id(1) * BLOCK_D
    x += batch.to(tl.int64) * stride_xb * VEC + (head * VEC).to(tl.int64) * stride_xh + column
    x += start.to(tl.int64) * stride_xm * VEC
    row = row_stride(stride_xm, VEC).to(tl.int64)
    tile = load_tile(x, 0, offs_m, row, length, head_dim * VEC - column, BLOCK_D)
    largest = tl.max(tl.max(tl.abs(tile.to(tl.float32)), 1), 0)
    part = _first_part(m_blocks, nheads, batch, head, start, flags, BLOCK_M) + block
    tl.store(amax + part * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def fp8_cast(
    x, y, amax, descale, cu_seqlens_q, limit,
    stride_xb, stride_xm, stride_xh, stride_yb, stride_ym, stride_yh,
    nheads, seqlen, head_dim, m_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    FNUZ: tl.constexpr, TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """BLOCK_M rows and BLOCK_D columns of a head in FP8, scaled so that the head's largest magnitude is `limit`.

    Grid, x and amax as `fp8_amax`. descale (batch, nheads) gets the factor that undoes the scale. limit < 0: the
    factor is read from there instead, results are at most -limit. limit 0: x holds FP8 numbers and is only moved.
    y is laid out as x, its strides in units of 16 elements. TRANSPOSED: it is (batch, nheads, head_dim, columns),
    packed (nheads, head_dim, columns), stride_ym that from one dim to the next; see `first_column`.
    """
    block, blocks, batch, head = locate(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, 1)
    if (block < 0) | (block >= blocks):
        return
    plane = batch * nheads + head
    piece = tl.program_id(1)
    start, length = query_span(batch, seqlen, cu_seqlens_q, flags)
    scale = 1.0
    if limit > 0.0:
        largest = 0.0
        count = blocks * tl.num_programs(1)
        amax += _first_part(m_blocks, nheads, batch, head, start, flags, BLOCK_M) * tl.num_programs(1)
        for first in tl.range(0, count, BLOCK_N):
            index = first + tl.arange(0, BLOCK_N)
            part = tl.load(amax + index, mask=index < count, other=0.0)
            largest = tl.maximum(largest, tl.max(part, 0))
        # 2 ** -100 keeps both factors finite where a head holds zeros only.
        largest = tl.maximum(largest, 7.888609052210118e-31)
        scale = limit / largest
        if (block == 0) & (piece == 0):
            tl.store(descale + plane, largest / limit)
    elif limit < 0.0:
        scale = 1.0 / tl.load(descale + plane)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
    column = piece * BLOCK_D
    head_dim = head_dim * VEC - column
    batch64 = batch.to(tl.int64)
    x += batch64 * stride_xb * VEC + (head * VEC).to(tl.int64) * stride_xh + column
    x += start.to(tl.int64) * stride_xm * VEC
    row = row_stride(stride_xm, VEC).to(tl.int64)
    tile = load_tile(x, 0, offs_m, row, length, head_dim, BLOCK_D).to(tl.float32) * scale
    bound = tl.abs(limit)
    if bound > 0.0:
        tile = tl.minimum(tl.maximum(tile, -bound), bound)
    small = tile.to(tl.float8e4b8 if FNUZ else tl.float8e4nv).to(tl.uint8, bitcast=True)
    y += batch64 * stride_yb * 16 + (head * 16).to(tl.int64) * stride_yh
    row = row_stride(stride_ym, 16).to(tl.int64)
    if TRANSPOSED:
        offs_d = tl.arange(0, BLOCK_D)
        y += first_column(batch, start, flags) + column * row
        if block * BLOCK_M < length:
            tl.store(y + (offs_d[:, None] * row + offs_m[None, :]), tl.trans(small), mask=(offs_d < head_dim)[:, None])
    else:
        y += start.to(tl.int64) * stride_ym * 16 + column
        store_tile(y, small, offs_m, row, length, head_dim, BLOCK_D)
