"""Forward attention: out = softmax(scale * q k^T + masks) v, tile by tile with an online softmax."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI,
    HAS_CU_SEQLENS_Q,
    HAS_LEFTPAD_K,
    LN2,
    LOG2E,
    RUNTIME_ARGUMENTS,
    alibi_bias,
    capped,
    hide,
    key_bounds,
    key_span,
    locate,
    narrow,
    query_span,
    row_stride,
)
from flash_attn.kernels.dropout import dropped, keep_mask
from flash_attn.kernels.tiles import (
    PAGE_PER_BLOCK,
    PAGE_PER_KEY,
    add_product,
    clear_outside,
    deep_dot,
    deep_dot_paged,
    dot_pair,
    held_pair,
    load_paged_pair,
    load_pair,
    store_pair,
    zero_pair,
)


@triton.jit
def _tile(
    acc, acc_tail, m_i, l_i, q, q_tail, q_rows, k_head, v_head, n, first, rows, seqlen_q, seqlen_k,
    stride_qm, stride_kn, stride_vn, head_dim, columns, tail_columns, scale, shift, window_left, window_right,
    softcap, slope, p_dropout, rng_state, plane, page, table, page_size, stride_kp, stride_vp, leftpad,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr, HALF_UP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One block of keys. q and q_tail are the tiles, q_rows points at their first row, k_head and v_head at key 0;
    m_i is in the units of s: those of exp2 where a kind shapes the scores, else before scaling."""
    SHAPED: tl.constexpr = KIND != "plain" and KIND != "dropout"
    offs_n = tl.arange(0, BLOCK_N)
    cols = n + offs_n
    start, limit = n, seqlen_k
    if PAGED == PAGE_PER_BLOCK:
        start = n % page_size
        limit = seqlen_k - (n - start)
        k_head += page.to(tl.int64) * stride_kp
        v_head += page.to(tl.int64) * stride_vp
    if PAGED == PAGE_PER_KEY and DEPTH < BLOCK_D + TAIL:
        s = deep_dot_paged(
            q_rows, rows - first, stride_qm, seqlen_q - first,
            k_head, table, cols, leftpad, page_size, stride_kp, stride_kn, seqlen_k,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
    elif PAGED == PAGE_PER_KEY:
        k, k_tail = load_paged_pair(
            k_head, table, cols, leftpad, page_size, stride_kp, stride_kn, seqlen_k, head_dim, BLOCK_D, TAIL, True
        )
        s = dot_pair(q, q_tail, k, k_tail, TAIL)
    elif DEPTH < BLOCK_D + TAIL:
        s = deep_dot(
            q_rows, 0, rows - first, stride_qm, seqlen_q - first, k_head, start, offs_n, stride_kn, limit,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
    else:
        k, k_tail = load_pair(
            k_head, start, offs_n, stride_kn, limit, head_dim, columns, tail_columns, BLOCK_D, TAIL, MASK, True
        )
        s = dot_pair(q, q_tail, k, k_tail, TAIL)
    if PAGED == PAGE_PER_KEY:
        v, v_tail = load_paged_pair(
            v_head, table, cols, leftpad, page_size, stride_vp, stride_vn, seqlen_k, head_dim, BLOCK_D, TAIL
        )
    else:
        v, v_tail = load_pair(
            v_head, start, offs_n, stride_vn, limit, head_dim, columns, tail_columns, BLOCK_D, TAIL, MASK
        )
    if SHAPED:
        s = s * (scale * LOG2E)
        if KIND != "alibi":
            if KIND == "softcap" or softcap > 0.0:
                s, _ = capped(s, softcap * LOG2E, 1.0 / (softcap * LOG2E))
        if KIND != "softcap":
            s += alibi_bias(slope * LOG2E, rows[:, None], cols[None, :], shift)
    if MASK:
        s = hide(s, float("-inf"), rows[:, None], cols[None, :], shift, seqlen_k, window_left, window_right)
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # A row that has seen no key yet keeps m = -inf; subtract 0 there, or -inf - -inf makes a NaN.
    m_sub = tl.where(m_new == float("-inf"), 0.0, m_new) if MASK else m_new
    if SHAPED:
        p = tl.exp2(s - m_sub[:, None])
        alpha = tl.exp2(m_i - m_sub)
    else:
        c = scale * LOG2E  # positive, as the maximum is taken before scaling: other scales are of kind any
        p = tl.exp2(s * c - (m_sub * c)[:, None])
        alpha = tl.exp2((m_i - m_sub) * c)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    if TAIL:
        acc_tail = acc_tail * alpha[:, None]
    if KIND == "dropout" or KIND == "any":
        if KIND == "dropout" or p_dropout > 0.0:
            keep = keep_mask(rng_state, p_dropout, plane, first, n, BLOCK_M, BLOCK_N, SHARED, False)
            p = dropped(p, keep, p_dropout)
    acc, acc_tail = add_product(narrow(p, v.dtype, HALF_UP), v, v_tail, acc, acc_tail, TAIL)
    return acc, acc_tail, m_new, l_i


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_fwd(
    q, k, v, out, lse,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, block_table,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh,
    stride_lb, stride_lh, stride_ab, stride_tb, page_size,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    TAIL: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, PAGED: tl.constexpr, NUM_XCDS: tl.constexpr,
    HALF_UP: tl.constexpr, SHARED: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M query rows of one head. Grid: see `common.locate`.

    Strides of q, k, v, out and head_dim come in units of VEC elements (16 bytes), so that the compiler knows
    every row is aligned for 16-byte accesses; lse and alibi strides in elements. Windows are finite here.
    PAGED: k and v are (pages, page_size, heads, dim), and their batch strides are the strides of a page. PAGE_PER_KEY:
    one page lookup per key. PAGE_PER_BLOCK: one per block of BLOCK_N keys, because no block crosses a page and nothing
    pads the left.
    KIND: see `operations.KINDS`; `any` tests for softcap and dropout when it runs.
    """
    m_block, blocks, batch, head = locate(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    # The last rows see the most keys when causal: start them first, so that the short ones fill the tail.
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head

    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    stride_om = row_stride(stride_om, VEC)
    batch64 = batch.to(tl.int64)
    out += batch64 * stride_ob * VEC + (head * VEC).to(tl.int64) * stride_oh
    lse += batch64 * stride_lb + head.to(tl.int64) * stride_lh
    if flags & HAS_CU_SEQLENS_Q:  # then stride_lh is the number of all rows
        is_last = batch == planes // nheads - 1
        step = blocks * BLOCK_M
        clear_outside(
            out, 0.0, stride_om, q_start, sq, stride_lh, batch == 0, is_last, first, step, head_dim * VEC,
            BLOCK_M, BLOCK_D, TAIL,
        )  # fmt: skip
        clear_outside(lse, float("inf"), 1, q_start, sq, stride_lh, batch == 0, is_last, first, step, 1, BLOCK_M, 1, 0)
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    shift = sk - sq
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)

    row64 = (q_start + first).to(tl.int64)
    q += batch64 * stride_qb * VEC + (head * VEC).to(tl.int64) * stride_qh + row64 * stride_qm
    kv_head = (head // group * VEC).to(tl.int64)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    table = block_table
    leftpad = 0
    if PAGED:
        table += batch64 * stride_tb
        if PAGED == PAGE_PER_KEY:
            if flags & HAS_LEFTPAD_K:
                leftpad = tl.load(leftpad_k + batch)
    else:
        k += batch64 * stride_kb * VEC + k_start.to(tl.int64) * stride_kn
        v += batch64 * stride_vb * VEC + k_start.to(tl.int64) * stride_vn
    stride_kp = stride_kb.to(tl.int64) * VEC
    stride_vp = stride_vb.to(tl.int64) * VEC
    out += row64 * stride_om
    lse += row64

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

    acc, acc_tail = zero_pair(BLOCK_M, BLOCK_D, TAIL)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, shift, sk, window_left, window_right, BLOCK_N)
    page = 0
    if PAGED == PAGE_PER_BLOCK:
        page = tl.load(table + full_lo // page_size, mask=full_lo < full_hi, other=0)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        next_page = page
        if PAGED == PAGE_PER_BLOCK:  # a block ahead, as the addresses of keys wait for it
            next_page = tl.load(table + (n + BLOCK_N) // page_size, mask=n + BLOCK_N < full_hi, other=0)
        acc, acc_tail, m_i, l_i = _tile(
            acc, acc_tail, m_i, l_i, q_tile, q_tail, q, k, v, n, first, rows, sq, sk,
            stride_qm, stride_kn, stride_vn, head_dim, columns, tail_columns, scale, shift, window_left, window_right,
            softcap, slope, p_dropout, rng_state, plane, page, table, page_size, stride_kp, stride_vp, leftpad,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH, False, KIND, PAGED, HALF_UP, SHARED,
        )  # fmt: skip
        page = next_page
    # The blocks left and right of the full ones, in one loop: [lo, full_lo) and [full_hi, hi).
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        if PAGED == PAGE_PER_BLOCK:
            page = tl.load(table + n // page_size)
        acc, acc_tail, m_i, l_i = _tile(
            acc, acc_tail, m_i, l_i, q_tile, q_tail, q, k, v, n, first, rows, sq, sk,
            stride_qm, stride_kn, stride_vn, head_dim, columns, tail_columns, scale, shift, window_left, window_right,
            softcap, slope, p_dropout, rng_state, plane, page, table, page_size, stride_kp, stride_vp, leftpad,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH, True, KIND, PAGED, HALF_UP, SHARED,
        )  # fmt: skip

    empty = l_i == 0.0
    inverse = 1.0 / tl.where(empty, 1.0, l_i)
    if KIND == "dropout" or KIND == "any":
        inverse = inverse / (1.0 - p_dropout)
    acc = acc * inverse[:, None]
    acc_tail = acc_tail * inverse[:, None]
    store_pair(out, acc, acc_tail, offs_m, stride_om, sq - first, head_dim, BLOCK_D, TAIL)
    m_i = m_i * (scale if KIND == "plain" or KIND == "dropout" else LN2)
    lse_rows = tl.where(empty, float("inf"), m_i + tl.log2(l_i) * LN2)
    tl.store(lse + offs_m, lse_rows, mask=rows < sq)
