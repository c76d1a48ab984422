"""Casts to FP8 with one scale for each head of each batch entry."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import common
from flash_attn.kernels.common import HAS_CU_SEQLENS_Q, PACKED_BLOCKS, query_span, row_stride, schedule
from flash_attn.kernels.tiles import load_tile, store_tile

# A sequence of transposed v starts at a multiple of this many columns and is zero up to the next multiple. So no block
# of keys reaches into another sequence, and no block needs a mask along the columns.
COLUMNS = 128
_COLUMNS = tl.constexpr(COLUMNS)

_RUNTIME_ARGUMENTS = (
    *common.RUNTIME_ARGUMENTS,
    "seqlen", "limit", *(f"stride_{tensor}{axis}" for tensor in "xy" for axis in "bmh"),
)  # fmt: skip


@triton.jit
def to_fp8(b_x, dtype: tl.constexpr, HAS_CAST: tl.constexpr):
    """b_x (fp32, at most the largest number of dtype) in FP8.

    HAS_CAST: whether the GPU has instructions that Triton does not use. Triton takes some 30 instructions for a number.
    """
    if HAS_CAST:
        b_y = tl.inline_asm_elementwise(
            "v_cvt_pk_fp8_f32 $0, $1, $1", "=v,v", [b_x], dtype=tl.uint32, is_pure=True, pack=1
        )
        b_y = b_y.to(tl.uint8).to(dtype, bitcast=True)
    else:
        b_y = b_x.to(dtype)
    return b_y


@triton.jit
def from_fp8(x, HAS_CAST: tl.constexpr):
    """x, which is FP8, in fp16, exactly; NaN stays NaN.

    HAS_CAST: whether the GPU casts FP8 to fp32 and pairs of fp32 to fp16 by instructions that Triton does not use.
    """
    if HAS_CAST:
        if x.dtype == tl.float8e4b8:
            x = x.to(tl.float32)  # Triton casts two numbers by one instruction
        else:
            bits = x.to(tl.uint8, bitcast=True).to(tl.uint32)
            x = tl.inline_asm_elementwise(
                "v_cvt_f32_fp8 $0, $1", "=v,v", [bits], dtype=tl.float32, is_pure=True, pack=1
            )
        x = tl.inline_asm_elementwise(
            "v_cvt_pkrtz_f16_f32 $0, $1, $2", "=v,v,v", [x], dtype=tl.float16, is_pure=True, pack=2
        )
    return x.to(tl.float16)


@triton.jit
def first_column(batch, start, flags):
    """The column where a sequence starts in transposed v. The sequences before it fit, whatever their lengths."""
    units = batch * 0
    if flags & HAS_CU_SEQLENS_Q:
        units = (start + batch * _COLUMNS) // _COLUMNS
    return units * _COLUMNS


@triton.jit
def _first_part(m_blocks, nheads, batch, head, start, flags, BLOCK: tl.constexpr):
    """The index in amax of the first block of a sequence and head."""
    first = (batch * nheads + head) * m_blocks
    if flags & PACKED_BLOCKS:
        first = head * m_blocks + start // BLOCK + batch
    return first


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def fp8_amax(
    x, amax, cu_seqlens_q, stride_xb, stride_xm, stride_xh, nheads, seqlen, head_dim, m_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the largest magnitude of BLOCK_M rows and BLOCK_D columns of a head, into its element of amax.

    Grid: (as `common.schedule`, pieces of the head dim). x is (batch, seqlen, nheads, head_dim), with cu_seqlens_q
    packed. Its strides and head_dim are in units of VEC elements (16 bytes).
    """
    block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, 1)
    if (block < 0) | (block >= blocks):
        return
    start, length = query_span(batch, seqlen, cu_seqlens_q, flags)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = tl.program_id(1) * BLOCK_D
    p_x = x + (batch.to(tl.int64) * stride_xb * VEC + (head * VEC).to(tl.int64) * stride_xh + column)
    p_x += start.to(tl.int64) * stride_xm * VEC
    row = row_stride(stride_xm, VEC).to(tl.int64)
    b_x = load_tile(p_x, 0, offs_m, row, length, head_dim * VEC - column, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    largest = tl.max(tl.max(tl.abs(b_x.to(tl.float32)), 1), 0)
    part = _first_part(m_blocks, nheads, batch, head, start, flags, BLOCK_M) + block
    tl.store(amax + part * tl.num_programs(1) + tl.program_id(1), largest)


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def fp8_cast(
    x, y, amax, descale, cu_seqlens_q, limit,
    stride_xb, stride_xm, stride_xh, stride_yb, stride_ym, stride_yh,
    nheads, seqlen, head_dim, m_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_FNUZ: tl.constexpr, USE_TRANSPOSE: tl.constexpr, HAS_CAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows and BLOCK_D columns of a head in FP8. The head's largest magnitude becomes `limit`.

    Grid, x and amax as in `fp8_amax`. descale (batch, nheads) receives the factor that undoes the scale. limit < 0: the
    kernel reads that factor from descale, and results are at most -limit. limit 0: x holds FP8 numbers, which are
    only moved. y has the layout of x, its strides are in units of 16 elements. USE_TRANSPOSE: y is (batch, nheads,
    head_dim, columns), packed (nheads, head_dim, columns), and stride_ym is the step from one dim to the next. See
    `first_column`.
    """
    block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, 1)
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
            index = first + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            b_amax = tl.load(amax + index, mask=index < count, other=0.0)  # [BLOCK_N]
            largest = tl.maximum(largest, tl.max(b_amax, 0))
        # 2 ** -100 keeps both factors finite where a head holds only zeros.
        largest = tl.maximum(largest, 7.888609052210118e-31)
        scale = limit / largest
        if (block == 0) & (piece == 0):
            tl.store(descale + plane, largest / limit)
    elif limit < 0.0:
        scale = 1.0 / tl.load(descale + plane)
    offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    column = piece * BLOCK_D
    head_dim = head_dim * VEC - column
    batch64 = batch.to(tl.int64)
    p_x = x + (batch64 * stride_xb * VEC + (head * VEC).to(tl.int64) * stride_xh + column)
    p_x += start.to(tl.int64) * stride_xm * VEC
    row = row_stride(stride_xm, VEC).to(tl.int64)
    b_x = load_tile(p_x, 0, offs_m, row, length, head_dim, BLOCK_D).to(tl.float32) * scale  # [BLOCK_M, BLOCK_D]
    bound = tl.abs(limit)
    if bound > 0.0:
        b_x = tl.minimum(tl.maximum(b_x, -bound), bound)
    FORMAT: tl.constexpr = tl.float8e4b8 if USE_FNUZ else tl.float8e4nv
    b_y = to_fp8(b_x, FORMAT, HAS_CAST).to(tl.uint8, bitcast=True)  # [BLOCK_M, BLOCK_D]
    p_y = y + (batch64 * stride_yb * 16 + (head * 16).to(tl.int64) * stride_yh)
    row = row_stride(stride_ym, 16).to(tl.int64)
    if USE_TRANSPOSE:
        offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        p_y += first_column(batch, start, flags) + column * row
        if block * BLOCK_M < length:
            tl.store(p_y + (offs_d[:, None] * row + offs_m[None, :]), tl.trans(b_y), mask=(offs_d < head_dim)[:, None])
    else:
        p_y += start.to(tl.int64) * stride_ym * 16 + column
        store_tile(p_y, b_y, offs_m, row, length, head_dim, BLOCK_D)
