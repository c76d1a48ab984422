"""Writes new keys and values into their cache, keys turned by rotary embedding; turns the queries too."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_CACHE_BATCH_IDX,
    HAS_ROTARY_SEQLENS,
    HAS_SEQUSED_K,
    ROTARY_INTERLEAVED,
    ROTARY_MOVES,
    query_span,
)
from flash_attn.kernels.lengths import RUNTIME_ARGUMENTS, new_keys


@triton.jit
def _turned(rows, offs_d, inside, angle_rows, known, cos, sin, stride_c, rotary_half, flags):
    """The tile whose rows start at `rows`, its first 2 * rotary_half columns turned in fp32."""
    x = tl.load(rows[:, None] + offs_d[None, :], mask=inside, other=0.0)
    if rotary_half > 0:
        turns = offs_d < 2 * rotary_half
        interleaved = (flags & ROTARY_INTERLEAVED) != 0
        apart = tl.where(interleaved, 1, rotary_half)
        second = tl.where(interleaved, offs_d % 2 == 1, offs_d >= rotary_half)
        partner = tl.where(second, offs_d - apart, offs_d + apart)
        angle = tl.where(interleaved, offs_d // 2, offs_d - tl.where(second, rotary_half, 0))
        inside = inside & turns[None, :]
        other = tl.load(rows[:, None] + partner[None, :], mask=inside, other=0.0).to(tl.float32)
        table = angle_rows[:, None] * stride_c + angle[None, :]
        inside = inside & known[:, None]
        c = tl.load(cos + table, mask=inside, other=0.0).to(tl.float32)
        s = tl.load(sin + table, mask=inside, other=0.0).to(tl.float32)
        turned = x.to(tl.float32) * c + tl.where(second[None, :], other, -other) * s
        x = tl.where(turns[None, :], turned.to(x.dtype), x)
    return x


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_append(
    k_new, v_new, k, v, q, q_turned, cos, sin,
    cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, rotary_seqlens,
    stride_nb, stride_nm, stride_nh, stride_wb, stride_wm, stride_wh,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_qb, stride_qm, stride_qh, stride_rb, stride_rm, stride_rh, stride_cm, stride_tb, page_size,
    nheads, nheads_k, seqlen_q, seqlen_k, seqlen_new, capacity, head_dim, rotary_half, places,
    k_blocks, q_blocks, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows, (new key, key head) or (query, query head), and BLOCK_D columns.

    Grid: ((k_blocks + q_blocks) * batch, head_dim / BLOCK_D); q_blocks is 0 where q is not turned. Strides of
    k_new (n), v_new (w), k, v, q and q_turned (r) and head_dim come in units of VEC elements (16 bytes), those of
    cos and sin (places, rotary_half) in elements. page_size is 0 for a cache without pages. Keys outside of
    the cache are dropped.
    """
    pid = tl.program_id(0)
    block = pid % (k_blocks + q_blocks)
    batch = pid // (k_blocks + q_blocks)
    batch64 = batch.to(tl.int64)
    head_dim *= VEC
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    in_d = offs_d < head_dim

    length = seqlen_k
    if flags & HAS_SEQUSED_K:
        length = tl.load(seqused_k + batch)
    origin = length
    if flags & HAS_ROTARY_SEQLENS:
        origin = tl.load(rotary_seqlens + batch)
    if block < k_blocks:
        offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)
        token = offs_m // nheads_k
        head = (offs_m % nheads_k * VEC).to(tl.int64)
        start, added = new_keys(batch, seqlen_new, cu_seqlens_k, flags)
        place = length + token
        real = (token < added) & (place >= 0) & (place < capacity)
        inside = real[:, None] & in_d[None, :]
        line = batch + place * 0
        if page_size > 0:
            line = tl.load(block_table + batch64 * stride_tb + place // page_size, mask=real, other=0)
            place = place % page_size
        elif flags & HAS_CACHE_BATCH_IDX:
            line += tl.load(cache_batch_idx + batch) - batch
        line = line.to(tl.int64) * VEC
        place = (place * VEC).to(tl.int64)
        source = batch64 * VEC
        row = ((start + token) * VEC).to(tl.int64)
        rows = k_new + (source * stride_nb + row * stride_nm + head * stride_nh)
        angle = origin + token
        known = angle < places
        keys = _turned(rows, offs_d, inside, angle.to(tl.int64), known, cos, sin, stride_cm, rotary_half, flags)
        to = k + (line * stride_kb + place * stride_kn + head * stride_kh)
        tl.store(to[:, None] + offs_d[None, :], keys.to(k.dtype.element_ty), mask=inside)
        rows = v_new + (source * stride_wb + row * stride_wm + head * stride_wh)
        values = tl.load(rows[:, None] + offs_d[None, :], mask=inside, other=0.0)
        to = v + (line * stride_vb + place * stride_vn + head * stride_vh)
        tl.store(to[:, None] + offs_d[None, :], values.to(v.dtype.element_ty), mask=inside)
    else:
        offs_m = (block - k_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)
        query = offs_m // nheads
        head = (offs_m % nheads * VEC).to(tl.int64)
        start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
        inside = (query < sq)[:, None] & in_d[None, :]
        angle = origin + query * 0
        if flags & ROTARY_MOVES:
            angle += query
        source = batch64 * VEC
        row = ((start + query) * VEC).to(tl.int64)
        rows = q + (source * stride_qb + row * stride_qm + head * stride_qh)
        known = angle < places
        turned = _turned(rows, offs_d, inside, angle.to(tl.int64), known, cos, sin, stride_cm, rotary_half, flags)
        to = q_turned + (source * stride_rb + row * stride_rm + head * stride_rh)
        tl.store(to[:, None] + offs_d[None, :], turned, mask=inside)
