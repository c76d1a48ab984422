"""Backward attention: dk and dv by blocks of keys, after `backward_dq`; formulas in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import grad_scores
from flash_attn.kernels.common import (
    HAS_ALIBI,
    HAS_CU_SEQLENS_K,
    RUNTIME_ARGUMENTS,
    key_span,
    locate,
    narrow,
    query_bounds,
    query_span,
    row_stride,
)
from flash_attn.kernels.tiles import (
    add_product,
    clear_outside,
    deep_dot,
    dot_pair,
    held_pair,
    load_pair,
    store_pair,
    zero_pair,
)


@triton.jit
def _dkdv_tile(
    dk, dk_tail, dv, dv_tail, k, k_tail, v, v_tail, k_rows, v_rows, q, dout, lse, delta, m, first, cols,
    seqlen_q, seqlen_k, stride_qm, stride_gm, stride_kn, stride_vn, head_dim, columns, tail_columns,
    scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    DEPTH: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One block of queries against a block of keys; all products are formed transposed, keys by queries."""
    offs_m = tl.arange(0, BLOCK_M)
    rows = m + offs_m
    q_tile, q_tail = load_pair(q, m, offs_m, stride_qm, seqlen_q, head_dim, columns, tail_columns, BLOCK_D, TAIL, MASK)
    g_tile, g_tail = load_pair(
        dout, m, offs_m, stride_gm, seqlen_q, head_dim, columns, tail_columns, BLOCK_D, TAIL, MASK
    )
    if MASK:
        lse_row = tl.load(lse + rows, mask=rows < seqlen_q, other=float("inf"))
        delta_row = tl.load(delta + rows, mask=rows < seqlen_q, other=0.0)
    else:
        lse_row = tl.load(lse + rows)
        delta_row = tl.load(delta + rows)
    if DEPTH < BLOCK_D + TAIL:
        s = deep_dot(
            k_rows, 0, cols - first, stride_kn, seqlen_k - first, q, m, offs_m, stride_qm, seqlen_q,
            head_dim, BLOCK_N, BLOCK_M, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
        dp = deep_dot(
            v_rows, 0, cols - first, stride_vn, seqlen_k - first, dout, m, offs_m, stride_gm, seqlen_q,
            head_dim, BLOCK_N, BLOCK_M, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
    else:
        s = dot_pair(k, k_tail, tl.trans(q_tile), tl.trans(q_tail), TAIL)
        dp = dot_pair(v, v_tail, tl.trans(g_tile), tl.trans(g_tail), TAIL)
    p, ds = grad_scores(
        s, dp, lse_row[None, :], delta_row[None, :], rows[None, :], cols[:, None], seqlen_k,
        scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane, m, first,
        BLOCK_M, BLOCK_N, MASK, KIND, SHARED, True,
    )  # fmt: skip
    dv, dv_tail = add_product(narrow(p, g_tile.dtype, HALF_UP), g_tile, g_tail, dv, dv_tail, TAIL)
    dk, dk_tail = add_product(narrow(ds, q_tile.dtype, HALF_UP), q_tile, q_tail, dk, dk_tail, TAIL)
    return dk, dk_tail, dv, dv_tail


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_bwd_dkdv(
    q, k, v, dout, lse, delta, dk, dv,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_gb, stride_gm, stride_gh,
    stride_dkb, stride_dkn, stride_dkh, stride_dvb, stride_dvn, stride_dvh,
    stride_lb, stride_lh, stride_ab,
    nheads, group, parts, seqlen_q, seqlen_k, total_k, head_dim, window_left, window_right,
    n_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    DEPTH: tl.constexpr, KIND: tl.constexpr, NUM_XCDS: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head of dk and dv, of which each head of k and v has `parts`, and all query
    heads of its `group`. With more than one part dk and dv really point at fp32, and rows outside of every sequence
    are left alone. Grid: see `common.locate`. Units as in `attn_fwd`."""
    heads = nheads // group
    n_block, blocks, batch, part = locate(n_blocks, planes, heads, chunk, cu_seqlens_k, flags, BLOCK_N, NUM_XCDS)
    if (n_block < 0) | (n_block >= blocks):
        return

    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    first = n_block * BLOCK_N
    batch64 = batch.to(tl.int64)
    head64 = (part // parts * VEC).to(tl.int64)
    part64 = (part * VEC).to(tl.int64)
    stride_dkn = row_stride(stride_dkn, VEC)
    stride_dvn = row_stride(stride_dvn, VEC)
    dk_offset = batch64 * stride_dkb * VEC + part64 * stride_dkh
    dv_offset = batch64 * stride_dvb * VEC + part64 * stride_dvh
    if (flags & HAS_CU_SEQLENS_K) != 0 and parts == 1:
        is_last = batch == planes // heads - 1
        step = blocks * BLOCK_N
        clear_outside(
            dk + dk_offset, 0.0, stride_dkn, k_start, sk, total_k, batch == 0, is_last, first, step, head_dim * VEC,
            BLOCK_N, BLOCK_D, TAIL,
        )  # fmt: skip
        clear_outside(
            dv + dv_offset, 0.0, stride_dvn, k_start, sk, total_k, batch == 0, is_last, first, step, head_dim * VEC,
            BLOCK_N, BLOCK_D, TAIL,
        )  # fmt: skip
    if first >= sk:
        return
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    shift = sk - sq
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_gm = row_stride(stride_gm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)

    q_row64 = q_start.to(tl.int64)
    row64 = (k_start + first).to(tl.int64)
    k += batch64 * stride_kb * VEC + head64 * stride_kh + row64 * stride_kn
    v += batch64 * stride_vb * VEC + head64 * stride_vh + row64 * stride_vn
    dk_offset += row64 * stride_dkn
    dv_offset += row64 * stride_dvn
    q += batch64 * stride_qb * VEC + q_row64 * stride_qm
    dout += batch64 * stride_gb * VEC + q_row64 * stride_gm
    lse += batch64 * stride_lb + q_row64
    delta += batch64 * stride_lb + q_row64

    offs_n = tl.arange(0, BLOCK_N)
    cols = first + offs_n
    columns, tail_columns = held_pair(head_dim, VEC, BLOCK_D, TAIL)
    k_tile, k_tail = load_pair(
        k, 0, offs_n, stride_kn, sk - first, head_dim, columns, tail_columns, BLOCK_D, TAIL, True
    )
    v_tile, v_tail = load_pair(
        v, 0, offs_n, stride_vn, sk - first, head_dim, columns, tail_columns, BLOCK_D, TAIL, True
    )
    dk_acc, dk_tail = zero_pair(BLOCK_N, BLOCK_D, TAIL)
    dv_acc, dv_tail = zero_pair(BLOCK_N, BLOCK_D, TAIL)
    lo, full_lo, full_hi, hi = query_bounds(first, BLOCK_N, shift, sq, sk, window_left, window_right, BLOCK_M)
    skipped = full_hi - full_lo
    for head in range(part * group, part * group + group):
        q_head = q + head * (stride_qh.to(tl.int64) * VEC)
        g_head = dout + head * (stride_gh.to(tl.int64) * VEC)
        lse_head = lse + head * stride_lh.to(tl.int64)
        delta_head = delta + head * stride_lh.to(tl.int64)
        plane = batch * nheads + head
        slope = 0.0
        if KIND == "alibi" or KIND == "any":
            if flags & HAS_ALIBI:
                slope = tl.load(alibi_slopes + batch * stride_ab + head)
        for m in tl.range(full_lo, full_hi, BLOCK_M):
            dk_acc, dk_tail, dv_acc, dv_tail = _dkdv_tile(
                dk_acc, dk_tail, dv_acc, dv_tail, k_tile, k_tail, v_tile, v_tail, k, v,
                q_head, g_head, lse_head, delta_head, m, first, cols,
                sq, sk, stride_qm, stride_gm, stride_kn, stride_vn, head_dim, columns, tail_columns,
                scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
                BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH, False, KIND, HALF_UP, SHARED,
            )  # fmt: skip
        for i in tl.range(lo, hi - skipped, BLOCK_M):
            m = tl.where(i < full_lo, i, i + skipped)
            dk_acc, dk_tail, dv_acc, dv_tail = _dkdv_tile(
                dk_acc, dk_tail, dv_acc, dv_tail, k_tile, k_tail, v_tile, v_tail, k, v,
                q_head, g_head, lse_head, delta_head, m, first, cols,
                sq, sk, stride_qm, stride_gm, stride_kn, stride_vn, head_dim, columns, tail_columns,
                scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
                BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH, True, KIND, HALF_UP, SHARED,
            )  # fmt: skip
    scale_v = 1.0
    if KIND == "dropout" or KIND == "any":
        scale_v = 1.0 / (1.0 - p_dropout)
    scale *= scale_v
    dk_acc, dk_tail, dv_acc, dv_tail = dk_acc * scale, dk_tail * scale, dv_acc * scale_v, dv_tail * scale_v
    rows = sk - first
    if parts > 1:
        dk_part = dk.to(tl.pointer_type(tl.float32)) + dk_offset
        dv_part = dv.to(tl.pointer_type(tl.float32)) + dv_offset
        store_pair(dk_part, dk_acc, dk_tail, offs_n, stride_dkn, rows, head_dim, BLOCK_D, TAIL)
        store_pair(dv_part, dv_acc, dv_tail, offs_n, stride_dvn, rows, head_dim, BLOCK_D, TAIL)
    else:
        store_pair(dk + dk_offset, dk_acc, dk_tail, offs_n, stride_dkn, rows, head_dim, BLOCK_D, TAIL)
        store_pair(dv + dv_offset, dv_acc, dv_tail, offs_n, stride_dvn, rows, head_dim, BLOCK_D, TAIL)
