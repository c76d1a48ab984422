"""Forward attention with INT8 queries and keys, for matrix units that take INT8. Weights and values have 16 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import int8_rows
from flash_attn.kernels.common import LN2, LOG2E, RUNTIME_ARGUMENTS, cast, key_bounds, program_order, row_stride
from flash_attn.kernels.groups import Bounds, Rows
from flash_attn.kernels.scores import apply_mask
from flash_attn.kernels.tiles import clamped_columns, load_tile, load_unmasked, store_tile

_QUERY_ROWS, _KEY_ROWS = tl.constexpr(int8_rows.QUERY_ROWS), tl.constexpr(int8_rows.KEY_ROWS)

# An integer below 2 ** 22 plus these bits is the fp32 number 1.5 * 2 ** 23 plus the integer. So accumulators that start
# at the bits come out as fp32 numbers without a conversion. A score has at most 128 products of 127 * 127.
_BITS, _SHIFT = tl.constexpr(0x4B400000), tl.constexpr(12582912.0)


@triton.jit
def _attend_block(
    b_acc, b_m, b_l, b_q, k, v, n, pos_m, bounds, scale, p_scales,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, USE_MASK: tl.constexpr,
    ROUND_HALF_UP: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to the accumulators. scale: of the scores, in the units of exp2, without the keys'."""
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    if USE_MASK:
        b_k = load_tile(k.base, n, offs_n, k.stride, k.limit, k.head_dim, BLOCK_D, True)  # [BLOCK_D, BLOCK_N]
        b_v = load_tile(v.base, n, offs_n, v.stride, v.limit, v.head_dim, BLOCK_D)  # [BLOCK_N, BLOCK_D]
    else:
        b_k = load_unmasked(k.base, n, offs_n, k.stride, k.offs_d, True)  # [BLOCK_D, BLOCK_N]
        b_v = load_unmasked(v.base, n, offs_n, v.stride, v.offs_d)  # [BLOCK_N, BLOCK_D]
    c = scale * tl.load(p_scales + n // _KEY_ROWS)
    b_start = tl.full((BLOCK_M, BLOCK_N), _BITS, tl.int32)  # [BLOCK_M, BLOCK_N]
    b_s = tl.dot(b_q, b_k, b_start, out_dtype=tl.int32).to(
        tl.float32, bitcast=True
    )  # [BLOCK_M, BLOCK_N], _SHIFT too large
    if USE_MASK:
        b_s = apply_mask(b_s, float("-inf"), pos_m[:, None], (n + offs_n)[None, :], bounds)
    b_m_new = tl.maximum(b_m, (tl.max(b_s, 1) - _SHIFT) * c)  # [BLOCK_M]
    b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new) if USE_MASK else b_m_new  # [BLOCK_M]
    b_p = tl.exp2(b_s * c - (b_m_sub + _SHIFT * c)[:, None])  # [BLOCK_M, BLOCK_N]
    b_alpha = tl.exp2(b_m - b_m_sub)  # [BLOCK_M]
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = tl.dot(cast(b_p, b_v.dtype, ROUND_HALF_UP), b_v, b_acc * b_alpha[:, None])
    return b_acc, b_m_new, b_l


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def int8_fwd(
    q, k, v, out, lse, q_scales, k_scales, scale,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh, stride_lb, stride_lh,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, NUM_XCDS: tl.constexpr,
    ROUND_HALF_UP: tl.constexpr,
):  # fmt: skip
    """`forward.attn_fwd` for q and k in INT8, as `int8_cast.int8_cast` writes them and their scales. scale > 0.

    Strides of v and out, and head_dim, are in units of VEC elements (16 bytes). Window and grid as there.
    """
    m_block, plane = program_order(m_blocks, planes, chunk, NUM_XCDS)
    m_block = m_blocks - 1 - m_block
    batch, head = plane // nheads, plane % nheads
    first = m_block * BLOCK_M
    bounds = Bounds(seqlen_q, seqlen_k, seqlen_k - seqlen_q, window_left, window_right)
    head_dim *= VEC
    stride_vn = row_stride(stride_vn, VEC)
    stride_om = row_stride(stride_om, VEC)
    batch64 = batch.to(tl.int64)
    kv_head = head // group
    kv_plane = batch * (nheads // group) + kv_head
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pos_m = first + offs_m  # [BLOCK_M]
    offs_k = clamped_columns(head_dim, 16, BLOCK_D)  # [BLOCK_D]
    offs_v = clamped_columns(head_dim, VEC, BLOCK_D)  # [BLOCK_D]
    # A dense row of INT8: a multiple of 16 bytes.
    row = row_stride(head_dim // 16, 16)
    p_q = q + (plane.to(tl.int64) * seqlen_q + first) * row
    rows_k = Rows(k + kv_plane.to(tl.int64) * seqlen_k * row, row, seqlen_k, head_dim, offs_k, offs_k)
    p_v = v + (batch64 * stride_vb * VEC + (kv_head * VEC).to(tl.int64) * stride_vh)
    rows_v = Rows(p_v, stride_vn, seqlen_k, head_dim, offs_v, offs_v)
    p_scales = k_scales + kv_plane.to(tl.int64) * tl.cdiv(seqlen_k, _KEY_ROWS)
    scale *= LOG2E * tl.load(q_scales + plane.to(tl.int64) * tl.cdiv(seqlen_q, _QUERY_ROWS) + first // _QUERY_ROWS)

    b_q = load_tile(p_q, 0, offs_m, row, seqlen_q - first, head_dim, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # [BLOCK_M, BLOCK_D]
    b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # [BLOCK_M]
    b_l = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, bounds, BLOCK_N)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        b_acc, b_m, b_l = _attend_block(
            b_acc, b_m, b_l, b_q, rows_k, rows_v, n, pos_m, bounds, scale, p_scales,
            BLOCK_M, BLOCK_N, BLOCK_D, False, ROUND_HALF_UP,
        )  # fmt: skip
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        b_acc, b_m, b_l = _attend_block(
            b_acc, b_m, b_l, b_q, rows_k, rows_v, n, pos_m, bounds, scale, p_scales,
            BLOCK_M, BLOCK_N, BLOCK_D, True, ROUND_HALF_UP,
        )  # fmt: skip

    b_empty = b_m == float("-inf")  # [BLOCK_M]
    b_acc = b_acc * (1.0 / tl.where(b_empty, 1.0, b_l))[:, None]
    p_out = out + (batch64 * stride_ob * VEC + (head * VEC).to(tl.int64) * stride_oh + first.to(tl.int64) * stride_om)
    store_tile(p_out, b_acc, offs_m, stride_om, seqlen_q - first, head_dim, BLOCK_D)
    b_lse = tl.where(b_empty, float("inf"), (b_m + tl.log2(b_l)) * LN2)  # [BLOCK_M]
    p_lse = lse + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + first)
    tl.store(p_lse + offs_m, b_lse, mask=pos_m < seqlen_q)
