"""Attention over a KV cache with split-KV: few queries and many keys, limited by the bandwidth of reading the cache.

One tile holds the queries of a sequence for all query heads that share a key head, so the cache is read once for all of
them. Programs share the keys in splits, and `combine.py` adds their results.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI_SLOPES,
    HAS_BLOCK_TABLE,
    HAS_CU_SEQLENS_Q,
    HAS_DESCALE,
    HAS_SINKS,
    LN2,
    LOG2E,
    PAGE_PER_BLOCK,
    PAGE_PER_KEY,
    QUERY_HAS_16_BITS,
    QUERY_IS_FP16,
    cast,
    query_span,
    row_stride,
    shifted,
    sum_of_weights,
)
from flash_attn.kernels.fp8_cast import from_fp8
from flash_attn.kernels.groups import CachePages, CacheScores, CacheTile, PagedRows, QueryRows, SeenKeys
from flash_attn.kernels.lengths import RUNTIME_ARGUMENTS, cached_keys, new_keys
from flash_attn.kernels.scores import add_sink, alibi_bias, apply_softcap, join_sinks, load_sinks
from flash_attn.kernels.tiles import load_at, load_tile


@triton.jit
def _load_paged(rows, d, position, inside, pages, BLOCK_D: tl.constexpr, USE_TRANSPOSE: tl.constexpr = False):
    """Rows `position` of a sequence, their columns d to d + BLOCK_D, with one page lookup per key.

    A product finds the page, because a division is slower. It counts in units of 2 ** pages.shift rows. A cache has
    fewer than 2 ** 22 units, so the centre of a unit is further from the edge of a page than the error of the product.
    USE_TRANSPOSE as in `tiles.load_at`.
    """
    page = ((position >> pages.shift).to(tl.float32) + 0.5) * pages.inverse
    page = page.to(tl.int32)
    line = tl.load(pages.table + page, mask=inside, other=0)  # [rows]
    # [rows]
    row_offsets = line.to(tl.int64) * rows.page_stride + (position - page * pages.size).to(tl.int64) * rows.stride
    return load_at(rows.base + d, row_offsets, inside, rows.head_dim - d, BLOCK_D, USE_TRANSPOSE)


@triton.jit
def _widen(x, HAS_CAST: tl.constexpr):
    """x, cast to fp16 where it is FP8. HAS_CAST: see `fp8_cast.from_fp8`."""
    return from_fp8(x, HAS_CAST) if x.dtype.is_fp8() else x


@triton.jit
def _result(out):
    """The pointer to the result. For FP8 inputs the result is bf16."""
    return out.to(tl.pointer_type(tl.bfloat16)) if out.dtype.element_ty.is_fp8() else out


@triton.jit
def _load_bits(bits, offs, mask, flags):
    """Queries of 16 bits, bf16 or fp16, as fp32."""
    b_bits = tl.load(bits[:, None] + offs[None, :], mask=mask, other=0)
    if flags & QUERY_IS_FP16:
        b_wide = b_bits.to(tl.float16, bitcast=True).to(tl.float32)
    else:
        b_wide = (b_bits.to(tl.int32) << 16).to(tl.float32, bitcast=True)
    return b_wide


@triton.jit
def _load_queries(q, offs, mask):
    """Columns offs of the queries. Over a cache in FP8 they are fp16, whatever q is."""
    if q.rows.dtype.element_ty.is_fp8():
        if q.flags & QUERY_HAS_16_BITS:
            b_q = (_load_bits(q.bits, offs, mask, q.flags) * q.factor).to(tl.float16)
        else:
            b_q = tl.load(q.rows[:, None] + offs[None, :], mask=mask, other=0.0).to(tl.float16)
    else:
        b_q = tl.load(q.rows[:, None] + offs[None, :], mask=mask, other=0.0)
    return b_q


@triton.jit
def _into_range(b_top):
    """(factor, inverse): the power of 2 that brings the largest magnitude b_top to 2 ** 13 to 2 ** 14, and its inverse.
    Then all queries are fp16 with its full precision down to 2 ** -27 of the largest."""
    b_top = tl.minimum(tl.maximum(b_top, 2.0**-100), 2.0**123)
    exponent = b_top.to(tl.int32, bitcast=True) >> 23  # with its bias of 127
    factor = ((267 - exponent) << 23).to(tl.float32, bitcast=True)
    return factor, ((exponent - 13) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _visible_keys(diagonal, sk, window_left, window_right, chunk):
    """The first and the last key that a query sees, with its diagonal at key `diagonal`. No key if last < first."""
    first = tl.maximum(diagonal - window_left, 0)
    last = tl.minimum(diagonal + window_right, sk - 1)
    if chunk > 0:
        begin = diagonal // chunk * chunk
        first = tl.maximum(first, begin)
        last = tl.where(diagonal < 0, -1, tl.minimum(last, begin + chunk - 1))
    return first, last


@triton.jit
def _add_pieces(
    b_s, p_q, seen, rows, start, limit, inside, position, pages,
    BLOCK_N: tl.constexpr, WIDTH: tl.constexpr, BLOCK_K: tl.constexpr, PAGE_MODE: tl.constexpr,
    HAS_CAST: tl.constexpr,
):  # fmt: skip
    """b_s plus the products of queries and keys of up to WIDTH columns, by pieces of BLOCK_K columns."""
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    for d in tl.range(0, WIDTH, BLOCK_K):
        offs_d = d + tl.arange(0, BLOCK_K)  # [BLOCK_K]
        inside_q = seen.real[:, None] & (offs_d[None, :] < rows.head_dim)  # [BLOCK_M, BLOCK_K]
        b_q = _load_queries(p_q, offs_d, inside_q)  # [BLOCK_M, BLOCK_K]
        if PAGE_MODE == PAGE_PER_KEY:
            b_k = _load_paged(rows, d, position, inside, pages, BLOCK_K)  # [BLOCK_N, BLOCK_K]
        else:
            b_k = load_tile(  # [BLOCK_N, BLOCK_K]
                rows.base + d, start, offs_n, rows.stride, limit, rows.head_dim - d, BLOCK_K
            )
        b_s = tl.dot(b_q, tl.trans(_widen(b_k, HAS_CAST)), b_s, input_precision="ieee")
    return b_s


@triton.jit
def _weights(
    b_s, b_m, b_l, seen, pos_n, scale, scores, USE_MASK: tl.constexpr, HAS_SCORE_MOD: tl.constexpr,
    WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """(weights of the keys, factor of the accumulators, new maximum, new sum of weights) of a tile of scores.
    WEIGHT_SHIFT: see `common.shifted`."""
    b_s *= scale
    if HAS_SCORE_MOD:
        softcap = scores.softcap
        # Selections, because a branch would keep the compiler from pipelining the loads of this loop.
        cap = tl.where(softcap > 0.0, softcap, 1.0)
        b_s = tl.where(softcap > 0.0, apply_softcap(b_s, cap, 1.0 / cap)[0], b_s)
        b_s += alibi_bias(scores.slope[:, None], seen.diagonal[:, None], pos_n[None, :], 0)
    if USE_MASK:
        b_s = tl.where(pos_n[None, :] <= seen.last[:, None], b_s, float("-inf"))
        b_s = tl.where(pos_n[None, :] >= seen.first[:, None], b_s, float("-inf"))
    b_m_new = tl.maximum(b_m, tl.max(b_s, 1) * LOG2E)  # [BLOCK_M], in the units of exp2
    # A row that has seen no key yet has m = -inf. Subtract 0 there, because -inf - -inf is NaN.
    b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new) if USE_MASK else b_m_new  # [BLOCK_M]
    b_p = tl.exp2(b_s * LOG2E - shifted(b_m_sub, WEIGHT_SHIFT)[:, None])  # [BLOCK_M, BLOCK_N]
    b_alpha = tl.exp2(b_m - b_m_sub)  # [BLOCK_M]
    b_l = b_l * b_alpha + tl.sum(b_p, 1)
    return b_p, b_alpha, b_m_new, b_l


@triton.jit
def _attend_block(
    b_acc, b_m, b_l, b_q, b_qv, p_q, p_qv, seen, k, v, n, sk, page, pages, scores, TILE,
    PAGE_MODE: tl.constexpr, HAS_LATENT_QUERY: tl.constexpr, USE_MASK: tl.constexpr, HAS_SCORE_MOD: tl.constexpr,
    ROUND_HALF_UP: tl.constexpr, BREAK_DOT_CHAIN: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """Adds the keys n to n + BLOCK_N to the accumulators. Rows see the keys `seen.first` to `seen.last`.

    The values before `seen.begin` are zeros, because pages before a window may hold NaN, and 0 * NaN is NaN.

    Without USE_MASK all keys exist and every row sees every key. HAS_LATENT_QUERY: the values are keys of b_qv too.
    BREAK_DOT_CHAIN: see `forward._attend_block`.
    """
    offs_n = tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
    pos_n = n + offs_n  # [BLOCK_N]
    limit = sk if USE_MASK else n + TILE.BLOCK_N
    inside = pos_n < limit  # [BLOCK_N]
    start = n
    if PAGE_MODE == PAGE_PER_BLOCK:
        start = n % pages.size
        limit -= n - start
        k = PagedRows(k.base + page.to(tl.int64) * k.page_stride, k.stride, k.head_dim, k.page_stride)
        v = PagedRows(v.base + page.to(tl.int64) * v.page_stride, v.stride, v.head_dim, v.page_stride)
    if TILE.BLOCK_K < TILE.BLOCK_D:
        b_s = tl.zeros((TILE.BLOCK_M, TILE.BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
        b_s = _add_pieces(
            b_s, p_q, seen, k, start, limit, inside, pos_n + pages.leftpad, pages,
            TILE.BLOCK_N, TILE.BLOCK_D, TILE.BLOCK_K, PAGE_MODE, TILE.HAS_CAST,
        )  # fmt: skip
        if HAS_LATENT_QUERY:
            b_s = _add_pieces(
                b_s, p_qv, seen, v, start, limit, inside, pos_n + pages.leftpad, pages,
                TILE.BLOCK_N, TILE.BLOCK_V, TILE.BLOCK_K, PAGE_MODE, TILE.HAS_CAST,
            )  # fmt: skip
    else:
        if PAGE_MODE == PAGE_PER_KEY:
            b_k = _load_paged(k, 0, pos_n + pages.leftpad, inside, pages, TILE.BLOCK_D, True)  # [BLOCK_D, BLOCK_N]
        else:
            b_k = load_tile(  # [BLOCK_D, BLOCK_N]
                k.base, start, offs_n, k.stride, limit, k.head_dim, TILE.BLOCK_D, True
            )
        b_s = tl.dot(b_q, _widen(b_k, TILE.HAS_CAST), input_precision="ieee")  # [BLOCK_M, BLOCK_N]
    if PAGE_MODE == PAGE_PER_KEY:
        seen_v = inside & (pos_n >= seen.begin) if USE_MASK else inside  # [BLOCK_N]
        b_v = _load_paged(v, 0, pos_n + pages.leftpad, seen_v, pages, TILE.BLOCK_V)  # [BLOCK_N, BLOCK_V]
    else:
        begin = seen.begin - (n - start) if USE_MASK else None
        b_v = load_tile(  # [BLOCK_N, BLOCK_V]
            v.base, start, offs_n, v.stride, limit, v.head_dim, TILE.BLOCK_V, False, begin
        )
    b_v = _widen(b_v, TILE.HAS_CAST)
    if HAS_LATENT_QUERY and TILE.BLOCK_K >= TILE.BLOCK_D:
        if BREAK_DOT_CHAIN:
            b_s_v = tl.dot(b_qv, tl.trans(b_v), input_precision="ieee")
        else:
            b_s = tl.dot(b_qv, tl.trans(b_v), b_s, input_precision="ieee")
    if BREAK_DOT_CHAIN:  # the condition is true: see `forward._attend_block`
        if n < sk:
            b_s *= scores.scale
            if HAS_LATENT_QUERY:  # scaled by itself, because a sum of two products would become a chain of them, too
                b_s += b_s_v * scores.scale
            b_p, b_alpha, b_m_new, b_l = _weights(
                b_s, b_m, b_l, seen, pos_n, 1.0, scores, USE_MASK, HAS_SCORE_MOD, WEIGHT_SHIFT
            )
            b_p = b_p.to(b_v.dtype)
        else:
            b_p, b_alpha, b_m_new = b_s.to(b_v.dtype), b_m, b_m
    else:
        b_p, b_alpha, b_m_new, b_l = _weights(
            b_s, b_m, b_l, seen, pos_n, scores.scale, scores, USE_MASK, HAS_SCORE_MOD, WEIGHT_SHIFT
        )
    b_acc = b_acc * b_alpha[:, None]
    b_acc = tl.dot(cast(b_p, b_v.dtype, ROUND_HALF_UP), b_v, b_acc, input_precision="ieee")
    if BREAK_DOT_CHAIN:
        # No instruction, but a use, before which Triton ends this product. Otherwise ptxas serialises all wgmma
        # (warning C7515), because the accumulator registers are written in between.
        b_acc = tl.inline_asm_elementwise("", "=f,0", [b_acc], dtype=tl.float32, is_pure=True, pack=1)
    return b_acc, b_m_new, b_l


@triton.jit
def _spoil_beyond(
    out, lse, out_offset, lse_offset, first, step, rows, group, key_head, stride_om, stride_oh, stride_lh, head_dim,
    num_splits, VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """`tiles.spoil_beyond` for the rows of a key head. In a split only the lse becomes NaN, which makes the sum NaN."""
    offs_d = tl.arange(0, BLOCK_D)
    for start in tl.range(first + step, rows, step):
        offs_m = start + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        query, member = (offs_m // group).to(tl.int64), (offs_m % group).to(tl.int64)  # [BLOCK_M] both
        real = offs_m < rows
        tl.store(lse + (lse_offset + (key_head * group + member) * stride_lh + query), float("nan"), mask=real)
        if num_splits == 1:
            p_out = _result(out) + out_offset + (query * stride_om + member * VEC * stride_oh)  # [BLOCK_M]
            spoilt = tl.full((BLOCK_M, BLOCK_D), float("nan"), p_out.dtype.element_ty)
            tl.store(p_out[:, None] + offs_d[None, :], spoilt, mask=real[:, None] & (offs_d < head_dim)[None, :])


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_decode(
    q, k, v, out, lse, partial, partial_lse,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, block_table,
    q_descale, k_descale, v_descale, sinks,
    scale, softcap, page_inverse,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh,
    stride_vb, stride_vn, stride_vh, stride_ob, stride_om, stride_oh,
    stride_lb, stride_lh, stride_ab, stride_tb, page_size, page_shift,
    nheads_k, group, seqlen_q, seqlen_k, seqlen_new, capacity, head_dim, head_dim_v, window_left, window_right, chunk,
    lse_rows, m_blocks, num_splits, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_K: tl.constexpr, PAGE_MODE: tl.constexpr, HAS_LATENT_QUERY: tl.constexpr, HAS_SCORE_MOD: tl.constexpr,
    USE_SINKS: tl.constexpr, ROUND_HALF_UP: tl.constexpr, BREAK_DOT_CHAIN: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
    HAS_CAST: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows of one key head, over one of num_splits splits of the keys that they see.

    Grid: m_blocks * nheads_k * num_splits * batch. Row r is query r // group of query head key_head * group + r %
    group. head_dim_v: the head dim of v and out, at most BLOCK_V.
    HAS_LATENT_QUERY: multi-head latent attention. A score is the product of query and key plus the product of a second
    query and the value. A row of q has the second query, head_dim_v columns, and then the query, head_dim columns. The
    keys are the ones of `cached_keys` and then the ones of `new_keys`. Strides of q, k, v and out, and head dims, are
    in units of VEC elements (16 bytes), other strides in elements. Windows are finite. chunk > 0: a query sees only the
    keys in its own chunk of so many keys. FP8 numbers are cast to fp16, which represents all of them. descales are
    (batch, nheads_k), and out is bf16. Over a cache in FP8 the queries may be bf16 or fp16, and out has their type:
    `flags` says so, and VEC counts elements of the cache.
    num_splits > 1: the results go to partial, (num_splits, lse_rows, head_dim_v), and partial_lse, both with the layout
    of lse. partial_lse is -inf where a split holds no key.
    PAGE_MODE: with PAGE_PER_BLOCK no block of BLOCK_N keys crosses a page. A sequence of a cache without pages is one
    page, from its padding on. HAS_SCORE_MOD: there may be softcap and ALiBi. USE_SINKS: there may be sinks, which join
    the first split; else sinks is None. HAS_CAST: see `fp8_cast.from_fp8`.
    """
    pid = tl.program_id(0)
    m_block = pid % m_blocks
    pid = pid // m_blocks
    # Neighbouring programs read the other heads of the same keys, which are neighbours in memory.
    key_head = pid % nheads_k
    pid = pid // nheads_k
    split = pid % num_splits
    batch = pid // num_splits

    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first_row = m_block * BLOCK_M
    head_dim *= VEC
    head_dim_v *= VEC
    stride_om = row_stride(stride_om, VEC)
    batch64 = batch.to(tl.int64)
    lse_offset = batch64 * stride_lb + q_start
    out_offset = batch64 * stride_ob * VEC + q_start.to(tl.int64) * stride_om
    out_offset += (key_head * group * VEC).to(tl.int64) * stride_oh
    if flags & HAS_CU_SEQLENS_Q:
        _spoil_beyond(
            out, partial_lse, out_offset, lse_offset + split.to(tl.int64) * lse_rows, first_row, m_blocks * BLOCK_M,
            sq * group, group, key_head, stride_om, stride_oh, stride_lh, head_dim_v, num_splits,
            VEC, BLOCK_M, BLOCK_V,
        )  # fmt: skip
    if first_row >= sq * group:
        return
    leftpad, sk = cached_keys(batch, seqlen_k, seqused_k, leftpad_k, flags)
    _, added = new_keys(batch, seqlen_new, cu_seqlens_k, flags)
    sk = tl.minimum(sk + added, capacity) - leftpad
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)

    offs_m = first_row + tl.arange(0, BLOCK_M)  # [BLOCK_M]
    query = offs_m // group  # [BLOCK_M]
    head = key_head * group + offs_m % group  # [BLOCK_M]
    real = query < sq  # [BLOCK_M]
    diagonal = query + sk - sq  # [BLOCK_M]
    first, last = _visible_keys(diagonal, sk, window_left, window_right, chunk)  # [BLOCK_M] both
    # The bounds of a later query are never lower, so the first and the last query give the bounds of the block. From
    # reductions of `first` and `last` the compiler could not tell that the bounds are aligned.
    highest = tl.minimum((first_row + BLOCK_M - 1) // group, sq - 1)
    begin, _ = _visible_keys(first_row // group + sk - sq, sk, window_left, window_right, chunk)
    _, hi = _visible_keys(highest + sk - sq, sk, window_left, window_right, chunk)
    hi = tl.maximum(hi + 1, 0)
    lo = tl.minimum(begin, hi) // BLOCK_N * BLOCK_N
    length = tl.cdiv(tl.cdiv(hi - lo, BLOCK_N), num_splits) * BLOCK_N
    lo += split * length
    hi = tl.minimum(hi, lo + length)

    lse_row = lse_offset + head.to(tl.int64) * stride_lh + query  # [BLOCK_M]
    is_empty = (num_splits > 1) & (lo >= hi)
    has_sinks = False
    if USE_SINKS:
        has_sinks = ((flags & HAS_SINKS) != 0) & (split == 0)
        is_empty = is_empty & (has_sinks == 0)
    if is_empty:
        tl.store(partial_lse + (split.to(tl.int64) * lse_rows + lse_row), float("-inf"), mask=real)
        return

    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    offs_v = tl.arange(0, BLOCK_V)  # [BLOCK_V]
    p_q = q + (
        batch64 * stride_qb * VEC + q_start.to(tl.int64) * stride_qm + (key_head * group * VEC).to(tl.int64) * stride_qh
    )
    query64, member64 = query.to(tl.int64), (offs_m % group * VEC).to(tl.int64)
    p_q_rows = p_q + (query64 * stride_qm + member64 * stride_qh)  # [BLOCK_M]
    in_q = real[:, None] & (offs_d[None, :] < head_dim)  # [BLOCK_M, BLOCK_D]
    in_out = real[:, None] & (offs_v[None, :] < head_dim_v)  # [BLOCK_M, BLOCK_V]
    p_bits = p_q_rows
    factor, inverse, ratio = 1.0, 1.0, 1.0
    if k.dtype.element_ty.is_fp8():
        p_q_rows = p_q_rows.to(tl.pointer_type(k.dtype.element_ty))  # interpreted, q is a pointer to its own type
        start_q = batch64 * stride_qb * VEC + q_start.to(tl.int64) * stride_qm
        start_q += (key_head * group * VEC).to(tl.int64) * stride_qh
        p_bits = q.to(tl.pointer_type(tl.int16)) + start_q + (query64 * stride_qm + member64 * stride_qh)  # [BLOCK_M]
        if flags & QUERY_HAS_16_BITS:
            if HAS_LATENT_QUERY:
                b_first = _load_bits(p_bits, offs_v, in_out, flags)  # [BLOCK_M, BLOCK_V]
                b_rest = _load_bits(p_bits + head_dim_v, offs_d, in_q, flags)  # [BLOCK_M, BLOCK_D]
                if flags & HAS_DESCALE:  # scores have the descale of the keys, and the values are keys here
                    ratio = tl.load(v_descale + (batch * nheads_k + key_head))
                    ratio /= tl.load(k_descale + (batch * nheads_k + key_head))
                b_top = tl.maximum(tl.max(tl.abs(b_first)) * ratio, tl.max(tl.abs(b_rest)))
            else:
                b_top = tl.max(tl.abs(_load_bits(p_bits, offs_d, in_q, flags)))
            factor, inverse = _into_range(b_top)
    rows_q = QueryRows(p_q_rows, p_bits, factor, flags)
    rows_qv = QueryRows(p_q_rows, p_bits, factor * ratio, flags)
    if HAS_LATENT_QUERY:
        b_qv = _load_queries(rows_qv, offs_v, in_out)  # [BLOCK_M, BLOCK_V]
        rows_q = QueryRows(p_q_rows + head_dim_v, p_bits + head_dim_v, factor, flags)
    b_q = _load_queries(rows_q, offs_d, in_q)  # [BLOCK_M, BLOCK_D]
    if not HAS_LATENT_QUERY:
        b_qv = b_q
    kv_head = (key_head * VEC).to(tl.int64)
    p_k = k + kv_head * stride_kh
    p_v = v + kv_head * stride_vh
    p_table = block_table + batch64 * stride_tb
    if PAGE_MODE == PAGE_PER_BLOCK:
        p_k += leftpad.to(tl.int64) * stride_kn
        p_v += leftpad.to(tl.int64) * stride_vn
    rows_k = PagedRows(p_k, stride_kn, head_dim, stride_kb.to(tl.int64) * VEC)
    rows_v = PagedRows(p_v, stride_vn, head_dim_v, stride_vb.to(tl.int64) * VEC)
    pages = CachePages(p_table, page_size, leftpad, page_shift, page_inverse)
    seen = SeenKeys(real, diagonal, first, last, begin)

    if USE_SINKS:
        b_wide, b_narrow = load_sinks(sinks, head, has_sinks, flags, _result(out).dtype.element_ty)  # [BLOCK_M] both
    b_slope = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    if HAS_SCORE_MOD:
        if flags & HAS_ALIBI_SLOPES:
            b_slope = tl.load(alibi_slopes + batch * stride_ab + head, mask=real, other=0.0)  # [BLOCK_M]
    out_scale = 1.0
    if flags & HAS_DESCALE:
        kv_plane = batch * nheads_k + key_head
        scale *= tl.load(q_descale + kv_plane) * tl.load(k_descale + kv_plane)
        out_scale = tl.load(v_descale + kv_plane)
    scores = CacheScores(scale * inverse, softcap, b_slope)
    b_acc = tl.zeros((BLOCK_M, BLOCK_V), tl.float32)  # [BLOCK_M, BLOCK_V]
    b_m = tl.full((BLOCK_M,), float("-inf"), tl.float32)  # [BLOCK_M]
    b_l = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    # Blocks in [full_lo, full_hi) need no mask, because every row sees all of their keys. Rows past the last query
    # compute garbage that is never stored.
    full_lo, _ = _visible_keys(highest + sk - sq, sk, window_left, window_right, chunk)
    _, full_hi = _visible_keys(first_row // group + sk - sq, sk, window_left, window_right, chunk)
    full_lo = tl.maximum(lo, (full_lo + BLOCK_N - 1) // BLOCK_N * BLOCK_N)
    full_hi = tl.minimum(hi, full_hi + 1) // BLOCK_N * BLOCK_N
    full_lo = tl.minimum(full_lo, tl.cdiv(tl.maximum(hi - lo, 0), BLOCK_N) * BLOCK_N + lo)
    full_hi = tl.maximum(full_hi, full_lo)
    page = batch
    in_pages = (flags & HAS_BLOCK_TABLE) != 0
    if PAGE_MODE == PAGE_PER_BLOCK:
        page = tl.load(p_table + full_lo // page_size, mask=in_pages & (full_lo < full_hi), other=batch)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        next_page = page
        if PAGE_MODE == PAGE_PER_BLOCK:  # one block ahead, because the addresses of the keys wait for the page
            ahead = n + BLOCK_N
            next_page = tl.load(p_table + ahead // page_size, mask=in_pages & (ahead < full_hi), other=batch)
        b_acc, b_m, b_l = _attend_block(
            b_acc, b_m, b_l, b_q, b_qv, rows_q, rows_qv, seen, rows_k, rows_v, n, sk, page, pages, scores,
            CacheTile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_K, HAS_CAST), PAGE_MODE, HAS_LATENT_QUERY, False,
            HAS_SCORE_MOD, ROUND_HALF_UP, BREAK_DOT_CHAIN, WEIGHT_SHIFT,
        )  # fmt: skip
        page = next_page
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        if PAGE_MODE == PAGE_PER_BLOCK:
            page = tl.load(p_table + n // page_size, mask=in_pages, other=batch)
        b_acc, b_m, b_l = _attend_block(
            b_acc, b_m, b_l, b_q, b_qv, rows_q, rows_qv, seen, rows_k, rows_v, n, sk, page, pages, scores,
            CacheTile(BLOCK_M, BLOCK_N, BLOCK_D, BLOCK_V, BLOCK_K, HAS_CAST), PAGE_MODE, HAS_LATENT_QUERY, True,
            HAS_SCORE_MOD, ROUND_HALF_UP, BREAK_DOT_CHAIN, WEIGHT_SHIFT,
        )  # fmt: skip

    if WEIGHT_SHIFT:
        unshift: tl.constexpr = 2.0**-WEIGHT_SHIFT
        b_l = b_l * unshift
        out_scale = out_scale * unshift
    b_empty, b_l = sum_of_weights(b_m, b_l, v)  # [BLOCK_M] both
    if USE_SINKS:
        b_m, b_l, b_alpha = add_sink(b_m, b_l, join_sinks(b_wide, b_narrow, flags))  # [BLOCK_M] each
        b_empty = b_l == 0.0  # [BLOCK_M]
        b_acc = b_acc * b_alpha[:, None]
    b_acc = b_acc * (out_scale / tl.where(b_empty, 1.0, b_l))[:, None]
    b_lse = (b_m + tl.log2(b_l)) * LN2  # [BLOCK_M]
    if num_splits > 1:
        lse_row += split.to(tl.int64) * lse_rows
        tl.store(partial_lse + lse_row, tl.where(b_empty, float("-inf"), b_lse), mask=real)
        tl.store(partial + (lse_row[:, None] * head_dim_v + offs_v[None, :]), b_acc, mask=in_out)
    else:
        p_out = _result(out) + out_offset + (query64 * stride_om + member64 * stride_oh)  # [BLOCK_M]
        tl.store(lse + lse_row, tl.where(b_empty, float("inf"), b_lse), mask=real)
        if out.dtype.element_ty.is_fp8() and (flags & QUERY_IS_FP16) != 0:
            p_fp16 = p_out.to(tl.pointer_type(tl.float16))  # [BLOCK_M]
            tl.store(p_fp16[:, None] + offs_v[None, :], b_acc.to(tl.float16), mask=in_out)
        else:
            tl.store(p_out[:, None] + offs_v[None, :], b_acc.to(p_out.dtype.element_ty), mask=in_out)
