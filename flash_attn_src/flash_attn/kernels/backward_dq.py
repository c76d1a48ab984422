"""Backward attention: delta and dq by blocks of queries; formulas in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import grad_scores
from flash_attn.kernels.common import (
    HAS_ALIBI,
    HAS_CU_SEQLENS_Q,
    RUNTIME_ARGUMENTS,
    key_bounds,
    key_span,
    locate,
    narrow,
    query_span,
    row_stride,
)
from flash_attn.kernels.tiles import (
    add_product,
    clear_outside,
    deep_dot,
    deep_row_sums,
    dot_pair,
    held_pair,
    load_pair,
    store_pair,
    zero_pair,
)


@triton.jit
def _dq_tile(
    dq, dq_tail, q, q_tail, g, g_tail, q_rows, g_rows, lse, delta, k, v, n, first, rows, seqlen_q, seqlen_k,
    stride_qm, stride_gm, stride_kn, stride_vn, head_dim, columns, tail_columns,
    scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    DEPTH: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One block of keys against a block of queries."""
    offs_n = tl.arange(0, BLOCK_N)
    cols = n + offs_n
    k_tile, k_tail = load_pair(k, n, offs_n, stride_kn, seqlen_k, head_dim, columns, tail_columns, BLOCK_D, TAIL, MASK)
    if DEPTH < BLOCK_D + TAIL:
        s = deep_dot(
            q_rows, 0, rows - first, stride_qm, seqlen_q - first, k, n, offs_n, stride_kn, seqlen_k,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
        dp = deep_dot(
            g_rows, 0, rows - first, stride_gm, seqlen_q - first, v, n, offs_n, stride_vn, seqlen_k,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
    else:
        v_tile, v_tail = load_pair(
            v, n, offs_n, stride_vn, seqlen_k, head_dim, columns, tail_columns, BLOCK_D, TAIL, MASK
        )
        s = dot_pair(q, q_tail, tl.trans(k_tile), tl.trans(k_tail), TAIL)
        dp = dot_pair(g, g_tail, tl.trans(v_tile), tl.trans(v_tail), TAIL)
    _, ds = grad_scores(
        s, dp, lse[:, None], delta[:, None], rows[:, None], cols[None, :], seqlen_k,
        scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane, first, n,
        BLOCK_M, BLOCK_N, MASK, KIND, SHARED, False,
    )  # fmt: skip
    return add_product(narrow(ds, k_tile.dtype, HALF_UP), k_tile, k_tail, dq, dq_tail, TAIL)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_bwd_dq(
    q, k, v, out, dout, lse, delta, dq,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh, stride_gb, stride_gm, stride_gh,
    stride_dqb, stride_dqm, stride_dqh,
    stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    DEPTH: tl.constexpr, KIND: tl.constexpr, NUM_XCDS: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head, whose delta it writes too. Grid and units as in `attn_fwd`."""
    m_block, blocks, batch, head = locate(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = (head * VEC).to(tl.int64)
    stride_dqm = row_stride(stride_dqm, VEC)
    dq += batch64 * stride_dqb * VEC + head64 * stride_dqh
    if flags & HAS_CU_SEQLENS_Q:  # then stride_lh is the number of all rows
        clear_outside(
            dq, 0.0, stride_dqm, q_start, sq, stride_lh, batch == 0, batch == planes // nheads - 1,
            first, blocks * BLOCK_M, head_dim * VEC, BLOCK_M, BLOCK_D, TAIL,
        )  # fmt: skip
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    shift = sk - sq
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)
    stride_om = row_stride(stride_om, VEC)
    stride_gm = row_stride(stride_gm, VEC)

    row64 = (q_start + first).to(tl.int64)
    kv_head = (head // group * VEC).to(tl.int64)
    q += batch64 * stride_qb * VEC + head64 * stride_qh + row64 * stride_qm
    out += batch64 * stride_ob * VEC + head64 * stride_oh + row64 * stride_om
    dout += batch64 * stride_gb * VEC + head64 * stride_gh + row64 * stride_gm
    dq += row64 * stride_dqm
    k += batch64 * stride_kb * VEC + kv_head * stride_kh + k_start.to(tl.int64) * stride_kn
    v += batch64 * stride_vb * VEC + kv_head * stride_vh + k_start.to(tl.int64) * stride_vn
    lse += batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64
    delta += batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64

    slope = 0.0
    if KIND == "alibi" or KIND == "any":
        if flags & HAS_ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_ab + head)
    offs_m = tl.arange(0, BLOCK_M)
    rows = first + offs_m
    columns, tail_columns = held_pair(head_dim, VEC, BLOCK_D, TAIL)
    q_tile, q_tail = load_pair(
        q, 0, offs_m, stride_qm, sq - first, head_dim, columns, tail_columns, BLOCK_D, TAIL, True
    )
    g_tile, g_tail = load_pair(
        dout, 0, offs_m, stride_gm, sq - first, head_dim, columns, tail_columns, BLOCK_D, TAIL, True
    )
    if DEPTH < BLOCK_D + TAIL:
        delta_row = deep_row_sums(
            out, stride_om, dout, stride_gm, offs_m, sq - first, head_dim, BLOCK_M, BLOCK_D, TAIL, DEPTH
        )
    else:
        o_tile, o_tail = load_pair(
            out, 0, offs_m, stride_om, sq - first, head_dim, columns, tail_columns, BLOCK_D, TAIL, True
        )
        delta_row = tl.sum(o_tile.to(tl.float32) * g_tile.to(tl.float32), 1)
        if TAIL:
            delta_row += tl.sum(o_tail.to(tl.float32) * g_tail.to(tl.float32), 1)
    tl.store(delta + offs_m, delta_row, mask=rows < sq)
    lse_row = tl.load(lse + offs_m, mask=rows < sq, other=float("inf"))
    acc, acc_tail = zero_pair(BLOCK_M, BLOCK_D, TAIL)
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, shift, sk, window_left, window_right, BLOCK_N)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        acc, acc_tail = _dq_tile(
            acc, acc_tail, q_tile, q_tail, g_tile, g_tail, q, dout, lse_row, delta_row, k, v, n, first, rows, sq, sk,
            stride_qm, stride_gm, stride_kn, stride_vn, head_dim, columns, tail_columns,
            scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH, False, KIND, HALF_UP, SHARED,
        )  # fmt: skip
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        acc, acc_tail = _dq_tile(
            acc, acc_tail, q_tile, q_tail, g_tile, g_tail, q, dout, lse_row, delta_row, k, v, n, first, rows, sq, sk,
            stride_qm, stride_gm, stride_kn, stride_vn, head_dim, columns, tail_columns,
            scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH, True, KIND, HALF_UP, SHARED,
        )  # fmt: skip
    if KIND == "dropout" or KIND == "any":
        scale /= 1.0 - p_dropout
    store_pair(dq, acc * scale, acc_tail * scale, offs_m, stride_dqm, sq - first, head_dim, BLOCK_D, TAIL)
