"""Forward attention in FP8, for matrix units that take FP8."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI_SLOPES,
    LN2,
    LOG2E,
    RUNTIME_ARGUMENTS,
    key_bounds,
    key_span,
    query_span,
    row_stride,
    schedule,
)
from flash_attn.kernels.dropout import apply_dropout, keep_mask
from flash_attn.kernels.fp8_cast import first_column, to_fp8
from flash_attn.kernels.groups import Bounds, Rows, Scores
from flash_attn.kernels.scores import alibi_bias, apply_mask, apply_softcap
from flash_attn.kernels.tiles import clamped_columns, load_tile, load_unmasked, store_tile

# Probabilities are at most 1. They are multiplied by 2 ** 7 before the cast, so that small ones keep their bits: 128 is
# below the largest number of both formats, 240 and 448. Their sum has the factor too, so it cancels.
_SHIFT = tl.constexpr(7.0)


@triton.jit
def _attend_block(
    b_acc, b_m, b_l, b_q, k, v, n, first, pos_m, bounds, scores,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    USE_MASK: tl.constexpr, HAS_SCORE_MOD: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr, HAS_CAST: tl.constexpr,
):  # fmt: skip
    """Like `forward._attend_block`, with v transposed: the matrix unit reads both FP8 operands along the sum."""
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    pos_n = n + offs_n  # [BLOCK_N]
    if USE_MASK:
        b_k = load_tile(k.base, n, offs_n, k.stride, k.limit, k.head_dim, BLOCK_D, True)  # [BLOCK_D, BLOCK_N]
    else:
        b_k = load_unmasked(k.base, n, offs_n, k.stride, k.offs_d, True)  # [BLOCK_D, BLOCK_N]
    b_s = tl.dot(b_q, b_k)  # [BLOCK_M, BLOCK_N]
    b_v = tl.load(  # [BLOCK_N, BLOCK_D]
        v.base + n + (offs_n[:, None] + offs_d[None, :] * v.stride), mask=(offs_d < v.head_dim)[None, :], other=0.0
    )
    if HAS_SCORE_MOD:
        b_s = b_s * scores.scale
        softcap = scores.softcap
        if softcap > 0.0:
            b_s, _ = apply_softcap(b_s, softcap, 1.0 / softcap)
        b_s += alibi_bias(scores.slope, pos_m[:, None], pos_n[None, :], bounds.shift)
    if USE_MASK:
        b_s = apply_mask(b_s, float("-inf"), pos_m[:, None], pos_n[None, :], bounds)
    b_top = tl.max(b_s, 1)  # [BLOCK_M]
    if not HAS_SCORE_MOD:
        c = scores.scale * LOG2E
        b_top = b_top * c
    b_m_new = tl.maximum(b_m, b_top)  # [BLOCK_M], without HAS_SCORE_MOD in the units of exp2
    b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new) if USE_MASK else b_m_new  # [BLOCK_M]
    if HAS_SCORE_MOD:
        b_p = tl.exp2((b_s - b_m_sub[:, None]) * LOG2E + _SHIFT)  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_sub) * LOG2E)  # [BLOCK_M]
    else:
        b_p = tl.exp2(b_s * c - (b_m_sub - _SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2(b_m - b_m_sub)  # [BLOCK_M]
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    b_acc = b_acc * b_alpha[:, None]
    if HAS_SCORE_MOD:
        if scores.p_dropout > 0.0:
            b_keep = keep_mask(
                scores.rng_state,
                scores.p_dropout,
                scores.plane,
                first,
                n,
                BLOCK_M,
                BLOCK_N,
                DROPOUT_BITS_SHARED,
                False,
            )  # [BLOCK_M, BLOCK_N]
            b_p = apply_dropout(b_p, b_keep, scores.p_dropout)
    b_acc = tl.dot(to_fp8(b_p, b_k.dtype, HAS_CAST), b_v, b_acc)
    return b_acc, b_m_new, b_l


@triton.jit(do_not_specialize=(*RUNTIME_ARGUMENTS, "kind", "stride_vd"))
def fp8_fwd(
    q, k, v, out, lse, q_descale, k_descale, v_descale,
    cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, rng_state,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vd, stride_vh,
    stride_ob, stride_om, stride_oh, stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, kind, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    HAS_SCORE_MOD: tl.constexpr, NUM_XCDS: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr, HAS_CAST: tl.constexpr,
):  # fmt: skip
    """`forward.attn_fwd` for FP8 numbers. v is (batch, heads, head_dim, columns), as `fp8_cast.fp8_cast` transposes it.

    Strides and head_dim are in units of VEC (16) elements. q_descale is (batch, nheads), k_descale and v_descale are
    (batch, nheads / group). kind: the element type that `out` points at, 0 bf16, 1 fp16, 2 fp32.
    """
    m_block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, seqused_k, flags)
    bounds = Bounds(sq, sk, sk - sq, window_left, window_right)
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vd = row_stride(stride_vd, VEC)
    stride_om = row_stride(stride_om, VEC)
    batch64 = batch.to(tl.int64)
    row64 = (q_start + first).to(tl.int64)
    p_q = q + (batch64 * stride_qb * VEC + (head * VEC).to(tl.int64) * stride_qh + row64 * stride_qm)
    kv_head = head // group
    p_k = k + (batch64 * stride_kb * VEC + (kv_head * VEC).to(tl.int64) * stride_kh + k_start.to(tl.int64) * stride_kn)
    p_v = v + (batch64 * stride_vb * VEC + (kv_head * VEC).to(tl.int64) * stride_vh)
    p_v += first_column(batch, k_start, flags)
    out_offset = batch64 * stride_ob * VEC + (head * VEC).to(tl.int64) * stride_oh + row64 * stride_om
    p_lse = lse + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64)
    kv_plane = plane // group
    scale *= tl.load(q_descale + plane) * tl.load(k_descale + kv_plane)

    slope = 0.0
    if HAS_SCORE_MOD:
        if flags & HAS_ALIBI_SLOPES:
            slope = tl.load(alibi_slopes + batch * stride_ab + head)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pos_m = first + offs_m  # [BLOCK_M]
    offs_k = clamped_columns(head_dim, VEC, BLOCK_D)  # [BLOCK_D]
    rows_k = Rows(p_k, stride_kn, sk, head_dim, offs_k, offs_k)
    rows_v = Rows(p_v, stride_vd, sk, head_dim, offs_k, offs_k)  # a row of v is a column of its head
    scores = Scores(scale, softcap, slope, p_dropout, rng_state, plane, q, batch64, stride_ab, flags, 1, 1, q, q, q, q)
    b_q = load_tile(p_q, 0, offs_m, stride_qm, sq - first, head_dim, BLOCK_D)  # [BLOCK_M, BLOCK_D]
    b_acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)  # [BLOCK_M, BLOCK_D]
    b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # [BLOCK_M]
    b_l = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, bounds, BLOCK_N)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        b_acc, b_m, b_l = _attend_block(
            b_acc, b_m, b_l, b_q, rows_k, rows_v, n, first, pos_m, bounds, scores,
            BLOCK_M, BLOCK_N, BLOCK_D, False, HAS_SCORE_MOD, DROPOUT_BITS_SHARED, HAS_CAST,
        )  # fmt: skip
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        b_acc, b_m, b_l = _attend_block(
            b_acc, b_m, b_l, b_q, rows_k, rows_v, n, first, pos_m, bounds, scores,
            BLOCK_M, BLOCK_N, BLOCK_D, True, HAS_SCORE_MOD, DROPOUT_BITS_SHARED, HAS_CAST,
        )  # fmt: skip

    b_empty = b_l == 0.0  # [BLOCK_M]
    b_inverse = tl.load(v_descale + kv_plane) / tl.where(b_empty, 1.0, b_l)  # [BLOCK_M]
    if HAS_SCORE_MOD:
        b_inverse = b_inverse / (1.0 - p_dropout)
    else:
        b_m = b_m * LN2
    b_acc = b_acc * b_inverse[:, None]
    if kind == 0:
        store_tile(
            out.to(tl.pointer_type(tl.bfloat16)) + out_offset, b_acc, offs_m, stride_om, sq - first, head_dim, BLOCK_D
        )
    elif kind == 1:
        store_tile(
            out.to(tl.pointer_type(tl.float16)) + out_offset, b_acc, offs_m, stride_om, sq - first, head_dim, BLOCK_D
        )
    else:
        store_tile(
            out.to(tl.pointer_type(tl.float32)) + out_offset, b_acc, offs_m, stride_om, sq - first, head_dim, BLOCK_D
        )
    tl.store(p_lse + offs_m, tl.where(b_empty, float("inf"), b_m + (tl.log2(b_l) - _SHIFT) * LN2), mask=pos_m < sq)
