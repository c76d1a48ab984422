"""Backward attention: delta and dq by blocks of queries. The formulas are in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import grad_scores, lost_by_rounding, power_of_two, row_exponents
from flash_attn.kernels.blocks import listed, listed_bounds, listed_masked, mask_parts
from flash_attn.kernels.common import (
    HAS_CU_SEQLENS_Q,
    HAS_SINKS,
    RUNTIME_ARGUMENTS,
    cast,
    key_bounds,
    key_span,
    query_span,
    row_stride,
    schedule,
)
from flash_attn.kernels.groups import Bounds, Rows, ScoreMod, Scores, Tile
from flash_attn.kernels.scores import join_sinks, load_bias, load_sinks, load_slope
from flash_attn.kernels.tiles import (
    add_product,
    clamped_pair,
    clear_outside,
    deep_dot,
    deep_row_sums,
    dot_pair,
    load_pair,
    rescaled,
    spoil_beyond,
    store_pair,
    zeros_pair,
)


@triton.jit
def _dq_block(
    b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, b_lse, b_delta, b_lost, q, k, v, dout, n, first, pos_m, bounds,
    scores, dout_factor, dp_factor, TILE, USE_MASK: tl.constexpr, MOD, ROUND_HALF_UP: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to dq of a block of queries.

    q, dout: the rows from `first` on. k, v: all rows of the head. dout_factor: the factor that is
    already in b_do; it is applied to dout where dout is loaded here.
    """
    offs_n = tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    pos_n = n + offs_n  # [BLOCK_N]
    b_k, b_k_tail = load_pair(  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_D_TAIL]
        k, n, offs_n, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, USE_MASK
    )
    if TILE.BLOCK_K < TILE.BLOCK_D + TILE.BLOCK_D_TAIL:
        b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
            q, 0, pos_m - first, k, n, offs_n,
            TILE.BLOCK_M, TILE.BLOCK_N, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, TILE.BLOCK_K,
        )  # fmt: skip
        b_dp = deep_dot(  # [BLOCK_M, BLOCK_N]
            dout, 0, pos_m - first, v, n, offs_n,
            TILE.BLOCK_M, TILE.BLOCK_N, TILE.BLOCK_V, TILE.BLOCK_V_TAIL, TILE.BLOCK_K, False, dout_factor,
        )  # fmt: skip
    else:
        b_v, b_v_tail = load_pair(  # [BLOCK_N, BLOCK_V], [BLOCK_N, BLOCK_V_TAIL]
            v, n, offs_n, TILE.BLOCK_V, TILE.BLOCK_V_TAIL, USE_MASK
        )
        b_s = dot_pair(b_q, b_q_tail, tl.trans(b_k), tl.trans(b_k_tail), TILE.BLOCK_D_TAIL)  # [BLOCK_M, BLOCK_N]
        b_dp = dot_pair(b_do, b_do_tail, tl.trans(b_v), tl.trans(b_v_tail), TILE.BLOCK_V_TAIL)  # [BLOCK_M, BLOCK_N]
    b_bias = b_lse
    if MOD.SCORE_MOD == "bias":
        b_bias = load_bias(scores, bounds, first, (pos_m - first)[:, None], pos_n[None, :], MOD.USE_ANCHOR_DOT)
    _, b_ds = grad_scores(  # [BLOCK_M, BLOCK_N]
        b_s, b_dp, b_lse[:, None], b_delta[:, None], pos_m[:, None], pos_n[None, :], first, n, b_bias, b_lost[:, None],
        bounds, scores, dp_factor, TILE, USE_MASK, MOD, False, 0,
    )  # fmt: skip
    return add_product(cast(b_ds, b_k.dtype, ROUND_HALF_UP), b_k, b_k_tail, b_dq, b_dq_tail, TILE.BLOCK_D_TAIL)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_bwd_dq(
    q, k, v, out, dout, lse, delta, dq,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, bias, sinks, norms,
    tiles, tile_counts, block_mask, key_ranges, ids_q, ids_k, hidden_queries,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh, stride_gb, stride_gm, stride_gh,
    stride_dqb, stride_dqm, stride_dqh,
    stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, flags,
    stride_sb, stride_sh, stride_sm, lists_b, lists_h, list_length, block_q, block_k,
    ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D_TAIL: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, SCORE_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NUM_XCDS: tl.constexpr, ROUND_HALF_UP: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr,
    USE_ANCHOR_DOT: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """One program: dq and delta of BLOCK_M query rows of one head. Grid, units and VALUE_DIM as in `attn_fwd`.

    HAS_MASK as in `attn_fwd`. With kind `bias` delta has room for a second tensor of its size behind it, which
    gets `lost_by_rounding`.
    """
    BLOCK_V: tl.constexpr = VALUE_DIM if VALUE_DIM else BLOCK_D
    BLOCK_V_TAIL: tl.constexpr = 0 if VALUE_DIM else BLOCK_D_TAIL
    m_block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = (head * VEC).to(tl.int64)
    stride_dqm = row_stride(stride_dqm, VEC)
    p_dq = dq + (batch64 * stride_dqb * VEC + head64 * stride_dqh)
    if flags & HAS_CU_SEQLENS_Q:  # stride_lh is then the number of all packed rows
        clear_outside(
            p_dq, 0.0, stride_dqm, q_start, sq, stride_lh, batch == 0, batch == planes // nheads - 1,
            first, blocks * BLOCK_M, head_dim * VEC, BLOCK_M, BLOCK_D, BLOCK_D_TAIL,
        )  # fmt: skip
        p_delta_all = delta + head.to(tl.int64) * stride_lh
        spoil_beyond(p_delta_all, 1, q_start, sq, first, blocks * BLOCK_M, 1, BLOCK_M, 1, 0)
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    bounds = Bounds(sq, sk, sk - sq, window_left, window_right)
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)
    stride_om = row_stride(stride_om, VEC)
    stride_gm = row_stride(stride_gm, VEC)

    row64 = (q_start + first).to(tl.int64)
    kv_head = (head // group * VEC).to(tl.int64)
    p_q = q + (batch64 * stride_qb * VEC + head64 * stride_qh + row64 * stride_qm)
    p_o = out + (batch64 * stride_ob * VEC + head64 * stride_oh + row64 * stride_om)
    p_do = dout + (batch64 * stride_gb * VEC + head64 * stride_gh + row64 * stride_gm)
    p_dq += row64 * stride_dqm
    p_k = k + (batch64 * stride_kb * VEC + kv_head * stride_kh + k_start.to(tl.int64) * stride_kn)
    p_v = v + (batch64 * stride_vb * VEC + kv_head * stride_vh + k_start.to(tl.int64) * stride_vn)
    p_lse = lse + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64)
    p_delta = delta + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64)

    slope = load_slope(alibi_slopes, stride_ab, batch, head, flags, SCORE_MOD)
    p_bias, bias_offset, bias_stride, mask_q, mask_k = q, batch64, stride_ab, 1, 1
    p_ranges, p_ids_q, p_ids_k, p_hidden = q, q, q, q
    if SCORE_MOD == "bias" or HAS_MASK:
        p_bias = bias if SCORE_MOD == "bias" else block_mask
        bias_offset, bias_stride = batch64 * stride_sb + head.to(tl.int64) * stride_sh, stride_sm
    if HAS_MASK:
        mask_q, mask_k = block_q, block_k
        p_ranges, p_ids_q, p_ids_k, p_hidden = mask_parts(
            key_ranges, ids_q, ids_k, hidden_queries, ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
            batch64, head,
        )  # fmt: skip
    scores = Scores(
        scale, softcap, slope, p_dropout, rng_state, plane, p_bias, bias_offset, bias_stride, flags, mask_q, mask_k,
        p_ranges, p_ids_q, p_ids_k, p_hidden,
    )  # fmt: skip
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pos_m = first + offs_m  # [BLOCK_M]
    offs_d, offs_t = clamped_pair(head_dim, VEC, BLOCK_D, BLOCK_D_TAIL)  # [BLOCK_D], [BLOCK_D_TAIL]
    head_dim_v = VALUE_DIM if VALUE_DIM else head_dim
    offs_vd, offs_vt = offs_d, offs_t  # [BLOCK_V], [BLOCK_V_TAIL]
    if VALUE_DIM:
        offs_vd, offs_vt = clamped_pair(head_dim_v, VEC, BLOCK_V, BLOCK_V_TAIL)
    rows_q = Rows(p_q, stride_qm, sq - first, head_dim, offs_d, offs_t)
    rows_k = Rows(p_k, stride_kn, sk, head_dim, offs_d, offs_t)
    rows_v = Rows(p_v, stride_vn, sk, head_dim_v, offs_vd, offs_vt)
    rows_do = Rows(p_do, stride_gm, sq - first, head_dim_v, offs_vd, offs_vt)
    rows_o = Rows(p_o, stride_om, sq - first, head_dim_v, offs_vd, offs_vt)
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_D_TAIL]
    b_q, b_q_tail = load_pair(rows_q, 0, offs_m, BLOCK_D, BLOCK_D_TAIL, True)
    # [BLOCK_M, BLOCK_V], [BLOCK_M, BLOCK_V_TAIL]
    b_do, b_do_tail = load_pair(rows_do, 0, offs_m, BLOCK_V, BLOCK_V_TAIL, True)
    if BLOCK_K < BLOCK_D + BLOCK_D_TAIL:
        b_delta = deep_row_sums(rows_o, rows_do, offs_m, BLOCK_M, BLOCK_V, BLOCK_V_TAIL, BLOCK_K)  # [BLOCK_M]
    else:
        # [BLOCK_M, BLOCK_V], [BLOCK_M, BLOCK_V_TAIL]
        b_o, b_o_tail = load_pair(rows_o, 0, offs_m, BLOCK_V, BLOCK_V_TAIL, True)
        b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BLOCK_M]
        if BLOCK_V_TAIL:
            b_delta += tl.sum(b_o_tail.to(tl.float32) * b_do_tail.to(tl.float32), 1)
    tl.store(p_delta + offs_m, b_delta, mask=pos_m < sq)
    dout_factor = None
    dp_factor = None
    if WEIGHT_SHIFT:
        kv_plane = batch * (nheads // group) + head // group
        for_dout, for_ds = row_exponents(b_do, b_do_tail, norms, kv_plane, BLOCK_V_TAIL)  # [BLOCK_M] both
        dout_factor, dp_factor = power_of_two(for_dout)[:, None], power_of_two(for_ds - for_dout)[:, None]
        b_do, b_do_tail = rescaled(b_do, dout_factor), rescaled(b_do_tail, dout_factor)
        b_delta = b_delta * power_of_two(for_ds)
    b_lse = tl.load(p_lse + offs_m, mask=pos_m < sq, other=float("inf"))  # [BLOCK_M]
    b_dq, b_dq_tail = zeros_pair(BLOCK_M, BLOCK_D, BLOCK_D_TAIL)  # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_D_TAIL]
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, bounds, BLOCK_N)
    p_tiles = tiles
    if HAS_MASK:
        row = batch64 * lists_b + head.to(tl.int64) * lists_h + m_block
        p_tiles += row * list_length
        lo, full_lo, full_hi, hi = listed_bounds(tile_counts, row, BLOCK_N)
    b_lost = b_lse
    if SCORE_MOD == "bias":
        wide, narrow = load_sinks(sinks, head, (flags & HAS_SINKS) != 0, flags, q.dtype.element_ty)
        b_lost = lost_by_rounding(  # [BLOCK_M]
            b_lse, join_sinks(wide, narrow, flags, True), rows_q, rows_k, first, lo, hi, bounds, scores,
            Tile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K),
            ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT),
        )  # fmt: skip
        tl.store(p_delta + planes.to(tl.int64) * stride_lh + offs_m, b_lost, mask=pos_m < sq)
    if HAS_MASK:
        ahead = listed(p_tiles, full_lo, BLOCK_N)
    for i in tl.range(full_lo, full_hi, BLOCK_N):
        n = i
        if HAS_MASK:
            n = ahead
            ahead = listed(p_tiles, i + BLOCK_N, BLOCK_N)
        b_dq, b_dq_tail = _dq_block(
            b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, b_lse, b_delta, b_lost, rows_q, rows_k, rows_v, rows_do,
            n, first, pos_m, bounds, scores, dout_factor, dp_factor,
            Tile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K), False,
            ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT), ROUND_HALF_UP,
        )  # fmt: skip
    if BLOCK_K >= BLOCK_D + BLOCK_D_TAIL:
        if head_dim < BLOCK_D + BLOCK_D_TAIL:  # an infinity in a column that is repeated past head_dim: see `attn_fwd`
            lost = tl.max(tl.max((b_dq != b_dq).to(tl.int32), 1), 0)
            if BLOCK_D_TAIL:
                lost = tl.maximum(lost, tl.max(tl.max((b_dq_tail != b_dq_tail).to(tl.int32), 1), 0))
            if lost > 0:
                b_dq, b_dq_tail = zeros_pair(BLOCK_M, BLOCK_D, BLOCK_D_TAIL)
                full_hi = full_lo
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        if HAS_MASK:
            n = listed_masked(p_tiles, n, full_hi, list_length, BLOCK_N)
        b_dq, b_dq_tail = _dq_block(
            b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, b_lse, b_delta, b_lost, rows_q, rows_k, rows_v, rows_do,
            n, first, pos_m, bounds, scores, dout_factor, dp_factor,
            Tile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K), True,
            ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT), ROUND_HALF_UP,
        )  # fmt: skip
    if SCORE_MOD == "dropout" or SCORE_MOD == "any":
        scale /= 1.0 - p_dropout
    if WEIGHT_SHIFT:
        b_scale = scale * power_of_two(-for_ds)[:, None]  # [BLOCK_M, 1]
        b_dq, b_dq_tail = b_dq * b_scale, b_dq_tail * b_scale
    else:
        b_dq, b_dq_tail = b_dq * scale, b_dq_tail * scale
    store_pair(p_dq, b_dq, b_dq_tail, offs_m, stride_dqm, sq - first, head_dim, BLOCK_D, BLOCK_D_TAIL)
