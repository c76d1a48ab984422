"""Writes new keys and values into their cache, and applies rotary embedding to the new keys and to the queries."""

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
def _rotate(p_rows, offs_d, inside, angle_rows, known, cos, sin, stride_c, rotary_half, flags):
    """The tile whose rows start at `p_rows`, with rotary embedding, in fp32, of its first 2 * rotary_half columns."""
    b_x = tl.load(p_rows[:, None] + offs_d[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
    if rotary_half > 0:
        turns = offs_d < 2 * rotary_half
        interleaved = (flags & ROTARY_INTERLEAVED) != 0
        apart = tl.where(interleaved, 1, rotary_half)
        second = tl.where(interleaved, offs_d % 2 == 1, offs_d >= rotary_half)
        partner = tl.where(second, offs_d - apart, offs_d + apart)  # [BLOCK_D]
        angle = tl.where(interleaved, offs_d // 2, offs_d - tl.where(second, rotary_half, 0))  # [BLOCK_D]
        inside = inside & turns[None, :]
        b_other = tl.load(p_rows[:, None] + partner[None, :], mask=inside, other=0.0).to(
            tl.float32
        )  # [BLOCK_M, BLOCK_D]
        angle_offsets = angle_rows[:, None] * stride_c + angle[None, :]  # [BLOCK_M, BLOCK_D]
        inside = inside & known[:, None]
        b_cos = tl.load(cos + angle_offsets, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
        b_sin = tl.load(sin + angle_offsets, mask=inside, other=0.0).to(tl.float32)  # [BLOCK_M, BLOCK_D]
        b_turned = (
            b_x.to(tl.float32) * b_cos + tl.where(second[None, :], b_other, -b_other) * b_sin
        )  # [BLOCK_M, BLOCK_D]
        b_x = tl.where(turns[None, :], b_turned.to(b_x.dtype), b_x)
    return b_x


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_append(
    k_new, v_new, k, v, q, q_turned, cos, sin,
    cu_seqlens_q, cu_seqlens_k, seqused_k, block_table, cache_batch_idx, rotary_seqlens,
    stride_nb, stride_nm, stride_nh, stride_wb, stride_wm, stride_wh,
    stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_qb, stride_qm, stride_qh, stride_rb, stride_rm, stride_rh, stride_cm, stride_tb, page_size,
    nheads, nheads_k, seqlen_q, seqlen_k, seqlen_new, capacity, head_dim, head_dim_v, rotary_half, places,
    k_blocks, q_blocks, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: BLOCK_M rows, (new key, key head) or (query, query head), and BLOCK_D columns.

    Grid: ((k_blocks + q_blocks) * batch, larger head dim / BLOCK_D). q_blocks is 0 where q gets no rotary embedding.
    Strides of k_new (n), v_new (w), k, v, q and q_turned (r), and head dims, are in units of VEC elements (16 bytes).
    Strides of cos and sin (places, rotary_half) are in elements. page_size is 0 for a cache without pages. Keys outside
    of the cache are not written.
    """
    pid = tl.program_id(0)
    block = pid % (k_blocks + q_blocks)
    batch = pid // (k_blocks + q_blocks)
    batch64 = batch.to(tl.int64)
    head_dim *= VEC
    offs_d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)  # [BLOCK_D]
    in_d = offs_d < head_dim  # [BLOCK_D]

    length = seqlen_k
    if flags & HAS_SEQUSED_K:
        length = tl.load(seqused_k + batch)
    origin = length
    if flags & HAS_ROTARY_SEQLENS:
        origin = tl.load(rotary_seqlens + batch)
    if block < k_blocks:
        offs_m = block * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        token = offs_m // nheads_k  # [BLOCK_M]
        head = (offs_m % nheads_k * VEC).to(tl.int64)  # [BLOCK_M]
        start, added = new_keys(batch, seqlen_new, cu_seqlens_k, flags)
        place = length + token
        real = (token < added) & (place >= 0) & (place < capacity)  # [BLOCK_M]
        inside = real[:, None] & in_d[None, :]  # [BLOCK_M, BLOCK_D]
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
        p_rows = k_new + (source * stride_nb + row * stride_nm + head * stride_nh)  # [BLOCK_M]
        angle = origin + token  # [BLOCK_M]
        known = angle < places  # [BLOCK_M]
        b_k = _rotate(
            p_rows, offs_d, inside, angle.to(tl.int64), known, cos, sin, stride_cm, rotary_half, flags
        )  # [BLOCK_M, BLOCK_D]
        p_to = k + (line * stride_kb + place * stride_kn + head * stride_kh)  # [BLOCK_M]
        tl.store(p_to[:, None] + offs_d[None, :], b_k.to(k.dtype.element_ty), mask=inside)
        p_rows = v_new + (source * stride_wb + row * stride_wm + head * stride_wh)  # [BLOCK_M]
        inside = real[:, None] & (offs_d < head_dim_v * VEC)[None, :]  # [BLOCK_M, BLOCK_D]
        b_v = tl.load(p_rows[:, None] + offs_d[None, :], mask=inside, other=0.0)  # [BLOCK_M, BLOCK_D]
        p_to = v + (line * stride_vb + place * stride_vn + head * stride_vh)  # [BLOCK_M]
        tl.store(p_to[:, None] + offs_d[None, :], b_v.to(v.dtype.element_ty), mask=inside)
    else:
        offs_m = (block - k_blocks) * BLOCK_M + tl.arange(0, BLOCK_M)  # [BLOCK_M]
        query = offs_m // nheads  # [BLOCK_M]
        head = (offs_m % nheads * VEC).to(tl.int64)  # [BLOCK_M]
        start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
        inside = (query < sq)[:, None] & in_d[None, :]  # [BLOCK_M, BLOCK_D]
        angle = origin + query * 0  # [BLOCK_M]
        if flags & ROTARY_MOVES:
            angle += query
        source = batch64 * VEC
        row = ((start + query) * VEC).to(tl.int64)
        p_rows = q + (source * stride_qb + row * stride_qm + head * stride_qh)  # [BLOCK_M]
        known = angle < places  # [BLOCK_M]
        b_q = _rotate(
            p_rows, offs_d, inside, angle.to(tl.int64), known, cos, sin, stride_cm, rotary_half, flags
        )  # [BLOCK_M, BLOCK_D]
        p_to = q_turned + (source * stride_rb + row * stride_rm + head * stride_rh)  # [BLOCK_M]
        tl.store(p_to[:, None] + offs_d[None, :], b_q, mask=inside)
