"""Attention over a cache of keys and values: few queries, many keys, bound by the reading of the cache.

The query heads that share a key head lie in one tile with the queries of a sequence, so that the cache is read
once for all of them; the keys are split among programs, whose results `combine.py` joins.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI,
    HAS_BLOCK_TABLE,
    HAS_DESCALE,
    LN2,
    LOG2E,
    alibi_bias,
    capped,
    narrow,
    query_span,
    row_stride,
)
from flash_attn.kernels.lengths import RUNTIME_ARGUMENTS, cached_keys, new_keys
from flash_attn.kernels.tiles import PAGE_PER_BLOCK, PAGE_PER_KEY, load_places, load_tile


@triton.jit
def _load_paged(
    base, table, place, inside, page_size, page_shift, page_inverse, stride_page, stride, head_dim,
    BLOCK_D: tl.constexpr, FLIP: tl.constexpr = False,
):  # fmt: skip
    """Rows `place` of a sequence, from the pages that its row of the block table names; FLIP as in `tiles.load_places`.

    Pages are found with a product instead of a division, in units of 2 ** page_shift rows, of which there are
    fewer than 2 ** 22: the centre of a unit is then further from a page's edge than the product's error.
    """
    page = ((place >> page_shift).to(tl.float32) + 0.5) * page_inverse
    page = page.to(tl.int32)
    line = tl.load(table + page, mask=inside, other=0)
    places = line.to(tl.int64) * stride_page + (place - page * page_size).to(tl.int64) * stride
    return load_places(base, places, inside, head_dim, BLOCK_D, FLIP)


@triton.jit
def _wide(x):
    """x, widened to fp16 where it is FP8."""
    return x.to(tl.float16) if x.dtype.is_fp8() else x


@triton.jit
def _result(out):
    """The pointer to the result, which is bf16 for FP8 inputs."""
    return out.to(tl.pointer_type(tl.bfloat16)) if out.dtype.element_ty.is_fp8() else out


@triton.jit
def _seen(position, sk, window_left, window_right, chunk):
    """The first and the last key that a query sees whose diagonal lies at key `position`; none if last < first."""
    first = tl.maximum(position - window_left, 0)
    last = tl.minimum(position + window_right, sk - 1)
    if chunk > 0:
        begin = position // chunk * chunk
        first = tl.maximum(first, begin)
        last = tl.where(position < 0, -1, tl.minimum(last, begin + chunk - 1))
    return first, last


@triton.jit
def _block(
    acc, m_i, l_i, q_tile, q_rows, real, position, first, last, k, v, n, sk, stride_kn, stride_vn, head_dim,
    page, table, leftpad, page_size, page_shift, page_inverse, stride_kp, stride_vp, scale, softcap, slope,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr, PAGED: tl.constexpr,
    MASK: tl.constexpr, SHAPED: tl.constexpr, HALF_UP: tl.constexpr,
):  # fmt: skip
    """Keys n .. n + BLOCK_N, of which rows see `first` to `last`; without MASK all of them, and all exist."""
    offs_n = tl.arange(0, BLOCK_N)
    cols = n + offs_n
    limit = sk if MASK else n + BLOCK_N
    inside = cols < limit
    start = n
    if PAGED == PAGE_PER_BLOCK:
        start = n % page_size
        limit -= n - start
        k += page.to(tl.int64) * stride_kp
        v += page.to(tl.int64) * stride_vp
    if DEPTH < BLOCK_D:
        s = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for d in tl.range(0, BLOCK_D, DEPTH):
            part = d + tl.arange(0, DEPTH)
            q_part = tl.load(
                q_rows[:, None] + part[None, :], mask=real[:, None] & (part[None, :] < head_dim), other=0.0
            )
            if PAGED == PAGE_PER_KEY:
                k_part = _load_paged(
                    k + d, table, cols + leftpad, inside, page_size, page_shift, page_inverse,
                    stride_kp, stride_kn, head_dim - d, DEPTH,
                )  # fmt: skip
            else:
                k_part = load_tile(k + d, start, offs_n, stride_kn, limit, head_dim - d, DEPTH)
            s = tl.dot(_wide(q_part), tl.trans(_wide(k_part)), s, input_precision="ieee")
    else:
        if PAGED == PAGE_PER_KEY:
            k_tile = _load_paged(
                k, table, cols + leftpad, inside, page_size, page_shift, page_inverse,
                stride_kp, stride_kn, head_dim, BLOCK_D, True,
            )  # fmt: skip
        else:
            k_tile = load_tile(k, start, offs_n, stride_kn, limit, head_dim, BLOCK_D, True)
        s = tl.dot(_wide(q_tile), _wide(k_tile), input_precision="ieee")
    if PAGED == PAGE_PER_KEY:
        v_tile = _load_paged(
            v, table, cols + leftpad, inside, page_size, page_shift, page_inverse,
            stride_vp, stride_vn, head_dim, BLOCK_D,
        )  # fmt: skip
    else:
        v_tile = load_tile(v, start, offs_n, stride_vn, limit, head_dim, BLOCK_D)
    v_tile = _wide(v_tile)
    s *= scale
    if SHAPED:
        # Selections, as a branch would keep the loads of this loop from being pipelined.
        cap = tl.where(softcap > 0.0, softcap, 1.0)
        s = tl.where(softcap > 0.0, capped(s, cap, 1.0 / cap)[0], s)
        s += alibi_bias(slope[:, None], position[:, None], cols[None, :], 0)
    if MASK:
        s = tl.where(cols[None, :] <= last[:, None], s, float("-inf"))
        s = tl.where(cols[None, :] >= first[:, None], s, float("-inf"))
    m_new = tl.maximum(m_i, tl.max(s, 1))
    # A row that has seen no key yet keeps m = -inf; subtract 0 there, or -inf - -inf makes a NaN.
    m_sub = tl.where(m_new == float("-inf"), 0.0, m_new) if MASK else m_new
    p = tl.exp2(s * LOG2E - (m_sub * LOG2E)[:, None])
    alpha = tl.exp2((m_i - m_sub) * LOG2E)
    l_i = l_i * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    acc = tl.dot(narrow(p, v_tile.dtype, HALF_UP), v_tile, acc, input_precision="ieee")
    return acc, m_new, l_i


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_decode(
    q, k, v, out, lse, partial, partial_lse,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, block_table,
    q_descale, k_descale, v_descale,
    scale, softcap, page_inverse,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh,
    stride_lb, stride_lh, stride_ab, stride_tb, page_size, page_shift,
    nheads_k, group, seqlen_q, seqlen_k, seqlen_new, capacity, head_dim, window_left, window_right, chunk,
    lse_rows, m_blocks, num_splits, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr,
    DEPTH: tl.constexpr, PAGED: tl.constexpr, SHAPED: tl.constexpr, HALF_UP: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one key head, over one of num_splits parts of the keys that they see.

    Row r is query r // group of query head key_head * group + r % group. Grid: m_blocks * nheads_k *
    num_splits * batch. Keys are those of `cached_keys` with the new ones of `new_keys`. Strides of q, k, v, out
    and head_dim come in units of VEC elements (16 bytes), the others in elements; windows are finite. chunk > 0:
    keys are seen in the query's own chunk of so many only. FP8 numbers are widened to fp16, which holds them all;
    descales are (batch, nheads_k), and out then is bf16. With num_splits > 1 the results go to partial,
    (num_splits, lse_rows, head_dim), and partial_lse, both laid out as lse, -inf where a part holds no key.
    PAGED: with PAGE_PER_BLOCK no block of BLOCK_N keys crosses a page. A sequence of a cache without pages is one page,
    from its padding on. SHAPED: there may be softcap and ALiBi.
    """
    pid = tl.program_id(0)
    m_block = pid % m_blocks
    pid = pid // m_blocks
    # Neighbours read the other heads of the same keys, which lie side by side in memory.
    key_head = pid % nheads_k
    pid = pid // nheads_k
    split = pid % num_splits
    batch = pid // num_splits

    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first_row = m_block * BLOCK_M
    if first_row >= sq * group:
        return
    leftpad, sk = cached_keys(batch, seqlen_k, seqused_k, leftpad_k, flags)
    _, added = new_keys(batch, seqlen_new, cu_seqlens_k, flags)
    sk = tl.minimum(sk + added, capacity) - leftpad
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)
    stride_om = row_stride(stride_om, VEC)

    offs_m = first_row + tl.arange(0, BLOCK_M)
    query = offs_m // group
    head = key_head * group + offs_m % group
    real = query < sq
    position = query + sk - sq
    first, last = _seen(position, sk, window_left, window_right, chunk)
    # The bounds of a later query are nowhere lower. Not by reductions of first and last: the compiler does not see
    # through those that what comes of them is aligned.
    highest = tl.minimum((first_row + BLOCK_M - 1) // group, sq - 1)
    lo, _ = _seen(first_row // group + sk - sq, sk, window_left, window_right, chunk)
    _, hi = _seen(highest + sk - sq, sk, window_left, window_right, chunk)
    hi = tl.maximum(hi + 1, 0)
    lo = tl.minimum(lo, hi) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(hi - lo, BLOCK_N), num_splits) * BLOCK_N
    lo += split * length
    hi = tl.minimum(hi, lo + length)

    batch64 = batch.to(tl.int64)
    lse_row = batch64 * stride_lb + head.to(tl.int64) * stride_lh + (q_start + query)
    if (num_splits > 1) & (lo >= hi):
        tl.store(partial_lse + (split.to(tl.int64) * lse_rows + lse_row), float("-inf"), mask=real)
        return

    offs_d = tl.arange(0, BLOCK_D)
    q += (
        batch64 * stride_qb * VEC + q_start.to(tl.int64) * stride_qm + (key_head * group * VEC).to(tl.int64) * stride_qh
    )
    query64, member64 = query.to(tl.int64), (offs_m % group * VEC).to(tl.int64)
    q_rows = q + (query64 * stride_qm + member64 * stride_qh)
    in_q = real[:, None] & (offs_d[None, :] < head_dim)
    q_tile = tl.load(q_rows[:, None] + offs_d[None, :], mask=in_q, other=0.0)
    kv_head = (key_head * VEC).to(tl.int64)
    k += kv_head * stride_kh
    v += kv_head * stride_vh
    table = block_table + batch64 * stride_tb
    if PAGED == PAGE_PER_BLOCK:
        k += leftpad.to(tl.int64) * stride_kn
        v += leftpad.to(tl.int64) * stride_vn
    stride_kp = stride_kb.to(tl.int64) * VEC
    stride_vp = stride_vb.to(tl.int64) * VEC

    slope = tl.zeros((BLOCK_M,), tl.float32)
    if SHAPED:
        if flags & HAS_ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_ab + head, mask=real, other=0.0)
    out_scale = 1.0
    if flags & HAS_DESCALE:
        place = batch * nheads_k + key_head
        scale *= tl.load(q_descale + place) * tl.load(k_descale + place)
        out_scale = tl.load(v_descale + place)
    acc = tl.zeros((BLOCK_M, BLOCK_D), tl.float32)
    m_i = tl.full((BLOCK_M,), float("-inf"), tl.float32)
    l_i = tl.zeros((BLOCK_M,), tl.float32)
    # Blocks that every row sees whole need no masks: [full_lo, full_hi). A row beyond the last query sees what it will.
    full_lo, _ = _seen(highest + sk - sq, sk, window_left, window_right, chunk)
    _, full_hi = _seen(first_row // group + sk - sq, sk, window_left, window_right, chunk)
    full_lo = tl.maximum(lo, (full_lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_hi = tl.minimum(hi, full_hi + 1) // BLOCK_N * BLOCK_N
    full_lo = tl.minimum(full_lo, tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N) * BLOCK_N + lo)
    full_hi = tl.maximum(full_hi, full_lo)
    page = batch
    in_pages = (flags & HAS_BLOCK_TABLE) != 0
    if PAGED == PAGE_PER_BLOCK:
        page = tl.load(table + full_lo // page_size, mask=in_pages & (full_lo < full_hi), other=batch)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        next_page = page
        if PAGED == PAGE_PER_BLOCK:  # a block ahead, as the addresses of keys wait for it
            ahead = n + BLOCK_N
            next_page = tl.load(table + ahead // page_size, mask=in_pages & (ahead < full_hi), other=batch)
        acc, m_i, l_i = _block(
            acc, m_i, l_i, q_tile, q_rows, real, position, first, last, k, v, n, sk, stride_kn, stride_vn, head_dim,
            page, table, leftpad, page_size, page_shift, page_inverse, stride_kp, stride_vp, scale, softcap, slope,
            BLOCK_M, BLOCK_N, BLOCK_D, DEPTH, PAGED, False, SHAPED, HALF_UP,
        )  # fmt: skip
        page = next_page
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        if PAGED == PAGE_PER_BLOCK:
            page = tl.load(table + n // page_size, mask=in_pages, other=batch)
        acc, m_i, l_i = _block(
            acc, m_i, l_i, q_tile, q_rows, real, position, first, last, k, v, n, sk, stride_kn, stride_vn, head_dim,
            page, table, leftpad, page_size, page_shift, page_inverse, stride_kp, stride_vp, scale, softcap, slope,
            BLOCK_M, BLOCK_N, BLOCK_D, DEPTH, PAGED, True, SHAPED, HALF_UP,
        )  # fmt: skip

    empty = l_i == 0.0
    acc = acc * (out_scale / tl.where(empty, 1.0, l_i))[:, None]
    lse_i = m_i + tl.log2(l_i) * LN2
    if num_splits > 1:
        lse_row += split.to(tl.int64) * lse_rows
        tl.store(partial_lse + lse_row, tl.where(empty, float("-inf"), lse_i), mask=real)
        tl.store(partial + (lse_row[:, None] * head_dim + offs_d[None, :]), acc, mask=in_q)
    else:
        place_out = batch64 * stride_ob * VEC + q_start.to(tl.int64) * stride_om
        place_out += (key_head * group * VEC).to(tl.int64) * stride_oh
        out_rows = _result(out) + place_out + (query64 * stride_om + member64 * stride_oh)
        tl.store(lse + lse_row, tl.where(empty, float("inf"), lse_i), mask=real)
        tl.store(out_rows[:, None] + offs_d[None, :], acc.to(out_rows.dtype.element_ty), mask=in_q)
