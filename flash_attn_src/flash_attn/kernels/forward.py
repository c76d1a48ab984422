"""Forward attention: out = softmax(scale * q k^T + masks) v, block by block with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.blocks import hide_unseen, listed, listed_bounds, listed_masked, mask_parts
from flash_attn.kernels.common import (
    HAS_CU_SEQLENS_Q,
    HAS_LEFTPAD_K,
    HAS_SINKS,
    LN2,
    LOG2E,
    PAGE_PER_BLOCK,
    PAGE_PER_KEY,
    RUNTIME_ARGUMENTS,
    cast,
    key_bounds,
    key_span,
    query_span,
    row_stride,
    schedule,
    shifted,
    sum_of_weights,
)
from flash_attn.kernels.dropout import apply_dropout, keep_mask
from flash_attn.kernels.groups import Bounds, Pages, Rows, ScoreMod, Scores, Softmax, Tile
from flash_attn.kernels.lazy_rescale import HEADROOM, grown, scale_rows
from flash_attn.kernels.scores import add_sink, apply_mask, join_sinks, load_bias, load_sinks, load_slope, modified
from flash_attn.kernels.tiles import (
    add_product,
    clamped_pair,
    clear_outside,
    deep_dot,
    deep_dot_paged,
    dot_pair,
    load_paged_pair,
    load_pair,
    store_pair,
    zeros_pair,
)


@triton.jit
def _weights(
    b_acc, b_acc_tail, b_s, b_m, b_l, first, pos_m, n, pos_n, bounds, scores, USE_MASK: tl.constexpr, MOD,
    NUM_PARTIAL_SUMS: tl.constexpr, WEIGHT_SHIFT: tl.constexpr, LAZY_RESCALE: tl.constexpr,
):  # fmt: skip
    """(weights of the keys, factor of the accumulators, new maximum, new sums of weights, accumulators) of a tile of
    scores.

    The maximum is in the units of exp2, with a bias in natural units: see `scores.load_bias`.
    Weights and their sums are 2 ** WEIGHT_SHIFT times as large as a softmax has them.
    LAZY_RESCALE: the accumulators come back scaled, because a branch before the exponentials costs least. Otherwise
    the caller scales them.
    """
    IS_RAW: tl.constexpr = (MOD.SCORE_MOD == "plain" or MOD.SCORE_MOD == "dropout") or MOD.SCORE_MOD == "sink"
    IS_SCALED: tl.constexpr = not (IS_RAW or MOD.SCORE_MOD == "blocks")
    NATURAL: tl.constexpr = MOD.SCORE_MOD == "bias"
    b_s, _ = modified(b_s, scores, bounds, pos_m[:, None], pos_n[None, :], MOD)
    if NATURAL:
        b_s += load_bias(scores, bounds, first, (pos_m - first)[:, None], pos_n[None, :], MOD.USE_ANCHOR_DOT)
    if USE_MASK:
        if MOD.HAS_MASK:
            b_s = hide_unseen(
                b_s, float("-inf"), pos_m[:, None], pos_n[None, :], pos_m[:, None], n, n, bounds, scores, False,
                MOD.SCORE_MOD == "any",
            )  # fmt: skip
        else:
            b_s = apply_mask(b_s, float("-inf"), pos_m[:, None], pos_n[None, :], bounds)
    b_top = tl.max(b_s, 1)  # [BLOCK_M]
    if not IS_SCALED:
        c = scores.scale * LOG2E  # positive, because other scales have kind `any`: the maximum is taken before scaling
        b_top, b_s = b_top * c, b_s * c
    if LAZY_RESCALE:
        tl.static_assert(WEIGHT_SHIFT == 0, "enlarged weights in fp16 leave no headroom for a lazy rescale")
        b_m_new = grown(b_m, b_top, HEADROOM * LN2 if NATURAL else HEADROOM)  # [BLOCK_M]
    else:
        b_m_new = tl.maximum(b_m, b_top)  # [BLOCK_M]
    # A row that has seen no key yet has m = -inf. Subtract 0 there, because -inf - -inf is NaN.
    UNSEEN: tl.constexpr = USE_MASK or NATURAL
    b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new) if UNSEEN else b_m_new  # [BLOCK_M]
    if LAZY_RESCALE:
        b_alpha = tl.exp2((b_m - b_m_sub) * LOG2E) if NATURAL else tl.exp2(b_m - b_m_sub)  # [BLOCK_M]
        b_acc = scale_rows(b_acc, b_alpha, LAZY_RESCALE)
        if b_acc_tail.shape[1] != b_acc.shape[1]:  # otherwise there is no tail, and the pair holds one tile twice
            b_acc_tail = scale_rows(b_acc_tail, b_alpha, LAZY_RESCALE)
    if NATURAL:
        b_p = tl.exp2(shifted((b_s - b_m_sub[:, None]) * LOG2E, -WEIGHT_SHIFT))  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_sub) * LOG2E)  # [BLOCK_M]
    else:
        b_p = tl.exp2(b_s - shifted(b_m_sub, WEIGHT_SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2(b_m - b_m_sub)  # [BLOCK_M]
    if NUM_PARTIAL_SUMS == 1:
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
    else:
        # MFMA gives two lanes the columns of a row in turn, four at a time.
        LANE: tl.constexpr = NUM_PARTIAL_SUMS // 2
        b_parts = tl.reshape(b_p, (b_p.shape[0], b_p.shape[1] // 8, 2, 4 // LANE, LANE))
        b_l = b_l * b_alpha[:, None, None] + tl.sum(tl.sum(b_parts, 1), 2)  # [BLOCK_M, 2, LANE]
    return b_p, b_alpha, b_m_new, b_l, b_acc, b_acc_tail


@triton.jit
def _no_weights(BLOCK_M: tl.constexpr, NUM_PARTIAL_SUMS: tl.constexpr):
    """The sums of weights before the first key: [BLOCK_M], in parts [BLOCK_M, 2, NUM_PARTIAL_SUMS // 2]."""
    return (
        tl.zeros((BLOCK_M,), tl.float32)
        if NUM_PARTIAL_SUMS == 1
        else tl.zeros((BLOCK_M, 2, NUM_PARTIAL_SUMS // 2), tl.float32)
    )


@triton.jit
def _attend_block(
    b_acc, b_acc_tail, b_m, b_l, b_q, b_q_tail, q, k, v, n, first, pos_m, bounds, page, pages, scores,
    TILE, USE_MASK: tl.constexpr, MOD, PAGE_MODE: tl.constexpr, SOFTMAX,
):  # fmt: skip
    """Adds one block of keys to the accumulators.

    q: the rows from `first` on. k, v: all rows of the head. b_m: see `_weights`.
    BREAK_DOT_CHAIN: an always-true `if` around the softmax keeps Triton from fusing the two dots into a chain. In a
    chain each warp has its own rows, and where a tile has too few rows, warps compute the same scores. With the `if`
    the warps split the keys.
    """
    offs_n = tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    pos_n = n + offs_n  # [BLOCK_N]
    start = n
    if PAGE_MODE == PAGE_PER_BLOCK:
        start = n % pages.size
        limit = bounds.seqlen_k - (n - start)
        k = Rows(k.base + page.to(tl.int64) * pages.stride_k, k.stride, limit, k.head_dim, k.offs_d, k.offs_t)
        v = Rows(v.base + page.to(tl.int64) * pages.stride_v, v.stride, limit, v.head_dim, v.offs_d, v.offs_t)
    if PAGE_MODE == PAGE_PER_KEY and TILE.BLOCK_K < TILE.BLOCK_D + TILE.BLOCK_D_TAIL:
        b_s = deep_dot_paged(  # [BLOCK_M, BLOCK_N]
            q, pos_m - first, k, pages, pages.stride_k, pos_n,
            TILE.BLOCK_M, TILE.BLOCK_N, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, TILE.BLOCK_K,
        )  # fmt: skip
    elif PAGE_MODE == PAGE_PER_KEY:
        b_k, b_k_tail = load_paged_pair(  # [BLOCK_D, BLOCK_N], [BLOCK_D_TAIL, BLOCK_N]
            k, pages, pages.stride_k, pos_n, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, True
        )
        b_s = dot_pair(b_q, b_q_tail, b_k, b_k_tail, TILE.BLOCK_D_TAIL)  # [BLOCK_M, BLOCK_N]
    elif TILE.BLOCK_K < TILE.BLOCK_D + TILE.BLOCK_D_TAIL:
        b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
            q, 0, pos_m - first, k, start, offs_n,
            TILE.BLOCK_M, TILE.BLOCK_N, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, TILE.BLOCK_K,
        )  # fmt: skip
    else:
        b_k, b_k_tail = load_pair(  # [BLOCK_D, BLOCK_N], [BLOCK_D_TAIL, BLOCK_N]
            k, start, offs_n, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, USE_MASK, True
        )
        b_s = dot_pair(b_q, b_q_tail, b_k, b_k_tail, TILE.BLOCK_D_TAIL)  # [BLOCK_M, BLOCK_N]
    begin = None
    if PAGE_MODE and USE_MASK:  # pages before a window may hold NaN, and 0 * NaN is NaN
        begin = first + bounds.shift - bounds.window_left - (n - start)
    if PAGE_MODE == PAGE_PER_KEY:
        b_v, b_v_tail = load_paged_pair(  # [BLOCK_N, BLOCK_V], [BLOCK_N, BLOCK_V_TAIL]
            v, pages, pages.stride_v, pos_n, TILE.BLOCK_V, TILE.BLOCK_V_TAIL, False, begin
        )
    else:
        b_v, b_v_tail = load_pair(  # [BLOCK_N, BLOCK_V], [BLOCK_N, BLOCK_V_TAIL]
            v, start, offs_n, TILE.BLOCK_V, TILE.BLOCK_V_TAIL, USE_MASK, False, begin
        )
    if SOFTMAX.BREAK_DOT_CHAIN:
        if n < bounds.seqlen_k:
            b_p, b_alpha, b_m_new, b_l, _, _ = _weights(
                b_acc, b_acc_tail, b_s, b_m, b_l, first, pos_m, n, pos_n, bounds, scores, USE_MASK, MOD,
                SOFTMAX.NUM_PARTIAL_SUMS, SOFTMAX.WEIGHT_SHIFT, 0,
            )  # fmt: skip
            b_p = b_p.to(b_v.dtype)
        else:
            b_p, b_alpha, b_m_new = b_s.to(b_v.dtype), b_m, b_m
    else:
        b_p, b_alpha, b_m_new, b_l, b_acc, b_acc_tail = _weights(
            b_acc, b_acc_tail, b_s, b_m, b_l, first, pos_m, n, pos_n, bounds, scores, USE_MASK, MOD,
            SOFTMAX.NUM_PARTIAL_SUMS, SOFTMAX.WEIGHT_SHIFT, SOFTMAX.LAZY_RESCALE,
        )  # fmt: skip
    if not SOFTMAX.LAZY_RESCALE:
        b_acc = b_acc * b_alpha[:, None]
        if TILE.BLOCK_V_TAIL:
            b_acc_tail = b_acc_tail * b_alpha[:, None]
    if MOD.SCORE_MOD == "dropout" or MOD.SCORE_MOD == "any":
        if MOD.SCORE_MOD == "dropout" or scores.p_dropout > 0.0:
            b_keep = keep_mask(  # [BLOCK_M, BLOCK_N]
                scores.rng_state, scores.p_dropout, scores.plane, first, n,
                TILE.BLOCK_M, TILE.BLOCK_N, MOD.DROPOUT_BITS_SHARED, False,
            )  # fmt: skip
            b_p = apply_dropout(b_p, b_keep, scores.p_dropout)
    b_acc, b_acc_tail = add_product(
        cast(b_p, b_v.dtype, SOFTMAX.ROUND_HALF_UP), b_v, b_v_tail, b_acc, b_acc_tail, TILE.BLOCK_V_TAIL
    )
    return b_acc, b_acc_tail, b_m_new, b_l


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_fwd(
    q, k, v, out, lse,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, block_table, sinks, bias,
    tiles, tile_counts, block_mask, key_ranges, ids_q, ids_k, hidden_queries,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh,
    stride_lb, stride_lh, stride_ab, stride_tb, page_size,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, flags,
    stride_sb, stride_sh, stride_sm, lists_b, lists_h, list_length, block_q, block_k,
    ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    BLOCK_D_TAIL: tl.constexpr, VALUE_DIM: tl.constexpr, BLOCK_K: tl.constexpr, SCORE_MOD: tl.constexpr,
    HAS_MASK: tl.constexpr,
    PAGE_MODE: tl.constexpr, NUM_XCDS: tl.constexpr, ROUND_HALF_UP: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr,
    USE_ANCHOR_DOT: tl.constexpr, BREAK_DOT_CHAIN: tl.constexpr, ASYNC_COPY: tl.constexpr,
    NUM_PARTIAL_SUMS: tl.constexpr, WEIGHT_SHIFT: tl.constexpr, LAZY_RESCALE: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head. Grid: see `common.schedule`.

    Strides of q, k, v and out, and head_dim, are in units of VEC elements (16 bytes), so that the compiler knows that
    every row is aligned for 16-byte accesses. Strides of lse and alibi_slopes are in elements. Windows are finite.
    PAGE_MODE: k and v are (pages, page_size, heads, dim), and their batch strides are the strides of a page.
    PAGE_PER_KEY: one page lookup per key. PAGE_PER_BLOCK: one page lookup per block of BLOCK_N keys, because no block
    crosses a page and nothing pads the left.
    NUM_PARTIAL_SUMS: how many sums of weights the loops keep for a row: 1, or 4 or 8 in the lanes that hold its scores.
    With partial sums a step adds no long chain of weights, and no lane needs the sum of another lane.
    WEIGHT_SHIFT: see `common.shifted`. LAZY_RESCALE: the threads of a program that scales its accumulators as
    `lazy_rescale` says, 0 where it scales them for each block.
    VALUE_DIM: the head dim of v and out, 0 where it is the one of q and k.
    SCORE_MOD: see `operation.FORWARD_KINDS`. Kind `any` tests for softcap, dropout and sinks when it runs. sinks, bias
    and its strides (s) are None in the kinds that take none. bias: (batch, nheads, seqlen_q, seqlen_k), its strides in
    elements.
    HAS_MASK: block_mask (batch, nheads, blocks of block_q queries, blocks of block_k keys), bytes as
    `flags.WHOLE_BLOCK` has them, with the strides of a bias; block_k is a multiple of BLOCK_N. tiles, int32: the lists
    of `blocks` for each block of BLOCK_M queries, list_length tiles each; lists_b and lists_h: lists from a batch entry
    and from a head to the next one.
    tile_counts: see `blocks.listed_bounds`. key_ranges, ids_q, ids_k, hidden_queries: see `blocks.mask_parts`.
    """
    m_block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    # With a causal mask the last rows see the most keys. They start first, so that short programs fill the end.
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    BLOCK_V: tl.constexpr = VALUE_DIM if VALUE_DIM else BLOCK_D
    BLOCK_V_TAIL: tl.constexpr = 0 if VALUE_DIM else BLOCK_D_TAIL

    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    stride_om = row_stride(stride_om, VEC)
    batch64 = batch.to(tl.int64)
    p_out = out + (batch64 * stride_ob * VEC + (head * VEC).to(tl.int64) * stride_oh)
    p_lse = lse + (batch64 * stride_lb + head.to(tl.int64) * stride_lh)
    if flags & HAS_CU_SEQLENS_Q:  # stride_lh is then the number of all packed rows
        is_last = batch == planes // nheads - 1
        step = blocks * BLOCK_M
        clear_outside(
            p_out, 0.0, stride_om, q_start, sq, stride_lh, batch == 0, is_last, first, step,
            VALUE_DIM if VALUE_DIM else head_dim * VEC, BLOCK_M, BLOCK_V, BLOCK_V_TAIL,
        )  # fmt: skip
        clear_outside(
            p_lse, float("inf"), 1, q_start, sq, stride_lh, batch == 0, is_last, first, step, 1, BLOCK_M, 1, 0
        )
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    bounds = Bounds(sq, sk, sk - sq, window_left, window_right)
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)

    row64 = (q_start + first).to(tl.int64)
    p_q = q + (batch64 * stride_qb * VEC + (head * VEC).to(tl.int64) * stride_qh + row64 * stride_qm)
    kv_head = (head // group * VEC).to(tl.int64)
    p_k = k + kv_head * stride_kh
    p_v = v + kv_head * stride_vh
    p_table = block_table
    leftpad = 0
    if PAGE_MODE:
        p_table += batch64 * stride_tb
        if PAGE_MODE == PAGE_PER_KEY:
            if flags & HAS_LEFTPAD_K:
                leftpad = tl.load(leftpad_k + batch)
    else:
        p_k += batch64 * stride_kb * VEC + k_start.to(tl.int64) * stride_kn
        p_v += batch64 * stride_vb * VEC + k_start.to(tl.int64) * stride_vn
    pages = Pages(p_table, page_size, leftpad, stride_kb.to(tl.int64) * VEC, stride_vb.to(tl.int64) * VEC)
    p_out += row64 * stride_om
    p_lse += row64

    if (SCORE_MOD == "sink" or SCORE_MOD == "bias") or (SCORE_MOD == "blocks" or SCORE_MOD == "any"):
        wide, narrow = load_sinks(sinks, head, (flags & HAS_SINKS) != 0, flags, out.dtype.element_ty)
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
    offs_d, offs_t = clamped_pair(head_dim, VEC, BLOCK_D, BLOCK_D_TAIL, ASYNC_COPY)  # [BLOCK_D], [BLOCK_D_TAIL]
    head_dim_v = VALUE_DIM if VALUE_DIM else head_dim
    offs_vd, offs_vt = offs_d, offs_t  # [BLOCK_V], [BLOCK_V_TAIL]
    if VALUE_DIM:
        offs_vd, offs_vt = clamped_pair(head_dim_v, VEC, BLOCK_V, BLOCK_V_TAIL)
    rows_k = Rows(p_k, stride_kn, sk, head_dim, offs_d, offs_t)
    rows_v = Rows(p_v, stride_vn, sk, head_dim_v, offs_vd, offs_vt)
    # [BLOCK_M, BLOCK_D], [BLOCK_M, BLOCK_D_TAIL]
    b_q, b_q_tail = load_pair(
        Rows(p_q, stride_qm, sq - first, head_dim, offs_d, offs_t), 0, offs_m, BLOCK_D, BLOCK_D_TAIL, True
    )

    b_acc, b_acc_tail = zeros_pair(BLOCK_M, BLOCK_V, BLOCK_V_TAIL)  # [BLOCK_M, BLOCK_V], [BLOCK_M, BLOCK_V_TAIL]
    b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # [BLOCK_M]
    b_l = _no_weights(BLOCK_M, NUM_PARTIAL_SUMS)
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, bounds, BLOCK_N)
    p_tiles = tiles
    if HAS_MASK:
        row = batch64 * lists_b + head.to(tl.int64) * lists_h + m_block
        p_tiles += row * list_length
        lo, full_lo, full_hi, hi = listed_bounds(tile_counts, row, BLOCK_N)
        listed_hi = full_hi
    page = 0
    if PAGE_MODE == PAGE_PER_BLOCK:
        page = tl.load(p_table + full_lo // page_size, mask=full_lo < full_hi, other=0)
    if HAS_MASK:
        ahead = listed(p_tiles, full_lo, BLOCK_N)
    for i in tl.range(full_lo, full_hi, BLOCK_N):
        n = i
        if HAS_MASK:
            n = ahead
            ahead = listed(p_tiles, i + BLOCK_N, BLOCK_N)
        next_page = page
        if PAGE_MODE == PAGE_PER_BLOCK:  # one block ahead, because the addresses of the keys wait for the page
            next_page = tl.load(p_table + (n + BLOCK_N) // page_size, mask=n + BLOCK_N < full_hi, other=0)
        b_acc, b_acc_tail, b_m, b_l = _attend_block(
            b_acc, b_acc_tail, b_m, b_l, b_q, b_q_tail, Rows(p_q, stride_qm, sq - first, head_dim, offs_d, offs_t),
            rows_k, rows_v, n, first, pos_m, bounds, page, pages, scores,
            Tile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K), False,
            ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT), PAGE_MODE,
            Softmax(ROUND_HALF_UP, BREAK_DOT_CHAIN, NUM_PARTIAL_SUMS, WEIGHT_SHIFT, LAZY_RESCALE),
        )  # fmt: skip
        page = next_page
    if PAGE_MODE != PAGE_PER_KEY and BLOCK_K >= BLOCK_D + BLOCK_D_TAIL:
        # The columns of b_k past head_dim repeat others, which meet zeros of b_q. If one holds an infinity, the product
        # is NaN. Then all blocks are done once more, by the loop for masked ones, which loads zeros there.
        if head_dim < BLOCK_D + BLOCK_D_TAIL:
            if tl.max(tl.ravel((b_l != b_l).to(tl.int32)), 0) > 0:
                b_acc, b_acc_tail = zeros_pair(BLOCK_M, BLOCK_V, BLOCK_V_TAIL)
                b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                b_l = _no_weights(BLOCK_M, NUM_PARTIAL_SUMS)
                full_hi = full_lo
    # The masked blocks on both sides in one loop: [lo, full_lo) and [full_hi, hi).
    skipped = full_hi - full_lo
    # Parts of a mask take registers, so tiles with keys to hide are halved: without it 280 spill on gfx1100, not 126.
    # With 16 keys gfx942 takes 17504 cycles, with 32 14401; on Radeon, whose kernels rescale lazily, 16 pay.
    LEAST_N: tl.constexpr = 16 if LAZY_RESCALE else 32
    MASKED_N: tl.constexpr = BLOCK_N // 2 if HAS_MASK and BLOCK_N > LEAST_N else BLOCK_N
    for i in tl.range(lo, hi - skipped, MASKED_N):
        n = tl.where(i < full_lo, i, i + skipped)
        if HAS_MASK:
            half = n % BLOCK_N if MASKED_N < BLOCK_N else 0
            n = listed_masked(p_tiles, n, listed_hi, list_length, BLOCK_N) + half
        if PAGE_MODE == PAGE_PER_BLOCK:
            page = tl.load(p_table + n // page_size)
        b_acc, b_acc_tail, b_m, b_l = _attend_block(
            b_acc, b_acc_tail, b_m, b_l, b_q, b_q_tail, Rows(p_q, stride_qm, sq - first, head_dim, offs_d, offs_t),
            rows_k, rows_v, n, first, pos_m, bounds, page, pages, scores,
            Tile(BLOCK_M, MASKED_N, BLOCK_D, BLOCK_D_TAIL, BLOCK_V, BLOCK_V_TAIL, BLOCK_K), True,
            ScoreMod(SCORE_MOD, HAS_MASK, DROPOUT_BITS_SHARED, USE_ANCHOR_DOT), PAGE_MODE,
            Softmax(ROUND_HALF_UP, BREAK_DOT_CHAIN, NUM_PARTIAL_SUMS, WEIGHT_SHIFT, LAZY_RESCALE),
        )  # fmt: skip

    if NUM_PARTIAL_SUMS > 1:
        b_l = tl.sum(tl.sum(b_l, 2), 1)
    unshift: tl.constexpr = 2.0**-WEIGHT_SHIFT
    if WEIGHT_SHIFT:
        b_l = b_l * unshift
    b_empty, b_l = sum_of_weights(b_m, b_l, v)  # [BLOCK_M] both
    if (SCORE_MOD == "sink" or SCORE_MOD == "bias") or (SCORE_MOD == "blocks" or SCORE_MOD == "any"):
        NATURAL: tl.constexpr = SCORE_MOD == "bias"
        b_m, b_l, b_alpha = add_sink(b_m, b_l, join_sinks(wide, narrow, flags, NATURAL), NATURAL)  # [BLOCK_M] each
        b_empty = b_l == 0.0  # [BLOCK_M]
        b_inverse = b_alpha / tl.where(b_empty, 1.0, b_l)  # [BLOCK_M]
    else:
        b_inverse = 1.0 / tl.where(b_empty, 1.0, b_l)  # [BLOCK_M]
    if SCORE_MOD == "dropout" or SCORE_MOD == "any":
        b_inverse = b_inverse / (1.0 - p_dropout)
    if WEIGHT_SHIFT:
        b_inverse = b_inverse * unshift
    b_acc = b_acc * b_inverse[:, None]
    b_acc_tail = b_acc_tail * b_inverse[:, None]
    store_pair(p_out, b_acc, b_acc_tail, offs_m, stride_om, sq - first, head_dim_v, BLOCK_V, BLOCK_V_TAIL)
    b_lse = b_m + tl.log2(b_l) * LN2 if SCORE_MOD == "bias" else (b_m + tl.log2(b_l)) * LN2  # [BLOCK_M]
    b_lse = tl.where(b_empty, float("inf"), b_lse)
    tl.store(p_lse + offs_m, b_lse, mask=pos_m < sq)
