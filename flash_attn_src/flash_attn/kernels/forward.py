"""Forward attention: out = softmax(scale * q k^T + masks) v, block by block with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI,
    HAS_CU_SEQLENS_Q,
    HAS_LEFTPAD_K,
    HAS_SINKS,
    LN2,
    LOG2E,
    RUNTIME_ARGUMENTS,
    add_sink,
    alibi_bias,
    apply_mask,
    apply_softcap,
    cast,
    join_sinks,
    key_bounds,
    key_span,
    load_bias,
    load_sinks,
    query_span,
    row_stride,
    schedule,
    shifted,
    sum_of_weights,
)
from flash_attn.kernels.dropout import apply_dropout, keep_mask
from flash_attn.kernels.tiles import (
    PAGE_PER_BLOCK,
    PAGE_PER_KEY,
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
    b_s, b_m, b_l, pos_m, pos_n, first, seqlen_q, seqlen_k, scale, shift, window_left, window_right,
    softcap, slope, bias, bias_offset, stride_sm, flags, MASK: tl.constexpr, KIND: tl.constexpr, ANCHOR: tl.constexpr,
    PARTS: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """(weights of the keys, factor of the accumulators, new maximum, new sums of weights) of a tile of scores.

    The maximum is in the units of exp2, with a bias in natural units: see `load_bias`.
    Weights and their sums are 2 ** WEIGHT_SHIFT times as large as a softmax has them.
    """
    SHAPED: tl.constexpr = KIND != "plain" and KIND != "dropout" and KIND != "sink"
    NATURAL: tl.constexpr = KIND == "bias"
    if NATURAL:
        b_s = b_s * scale
        if softcap > 0.0:
            b_s, _ = apply_softcap(b_s, softcap, 1.0 / softcap)
        rows, cols = (pos_m - first)[:, None], pos_n[None, :]
        b_s += load_bias(bias, bias_offset, first, rows, stride_sm, cols, seqlen_q, seqlen_k, flags, ANCHOR)
    elif SHAPED:
        b_s = b_s * (scale * LOG2E)
        if KIND != "alibi":
            if KIND == "softcap" or softcap > 0.0:
                b_s, _ = apply_softcap(b_s, softcap * LOG2E, 1.0 / (softcap * LOG2E))
        if KIND != "softcap":
            b_s += alibi_bias(slope * LOG2E, pos_m[:, None], pos_n[None, :], shift)
    if MASK:
        b_s = apply_mask(b_s, float("-inf"), pos_m[:, None], pos_n[None, :], shift, seqlen_k, window_left, window_right)
    b_top = tl.max(b_s, 1)  # [BLOCK_M]
    if not SHAPED:
        c = scale * LOG2E  # positive, because other scales have kind `any`: the maximum is taken before scaling
        b_top, b_s = b_top * c, b_s * c
    b_m_new = tl.maximum(b_m, b_top)  # [BLOCK_M]
    # A row that has seen no key yet has m = -inf. Subtract 0 there, because -inf - -inf is NaN.
    UNSEEN: tl.constexpr = MASK or NATURAL
    b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new) if UNSEEN else b_m_new  # [BLOCK_M]
    if NATURAL:
        b_p = tl.exp2(shifted((b_s - b_m_sub[:, None]) * LOG2E, -WEIGHT_SHIFT))  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2((b_m - b_m_sub) * LOG2E)  # [BLOCK_M]
    else:
        b_p = tl.exp2(b_s - shifted(b_m_sub, WEIGHT_SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
        b_alpha = tl.exp2(b_m - b_m_sub)  # [BLOCK_M]
    if PARTS == 1:
        b_l = b_l * b_alpha + tl.sum(b_p, 1)
    else:
        # MFMA gives two lanes the columns of a row in turn, four at a time.
        LANE: tl.constexpr = PARTS // 2
        b_parts = tl.reshape(b_p, (b_p.shape[0], b_p.shape[1] // 8, 2, 4 // LANE, LANE))
        b_l = b_l * b_alpha[:, None, None] + tl.sum(tl.sum(b_parts, 1), 2)  # [BLOCK_M, 2, LANE]
    return b_p, b_alpha, b_m_new, b_l


@triton.jit
def _no_weights(BLOCK_M: tl.constexpr, PARTS: tl.constexpr):
    """The sums of weights before the first key: [BLOCK_M], in parts [BLOCK_M, 2, PARTS // 2]."""
    return tl.zeros((BLOCK_M,), tl.float32) if PARTS == 1 else tl.zeros((BLOCK_M, 2, PARTS // 2), tl.float32)


@triton.jit
def _attend_block(
    b_acc, b_acc_tail, b_m, b_l, b_q, b_q_tail, p_q, p_k, p_v, n, first, pos_m, seqlen_q, seqlen_k,
    stride_qm, stride_kn, stride_vn, head_dim, offs_d, offs_t, head_dim_v, offs_vd, offs_vt,
    scale, shift, window_left, window_right,
    softcap, slope, p_dropout, rng_state, plane, page, table, page_size, stride_kp, stride_vp, leftpad,
    bias, bias_offset, stride_sm, flags,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr, TAIL_V: tl.constexpr, DEPTH: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr,
    ANCHOR: tl.constexpr, BESIDE: tl.constexpr, PARTS: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to the accumulators.

    p_q points at the first row of b_q, p_k and p_v at key 0 of the head. b_m: see `_weights`.
    BESIDE: the weights are computed under a condition that is true. It hides from Triton that another product takes the
    scores. For a product in such a chain Triton gives each warp rows of its own, and where a tile has too few, warps
    compute the same scores. Else the warps stand side by side over the keys.
    """
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pos_n = n + offs_n  # [BLOCK_N]
    start, limit = n, seqlen_k
    if PAGED == PAGE_PER_BLOCK:
        start = n % page_size
        limit = seqlen_k - (n - start)
        p_k += page.to(tl.int64) * stride_kp
        p_v += page.to(tl.int64) * stride_vp
    if PAGED == PAGE_PER_KEY and DEPTH < BLOCK_D + TAIL:
        b_s = deep_dot_paged(  # [BLOCK_M, BLOCK_N]
            p_q, pos_m - first, stride_qm, seqlen_q - first,
            p_k, table, pos_n, leftpad, page_size, stride_kp, stride_kn, seqlen_k,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
    elif PAGED == PAGE_PER_KEY:
        b_k, b_k_tail = load_paged_pair(  # [BLOCK_D, BLOCK_N], [TAIL, BLOCK_N]
            p_k, table, pos_n, leftpad, page_size, stride_kp, stride_kn, seqlen_k, head_dim, BLOCK_D, TAIL, True
        )
        b_s = dot_pair(b_q, b_q_tail, b_k, b_k_tail, TAIL)  # [BLOCK_M, BLOCK_N]
    elif DEPTH < BLOCK_D + TAIL:
        b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
            p_q, 0, pos_m - first, stride_qm, seqlen_q - first, p_k, start, offs_n, stride_kn, limit,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
    else:
        b_k, b_k_tail = load_pair(  # [BLOCK_D, BLOCK_N], [TAIL, BLOCK_N]
            p_k, start, offs_n, stride_kn, limit, head_dim, offs_d, offs_t, BLOCK_D, TAIL, MASK, True
        )
        b_s = dot_pair(b_q, b_q_tail, b_k, b_k_tail, TAIL)  # [BLOCK_M, BLOCK_N]
    if PAGED == PAGE_PER_KEY:
        b_v, b_v_tail = load_paged_pair(  # [BLOCK_N, BLOCK_V], [BLOCK_N, TAIL_V]
            p_v, table, pos_n, leftpad, page_size, stride_vp, stride_vn, seqlen_k, head_dim_v, BLOCK_V, TAIL_V
        )
    else:
        b_v, b_v_tail = load_pair(
            p_v, start, offs_n, stride_vn, limit, head_dim_v, offs_vd, offs_vt, BLOCK_V, TAIL_V, MASK
        )  # [BLOCK_N, BLOCK_V], [BLOCK_N, TAIL_V]
    if BESIDE:
        if n < seqlen_k:
            b_p, b_alpha, b_m_new, b_l = _weights(
                b_s, b_m, b_l, pos_m, pos_n, first, seqlen_q, seqlen_k, scale, shift, window_left, window_right,
                softcap, slope, bias, bias_offset, stride_sm, flags, MASK, KIND, ANCHOR, PARTS, WEIGHT_SHIFT,
            )  # fmt: skip
            b_p = b_p.to(b_v.dtype)
        else:
            b_p, b_alpha, b_m_new = b_s.to(b_v.dtype), b_m, b_m
    else:
        b_p, b_alpha, b_m_new, b_l = _weights(
            b_s, b_m, b_l, pos_m, pos_n, first, seqlen_q, seqlen_k, scale, shift, window_left, window_right,
            softcap, slope, bias, bias_offset, stride_sm, flags, MASK, KIND, ANCHOR, PARTS, WEIGHT_SHIFT,
        )  # fmt: skip
    b_acc = b_acc * b_alpha[:, None]
    if TAIL_V:
        b_acc_tail = b_acc_tail * b_alpha[:, None]
    if KIND == "dropout" or KIND == "any":
        if KIND == "dropout" or p_dropout > 0.0:
            b_keep = keep_mask(
                rng_state, p_dropout, plane, first, n, BLOCK_M, BLOCK_N, SHARED, False
            )  # [BLOCK_M, BLOCK_N]
            b_p = apply_dropout(b_p, b_keep, p_dropout)
    b_acc, b_acc_tail = add_product(cast(b_p, b_v.dtype, HALF_UP), b_v, b_v_tail, b_acc, b_acc_tail, TAIL_V)
    return b_acc, b_acc_tail, b_m_new, b_l


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_fwd(
    q, k, v, out, lse,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, block_table, sinks, bias,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh,
    stride_lb, stride_lh, stride_ab, stride_tb, page_size,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, flags,
    stride_sb, stride_sh, stride_sm,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr, VALUE_DIM: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr,
    NUM_XCDS: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr, ANCHOR: tl.constexpr, BESIDE: tl.constexpr,
    DIRECT: tl.constexpr, PARTS: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head. Grid: see `common.schedule`.

    Strides of q, k, v and out, and head_dim, are in units of VEC elements (16 bytes), so that the compiler knows that
    every row is aligned for 16-byte accesses. Strides of lse and alibi_slopes are in elements. Windows are finite.
    PAGED: k and v are (pages, page_size, heads, dim), and their batch strides are the strides of a page. PAGE_PER_KEY:
    one page lookup per key. PAGE_PER_BLOCK: one per block of BLOCK_N keys, because no block crosses a page and nothing
    pads the left.
    PARTS: how many sums of weights the loops keep for a row: 1, or 4 or 8 in the lanes that hold its scores. In parts a
    step adds no long chain of weights, and no lane needs the sum of another one.
    WEIGHT_SHIFT: see `common.shifted`.
    VALUE_DIM: the head dim of v and out, 0 where it is the one of q and k.
    KIND: see `operation.FORWARD_KINDS`. Kind `any` tests for softcap, dropout and sinks when it runs. sinks, bias and
    its strides (s) are None in the kinds that take none. bias: (batch, nheads, seqlen_q, seqlen_k), its strides in
    elements.
    """
    m_block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    # With a causal mask the last rows see the most keys. They start first, so that short programs fill the end.
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    BLOCK_V: tl.constexpr = VALUE_DIM if VALUE_DIM else BLOCK_D
    TAIL_V: tl.constexpr = 0 if VALUE_DIM else TAIL

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
            VALUE_DIM if VALUE_DIM else head_dim * VEC, BLOCK_M, BLOCK_V, TAIL_V,
        )  # fmt: skip
        clear_outside(
            p_lse, float("inf"), 1, q_start, sq, stride_lh, batch == 0, is_last, first, step, 1, BLOCK_M, 1, 0
        )
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    shift = sk - sq
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
    if PAGED:
        p_table += batch64 * stride_tb
        if PAGED == PAGE_PER_KEY:
            if flags & HAS_LEFTPAD_K:
                leftpad = tl.load(leftpad_k + batch)
    else:
        p_k += batch64 * stride_kb * VEC + k_start.to(tl.int64) * stride_kn
        p_v += batch64 * stride_vb * VEC + k_start.to(tl.int64) * stride_vn
    stride_kp = stride_kb.to(tl.int64) * VEC
    stride_vp = stride_vb.to(tl.int64) * VEC
    p_out += row64 * stride_om
    p_lse += row64

    if KIND == "sink" or KIND == "bias" or KIND == "any":
        wide, narrow = load_sinks(sinks, head, (flags & HAS_SINKS) != 0, flags, out.dtype.element_ty)
    slope = 0.0
    if KIND == "alibi" or KIND == "any":
        if flags & HAS_ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_ab + head)

    bias_offset = batch64
    if KIND == "bias":
        bias_offset = batch64 * stride_sb + head.to(tl.int64) * stride_sh
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pos_m = first + offs_m  # [BLOCK_M]
    offs_d, offs_t = clamped_pair(head_dim, VEC, BLOCK_D, TAIL, DIRECT)  # [BLOCK_D], [TAIL]
    head_dim_v = VALUE_DIM if VALUE_DIM else head_dim
    offs_vd, offs_vt = offs_d, offs_t  # [BLOCK_V], [TAIL_V]
    if VALUE_DIM:
        offs_vd, offs_vt = clamped_pair(head_dim_v, VEC, BLOCK_V, TAIL_V)
    b_q, b_q_tail = load_pair(
        p_q, 0, offs_m, stride_qm, sq - first, head_dim, offs_d, offs_t, BLOCK_D, TAIL, True
    )  # [BLOCK_M, BLOCK_D], [BLOCK_M, TAIL]

    b_acc, b_acc_tail = zeros_pair(BLOCK_M, BLOCK_V, TAIL_V)  # [BLOCK_M, BLOCK_V], [BLOCK_M, TAIL_V]
    b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # [BLOCK_M]
    b_l = _no_weights(BLOCK_M, PARTS)
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, shift, sk, window_left, window_right, BLOCK_N)
    page = 0
    if PAGED == PAGE_PER_BLOCK:
        page = tl.load(p_table + full_lo // page_size, mask=full_lo < full_hi, other=0)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        next_page = page
        if PAGED == PAGE_PER_BLOCK:  # one block ahead, because the addresses of the keys wait for the page
            next_page = tl.load(p_table + (n + BLOCK_N) // page_size, mask=n + BLOCK_N < full_hi, other=0)
        b_acc, b_acc_tail, b_m, b_l = _attend_block(
            b_acc, b_acc_tail, b_m, b_l, b_q, b_q_tail, p_q, p_k, p_v, n, first, pos_m, sq, sk,
            stride_qm, stride_kn, stride_vn, head_dim, offs_d, offs_t, head_dim_v, offs_vd, offs_vt,
            scale, shift, window_left, window_right,
            softcap, slope, p_dropout, rng_state, plane, page, p_table, page_size, stride_kp, stride_vp, leftpad,
            bias, bias_offset, stride_sm, flags,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, BLOCK_V, TAIL_V, DEPTH, False, KIND, PAGED, HALF_UP, SHARED, ANCHOR,
            BESIDE, PARTS, WEIGHT_SHIFT,
        )  # fmt: skip
        page = next_page
    if PAGED != PAGE_PER_KEY and DEPTH >= BLOCK_D + TAIL:
        # The columns of b_k past head_dim repeat others, which meet zeros of b_q. If one holds an infinity, the product
        # is NaN. Then all blocks are done once more, by the loop for masked ones, which loads zeros there.
        if head_dim < BLOCK_D + TAIL:
            if tl.max(tl.ravel((b_l != b_l).to(tl.int32)), 0) > 0:
                b_acc, b_acc_tail = zeros_pair(BLOCK_M, BLOCK_V, TAIL_V)
                b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)
                b_l = _no_weights(BLOCK_M, PARTS)
                full_hi = full_lo
    # The masked blocks on both sides in one loop: [lo, full_lo) and [full_hi, hi).
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        if PAGED == PAGE_PER_BLOCK:
            page = tl.load(p_table + n // page_size)
        b_acc, b_acc_tail, b_m, b_l = _attend_block(
            b_acc, b_acc_tail, b_m, b_l, b_q, b_q_tail, p_q, p_k, p_v, n, first, pos_m, sq, sk,
            stride_qm, stride_kn, stride_vn, head_dim, offs_d, offs_t, head_dim_v, offs_vd, offs_vt,
            scale, shift, window_left, window_right,
            softcap, slope, p_dropout, rng_state, plane, page, p_table, page_size, stride_kp, stride_vp, leftpad,
            bias, bias_offset, stride_sm, flags,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, BLOCK_V, TAIL_V, DEPTH, True, KIND, PAGED, HALF_UP, SHARED, ANCHOR,
            BESIDE, PARTS, WEIGHT_SHIFT,
        )  # fmt: skip

    if PARTS > 1:
        b_l = tl.sum(tl.sum(b_l, 2), 1)
    unshift: tl.constexpr = 2.0**-WEIGHT_SHIFT
    if WEIGHT_SHIFT:
        b_l = b_l * unshift
    b_empty, b_l = sum_of_weights(b_m, b_l, v)  # [BLOCK_M] both
    if KIND == "sink" or KIND == "bias" or KIND == "any":
        NATURAL: tl.constexpr = KIND == "bias"
        b_m, b_l, b_alpha = add_sink(b_m, b_l, join_sinks(wide, narrow, flags, NATURAL), NATURAL)  # [BLOCK_M] each
        b_empty = b_l == 0.0  # [BLOCK_M]
        b_inverse = b_alpha / tl.where(b_empty, 1.0, b_l)  # [BLOCK_M]
    else:
        b_inverse = 1.0 / tl.where(b_empty, 1.0, b_l)  # [BLOCK_M]
    if KIND == "dropout" or KIND == "any":
        b_inverse = b_inverse / (1.0 - p_dropout)
    if WEIGHT_SHIFT:
        b_inverse = b_inverse * unshift
    b_acc = b_acc * b_inverse[:, None]
    b_acc_tail = b_acc_tail * b_inverse[:, None]
    store_pair(p_out, b_acc, b_acc_tail, offs_m, stride_om, sq - first, head_dim_v, BLOCK_V, TAIL_V)
    b_lse = b_m + tl.log2(b_l) * LN2 if KIND == "bias" else (b_m + tl.log2(b_l)) * LN2  # [BLOCK_M]
    b_lse = tl.where(b_empty, float("inf"), b_lse)
    tl.store(p_lse + offs_m, b_lse, mask=pos_m < sq)
