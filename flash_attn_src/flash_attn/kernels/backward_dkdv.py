"""Backward attention: dk and dv by blocks of keys, after `backward_dq`. The formulas are in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import grad_scores, gradient_exponents, power_of_two
from flash_attn.kernels.blocks import listed, listed_bounds, listed_masked, mask_parts
from flash_attn.kernels.common import (
    HAS_CU_SEQLENS_K,
    RUNTIME_ARGUMENTS,
    cast,
    key_span,
    query_bounds,
    query_span,
    row_stride,
    schedule,
)
from flash_attn.kernels.groups import Bounds, Factors, KeyTiles, Rows, RowStats, ScoreMod, Scores, Tile
from flash_attn.kernels.scores import load_bias, load_slope
from flash_attn.kernels.tiles import (
    add_product,
    clamped_pair,
    clear_outside,
    deep_dot,
    dot_pair,
    load_pair,
    rescaled,
    spoil_beyond,
    store_pair,
    zeros_pair,
)


@triton.jit
def _dkdv_block(
    b_dk, b_dk_tail, b_dv, b_dv_tail, keys, q, k, v, dout, stats, m, first, pos_n, bounds, scores,
    factors, TILE, USE_MASK: tl.constexpr, MOD, ROUND_HALF_UP: tl.constexpr,
    USE_PEELING: tl.constexpr, WEIGHT_SHIFT: tl.constexpr, WITH_DK: tl.constexpr, WITH_DV: tl.constexpr,
):  # fmt: skip
    """Adds one block of queries to dk and dv of a block of keys. All products are transposed: keys by queries.

    k, v: the rows from `first` on. q, dout: all rows of the head. factors: `groups.Factors`.
    WITH_DK, WITH_DV: whether dk and dv are computed. Without WITH_DK v is not read.
    """
    offs_m = tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
    pos_m = m + offs_m  # [BLOCK_M]
    b_q, b_q_tail = load_pair(  # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_D_TAIL]
        q, m, offs_m, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, USE_MASK
    )
    b_do, b_do_tail = load_pair(  # [BLOCK_M, BLOCK_V], [BLOCK_M, BLOCK_V_TAIL]
        dout, m, offs_m, TILE.BLOCK_V, TILE.BLOCK_V_TAIL, USE_MASK
    )
    b_do, b_do_tail = rescaled(b_do, factors.dout), rescaled(b_do_tail, factors.dout)
    seqlen_q = bounds.seqlen_q
    if USE_MASK:
        b_lse = tl.load(stats.lse + pos_m, mask=pos_m < seqlen_q, other=float("inf"))  # [BLOCK_M]
        b_delta = tl.load(stats.delta + pos_m, mask=pos_m < seqlen_q, other=0.0)  # [BLOCK_M]
    else:
        b_lse = tl.load(stats.lse + pos_m)  # [BLOCK_M]
        b_delta = tl.load(stats.delta + pos_m)  # [BLOCK_M]
    b_delta = rescaled(b_delta, factors.delta)
    if TILE.BLOCK_K < TILE.BLOCK_D + TILE.BLOCK_D_TAIL:
        b_s = deep_dot(  # [BLOCK_N, BLOCK_M]
            k, 0, pos_n - first, q, m, offs_m,
            TILE.BLOCK_N, TILE.BLOCK_M, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, TILE.BLOCK_K, USE_PEELING,
        )  # fmt: skip
    else:
        b_s = dot_pair(  # [BLOCK_N, BLOCK_M]
            keys.k, keys.k_tail, tl.trans(b_q), tl.trans(b_q_tail), TILE.BLOCK_D_TAIL
        )
    b_dp = b_s
    if WITH_DK:
        if TILE.BLOCK_K < TILE.BLOCK_D + TILE.BLOCK_D_TAIL:
            b_dp = deep_dot(  # [BLOCK_N, BLOCK_M]
                v, 0, pos_n - first, dout, m, offs_m,
                TILE.BLOCK_N, TILE.BLOCK_M, TILE.BLOCK_V, TILE.BLOCK_V_TAIL, TILE.BLOCK_K, USE_PEELING, None,
                factors.dout,
            )  # fmt: skip
        else:
            b_dp = dot_pair(  # [BLOCK_N, BLOCK_M]
                keys.v, keys.v_tail, tl.trans(b_do), tl.trans(b_do_tail), TILE.BLOCK_V_TAIL
            )
    b_lost, b_bias = b_lse, b_lse
    if MOD.SCORE_MOD == "bias":
        if USE_MASK:
            b_lost = tl.load(stats.lost + pos_m, mask=pos_m < seqlen_q, other=0.0)
        else:
            b_lost = tl.load(stats.lost + pos_m)
        b_bias = load_bias(scores, bounds, m, offs_m[None, :], pos_n[:, None], MOD.USE_ANCHOR_DOT)
    b_p, b_ds = grad_scores(  # [BLOCK_N, BLOCK_M] both
        b_s, b_dp, b_lse[None, :], b_delta[None, :], pos_m[None, :], pos_n[:, None], m, first, b_bias, b_lost[None, :],
        bounds, scores, factors.dp, TILE, USE_MASK, MOD, True, WEIGHT_SHIFT,
    )  # fmt: skip
    if WITH_DV:
        b_dv, b_dv_tail = add_product(
            cast(b_p, b_do.dtype, ROUND_HALF_UP), b_do, b_do_tail, b_dv, b_dv_tail, TILE.BLOCK_V_TAIL
        )
    if WITH_DK:
        b_dk, b_dk_tail = add_product(
            cast(b_ds, b_q.dtype, ROUND_HALF_UP), b_q, b_q_tail, b_dk, b_dk_tail, TILE.BLOCK_D_TAIL
        )
    return b_dk, b_dk_tail, b_dv, b_dv_tail


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_bwd_dkdv(
    q, k, v, dout, lse, delta, dk, dv,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, bias, norms,
    tiles, tile_counts, block_mask, key_ranges, ids_q, ids_k, hidden_queries,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_gb, stride_gm, stride_gh,
    stride_dkb, stride_dkn, stride_dkh, stride_dvb, stride_dvn, stride_dvh,
    stride_lb, stride_lh, stride_ab,
    nheads, group, parts, seqlen_q, seqlen_k, total_k, head_dim, window_left, window_right,
    n_blocks, planes, chunk, flags,
    stride_sb, stride_sh, stride_sm, lists_b, lists_h, list_length, block_q, block_k,
    ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D_TAIL: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, SCORE_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    NUM_XCDS: tl.constexpr, ROUND_HALF_UP: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr,
    USE_ANCHOR_DOT: tl.constexpr, USE_PEELING: tl.constexpr, WEIGHT_SHIFT: tl.constexpr, DK_APART: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_N keys of one head of dk and dv, with all query heads of its `group`.

    Each head of k and v has `parts` heads of dk and dv, which the caller adds. With more than one part, dk and dv point
    at fp32 and rows outside of every sequence are not written. Grid: see `common.schedule`. Units and VALUE_DIM as in
    `attn_fwd`. USE_PEELING: see `deep_dot`. HAS_MASK as in `attn_fwd`, with a list of blocks of queries for each
    block of keys of each query head.
    DK_APART: the program computes dv, then dk, in two rounds over the queries. It multiplies q and k twice, and holds
    one accumulator at a time.
    """
    BLOCK_V: tl.constexpr = VALUE_DIM if VALUE_DIM else BLOCK_D
    BLOCK_V_TAIL: tl.constexpr = 0 if VALUE_DIM else BLOCK_D_TAIL
    heads = nheads // group
    n_block, blocks, batch, part = schedule(n_blocks, planes, heads, chunk, cu_seqlens_k, flags, BLOCK_N, NUM_XCDS)
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
    if (flags & HAS_CU_SEQLENS_K) != 0:
        is_last = batch == planes // heads - 1
        step = blocks * BLOCK_N
        if parts == 1:
            clear_outside(
                dk + dk_offset, 0.0, stride_dkn, k_start, sk, total_k, batch == 0, is_last, first, step,
                head_dim * VEC, BLOCK_N, BLOCK_D, BLOCK_D_TAIL,
            )  # fmt: skip
            clear_outside(
                dv + dv_offset, 0.0, stride_dvn, k_start, sk, total_k, batch == 0, is_last, first, step,
                VALUE_DIM if VALUE_DIM else head_dim * VEC, BLOCK_N, BLOCK_V, BLOCK_V_TAIL,
            )  # fmt: skip
        else:
            dk_part = dk.to(tl.pointer_type(tl.float32)) + dk_offset
            dv_part = dv.to(tl.pointer_type(tl.float32)) + dv_offset
            spoil_beyond(dk_part, stride_dkn, k_start, sk, first, step, head_dim * VEC, BLOCK_N, BLOCK_D, BLOCK_D_TAIL)
            columns = VALUE_DIM if VALUE_DIM else head_dim * VEC
            spoil_beyond(dv_part, stride_dvn, k_start, sk, first, step, columns, BLOCK_N, BLOCK_V, BLOCK_V_TAIL)
    if first >= sk:
        return
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    bounds = Bounds(sq, sk, sk - sq, window_left, window_right)
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_gm = row_stride(stride_gm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)

    q_row64 = q_start.to(tl.int64)
    row64 = (k_start + first).to(tl.int64)
    p_k = k + (batch64 * stride_kb * VEC + head64 * stride_kh + row64 * stride_kn)
    p_v = v + (batch64 * stride_vb * VEC + head64 * stride_vh + row64 * stride_vn)
    dk_offset += row64 * stride_dkn
    dv_offset += row64 * stride_dvn
    p_q = q + (batch64 * stride_qb * VEC + q_row64 * stride_qm)
    p_do = dout + (batch64 * stride_gb * VEC + q_row64 * stride_gm)
    p_lse = lse + (batch64 * stride_lb + q_row64)
    p_delta = delta + (batch64 * stride_lb + q_row64)

    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pos_n = first + offs_n  # [BLOCK_N]
    offs_d, offs_t = clamped_pair(head_dim, VEC, BLOCK_D, BLOCK_D_TAIL)  # [BLOCK_D], [BLOCK_D_TAIL]
    head_dim_v = VALUE_DIM if VALUE_DIM else head_dim
    offs_vd, offs_vt = offs_d, offs_t  # [BLOCK_V], [BLOCK_V_TAIL]
    if VALUE_DIM:
        offs_vd, offs_vt = clamped_pair(head_dim_v, VEC, BLOCK_V, BLOCK_V_TAIL)
    rows_k = Rows(p_k, stride_kn, sk - first, head_dim, offs_d, offs_t)
    rows_v = Rows(p_v, stride_vn, sk - first, head_dim_v, offs_vd, offs_vt)
    ROUNDS: tl.constexpr = 2 if DK_APART else 1
    for turn in tl.static_range(ROUNDS):
        # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_D_TAIL]
        b_k, b_k_tail = load_pair(rows_k, 0, offs_n, BLOCK_D, BLOCK_D_TAIL, True)
        # [BLOCK_N, BLOCK_V], [BLOCK_N, BLOCK_V_TAIL]
        b_v, b_v_tail = load_pair(rows_v, 0, offs_n, BLOCK_V, BLOCK_V_TAIL, True)
        b_dk, b_dk_tail = zeros_pair(BLOCK_N, BLOCK_D, BLOCK_D_TAIL)  # [BLOCK_N, BLOCK_D], [BLOCK_N, BLOCK_D_TAIL]
        b_dv, b_dv_tail = zeros_pair(BLOCK_N, BLOCK_V, BLOCK_V_TAIL)  # [BLOCK_N, BLOCK_V], [BLOCK_N, BLOCK_V_TAIL]
        dout_factor = None
        dp_factor = None
        delta_factor = None
        if WEIGHT_SHIFT:
            for_dout, for_ds = gradient_exponents(norms, batch * (heads // parts) + part // parts)
            dout_factor, delta_factor = power_of_two(for_dout), power_of_two(for_ds - WEIGHT_SHIFT)
            dp_factor = power_of_two(for_ds - WEIGHT_SHIFT - for_dout)
        lo, full_lo, full_hi, hi = query_bounds(first, BLOCK_N, bounds, BLOCK_M)
        skipped = full_hi - full_lo
        for head in range(part * group, part * group + group):
            p_q_head = p_q + head * (stride_qh.to(tl.int64) * VEC)
            p_do_head = p_do + head * (stride_gh.to(tl.int64) * VEC)
            p_lse_head = p_lse + head * stride_lh.to(tl.int64)
            p_delta_head = p_delta + head * stride_lh.to(tl.int64)
            p_lost_head = p_delta_head
            if SCORE_MOD == "bias":
                p_lost_head += (planes // heads).to(tl.int64) * stride_lb
            plane = batch * nheads + head
            p_bias, bias_offset, bias_stride, mask_q, mask_k = q, batch64, stride_ab, 1, 1
            p_ranges, p_ids_q, p_ids_k, p_hidden = q, q, q, q
            if SCORE_MOD == "bias" or HAS_MASK:
                p_bias = bias if SCORE_MOD == "bias" else block_mask
                bias_offset = batch64 * stride_sb + head * stride_sh.to(tl.int64)
                bias_stride = stride_sm
            p_tiles = tiles
            if HAS_MASK:
                mask_q, mask_k = block_q, block_k
                p_ranges, p_ids_q, p_ids_k, p_hidden = mask_parts(
                    key_ranges, ids_q, ids_k, hidden_queries, ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
                    batch64, head,
                )  # fmt: skip
                row = batch64 * lists_b + head * lists_h.to(tl.int64) + n_block
                p_tiles += row * list_length
                lo, full_lo, full_hi, hi = listed_bounds(tile_counts, row, BLOCK_M)
                skipped = full_hi - full_lo
            slope = load_slope(alibi_slopes, stride_ab, batch, head, flags, SCORE_MOD)
            scores = Scores(
                scale, softcap, slope, p_dropout, rng_state, plane, p_bias, bias_offset, bias_stride, flags,
                mask_q, mask_k, p_ranges, p_ids_q, p_ids_k, p_hidden,
            )  # fmt: skip
            rows_q = Rows(p_q_head, stride_qm, sq, head_dim, offs_d, offs_t)
            rows_do = Rows(p_do_head, stride_gm, sq, head_dim_v, offs_vd, offs_vt)
            if HAS_MASK:
                ahead = listed(p_tiles, full_lo, BLOCK_M)
            for i in tl.range(full_lo, full_hi, BLOCK_M):
                m = i
                if HAS_MASK:
                    m = ahead
                    ahead = listed(p_tiles, i + BLOCK_M, BLOCK_M)
                b_dk, b_dk_tail, b_dv, b_dv_tail = _dkdv_block(
                    b_dk, b_dk_tail, b_dv, b_dv_tail, KeyTiles(b_k, b_k_tail, b_v, b_v_tail), rows_q, rows_k, rows_v,
                    rows_do, RowStats(p_lse_head, p_delta_head, p_lost_head), m, first, pos_n, bounds, scores,
                    Factors(dout_factor, dp_factor, delta_factor),
                    Tile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K), False,
                    ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT), ROUND_HALF_UP,
                    USE_PEELING, WEIGHT_SHIFT,
                    turn == ROUNDS - 1, turn == 0,
                )  # fmt: skip
            for i in tl.range(lo, hi - skipped, BLOCK_M):
                m = tl.where(i < full_lo, i, i + skipped)
                if HAS_MASK:
                    m = listed_masked(p_tiles, m, full_hi, list_length, BLOCK_M)
                b_dk, b_dk_tail, b_dv, b_dv_tail = _dkdv_block(
                    b_dk, b_dk_tail, b_dv, b_dv_tail, KeyTiles(b_k, b_k_tail, b_v, b_v_tail), rows_q, rows_k, rows_v,
                    rows_do, RowStats(p_lse_head, p_delta_head, p_lost_head), m, first, pos_n, bounds, scores,
                    Factors(dout_factor, dp_factor, delta_factor),
                    Tile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K), True,
                    ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT), ROUND_HALF_UP,
                    USE_PEELING, WEIGHT_SHIFT,
                    turn == ROUNDS - 1, turn == 0,
                )  # fmt: skip
        scale_v = 1.0
        if SCORE_MOD == "dropout" or SCORE_MOD == "any":
            scale_v = 1.0 / (1.0 - p_dropout)
        scale_k = scale * scale_v
        if WEIGHT_SHIFT:
            scale_k *= power_of_two(-for_ds)
            scale_v *= power_of_two(-for_dout - WEIGHT_SHIFT)
        b_dk, b_dk_tail, b_dv, b_dv_tail = b_dk * scale_k, b_dk_tail * scale_k, b_dv * scale_v, b_dv_tail * scale_v
        rows = sk - first
        if parts > 1:
            p_dk = dk.to(tl.pointer_type(tl.float32)) + dk_offset
            p_dv = dv.to(tl.pointer_type(tl.float32)) + dv_offset
            if turn == ROUNDS - 1:
                store_pair(p_dk, b_dk, b_dk_tail, offs_n, stride_dkn, rows, head_dim, BLOCK_D, BLOCK_D_TAIL)
            if turn == 0:
                store_pair(p_dv, b_dv, b_dv_tail, offs_n, stride_dvn, rows, head_dim_v, BLOCK_V, BLOCK_V_TAIL)
        else:
            if turn == ROUNDS - 1:
                store_pair(dk + dk_offset, b_dk, b_dk_tail, offs_n, stride_dkn, rows, head_dim, BLOCK_D, BLOCK_D_TAIL)
            if turn == 0:
                store_pair(dv + dv_offset, b_dv, b_dv_tail, offs_n, stride_dvn, rows, head_dim_v, BLOCK_V, BLOCK_V_TAIL)
