"""Forward attention in FP8, on matrix units of 8 bits."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI,
    LN2,
    LOG2E,
    RUNTIME_ARGUMENTS,
    alibi_bias,
    capped,
    hide,
    key_bounds,
    key_span,
    locate,
    query_span,
    row_stride,
)
from flash_attn.kernels.dropout import dropped, keep_mask
from flash_attn.kernels.fp8_cast import first_column
from flash_attn.kernels.tiles import held_columns, load_rows, load_tile, store_tile

# Probabilities, at most 1, are cast times 2 ** 7: below the largest number of both formats, 240 and 448, so that
# small ones keep their bits. Their sum carries the factor too, and it cancels.
_SHIFT = tl.constexpr(7.0)


@triton.jit
def _tile(
    acc, m_i, l_i, q, k_head, v_head, n, first, rows, seqlen_k, stride_kn, stride_vd, head_dim, columns, scale, shift,
    window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    MASK: tl.constexpr, EXTRA: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """As `forward._tile`, over v transposed: matrix units of 8 bits read both operands along the sum."""
    offs_n = tl.arange(0, BLOCK_N)
    offs_d = tl.arange(0, BLOCK_D)
    cols = n + offs_n
    if MASK:
        k = load_tile(k_head, n, offs_n, stride_kn, seqlen_k, head_dim, BLOCK_D, True)
    else:
        k = load_rows(k_head, n, offs_n, stride_kn, columns, True)
    s = tl.dot(q, k)
    v = tl.load(
        v_head + n + (offs_n[:, None] + offs_d[None, :] * stride_vd), mask=(offs_d < head_dim)[None, :], other=0.0
    )
    if EXTRA:
        s = s * scale
        if softcap > 0.0:
            s, _ = capped(s, softcap, 1.0 / softcap)
        s += alibi_bias(slope, rows[:, None], cols[None, :], shift)
    if MASK:
        s = hide(s, float("-inf"), rows[:, None], cols[None, :], shift, seqlen_k, window_left, window_right)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    m_sub = tl.where(m_new == float("-inf"), 0.0, m_new) if MASK else m_new
    if EXTRA:
        p = tl.exp2((s - m_sub[:, None]) * LOG2E + _SHIFT)
        alpha = tl.exp2((m_i - m_sub) * LOG2E)
    else:
        c = scale * LOG2E
        p = tl.exp2(s * c - (m_sub * c - _SHIFT)[:, None])
        alpha = tl.exp2((m_i - m_sub) * c)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if EXTRA:
        if p_dropout > 0.0:
            keep = keep_mask(rng_state, p_dropout, plane, first, n, BLOCK_M, BLOCK_N, SHARED, False)
            p = dropped(p, keep, p_dropout)
    acc = tl.dot(p.to(k.dtype), v, acc)
    return acc, m_new, l_i


@triton.jit(do_not_specialize=(*RUNTIME_ARGUMENTS, "kind", "stride_vd"))
def fp8_fwd(
    q, k, v, out, lse, q_descale, k_descale, v_descale,
    cu_seqlens_q, cu_seqlens_k, seqused_k, alibi_slopes, rng_state,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vd, stride_vh,
    stride_ob, stride_om, stride_oh, stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, kind, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    EXTRA: tl.constexpr, NUM_XCDS: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """`forward.attn_fwd` on FP8 numbers; v is (batch, heads, head_dim, columns) as `fp8_cast.fp8_cast` transposes it.

    Strides and head_dim come in units of VEC (16) elements. q_descale is (batch, nheads), k_descale and v_descale
    (batch, nheads / group). kind: what `out` really points at, 0 bf16, 1 fp16, 2 fp32.
    """
    m_block, blocks, batch, head = locate(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, seqused_k, flags)
    shift = sk - sq
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vd = row_stride(stride_vd, VEC)
    stride_om = row_stride(stride_om, VEC)
    batch64 = batch.to(tl.int64)
    row64 = (q_start + first).to(tl.int64)
    q += batch64 * stride_qb * VEC + (head * VEC).to(tl.int64) * stride_qh + row64 * stride_qm
    kv_head = head // group
    k += batch64 * stride_kb * VEC + (kv_head * VEC).to(tl.int64) * stride_kh + k_start.to(tl.int64) * stride_kn
    v += batch64 * stride_vb * VEC + (kv_head * VEC).to(tl.int64) * stride_vh
    v += first_column(batch, k_start, flags)
    place = batch64 * stride_ob * VEC + (head * VEC).to(tl.int64) * stride_oh + row64 * stride_om
    lse += batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64
    kv_plane = plane // group
    scale *= tl.load(q_descale + plane) * tl.load(k_descale + kv_plane)

    slope = 0.0
    if EXTRA:
        if flags & HAS_ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_ab + head)
    offs_m = tl.arange(0, BLOCK_M)
    rows = first + offs_m
    columns = held_columns(head_dim, VEC, BLOCK_D)
    q_tile = load_tile(q, 0, offs_m, stride_qm, sq - first, head_dim, BLOCK_D)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, shift, sk, window_left, window_right, BLOCK_N)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        acc, m_i, l_i = _tile(
            acc, m_i, l_i, q_tile, k, v, n, first, rows, sk, stride_kn, stride_vd, head_dim, columns, scale, shift,
            window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
            BLOCK_M, BLOCK_N, BLOCK_D, False, EXTRA, SHARED,
        )  # fmt: skip
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        acc, m_i, l_i = _tile(
            acc, m_i, l_i, q_tile, k, v, n, first, rows, sk, stride_kn, stride_vd, head_dim, columns, scale, shift,
            window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
            BLOCK_M, BLOCK_N, BLOCK_D, True, EXTRA, SHARED,
        )  # fmt: skip

    empty = l_i == 0.0
    inverse = tl.load(v_descale + kv_plane) / tl.where(empty, 1.0, l_i)
    if EXTRA:
        inverse = inverse / (1.0 - p_dropout)
    else:
        m_i = m_i * scale
    acc = acc * inverse[:, None]
    if kind == 0:
        store_tile(out.to(tl.pointer_type(tl.bfloat16)) + place, acc, offs_m, stride_om, sq - first, head_dim, BLOCK_D)
    elif kind == 1:
        store_tile(out.to(tl.pointer_type(tl.float16)) + place, acc, offs_m, stride_om, sq - first, head_dim, BLOCK_D)
    else:
        store_tile(out.to(tl.pointer_type(tl.float32)) + place, acc, offs_m, stride_om, sq - first, head_dim, BLOCK_D)
    tl.store(lse + offs_m, tl.where(empty, float("inf"), m_i + (tl.log2(l_i) - _SHIFT) * LN2), mask=rows < sq)
