"""The attention probabilities themselves, for return_attn_probs: what a forward never stores."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_ALIBI,
    RUNTIME_ARGUMENTS,
    alibi_bias,
    capped,
    hide,
    key_span,
    query_span,
    row_stride,
)
from flash_attn.kernels.dropout import keep_mask
from flash_attn.kernels.tiles import deep_dot


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_probabilities(
    q, k, lse, dmask,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, n_blocks, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, DEPTH: tl.constexpr,
    SHARED: tl.constexpr,
):  # fmt: skip
    """dmask (batch, heads, seqlen_q, seqlen_k): exp(score - lse), negative where dropout drops it, 0 where masked.
    A dropped probability that underflows becomes the smallest normal number, so that its sign shows.
    One program: one tile. Grid: m_blocks * n_blocks * nheads * batch. Units as in `attn_fwd`."""
    pid = tl.program_id(0)
    n_block = pid % n_blocks
    m_block = pid // n_blocks % m_blocks
    plane = pid // n_blocks // m_blocks
    head = plane % nheads
    batch = plane // nheads
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    shift = sk - sq
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    batch64 = batch.to(tl.int64)
    q += batch64 * stride_qb * VEC + (head * VEC).to(tl.int64) * stride_qh + q_start.to(tl.int64) * stride_qm
    k += batch64 * stride_kb * VEC + (head // group * VEC).to(tl.int64) * stride_kh
    k += k_start.to(tl.int64) * stride_kn
    lse += batch64 * stride_lb + head.to(tl.int64) * stride_lh + q_start
    dmask += plane.to(tl.int64) * seqlen_q * seqlen_k
    slope = 0.0
    if flags & HAS_ALIBI:
        slope = tl.load(alibi_slopes + batch * stride_ab + head)

    offs_m = tl.arange(0, BLOCK_M)
    offs_n = tl.arange(0, BLOCK_N)
    first_row = m_block * BLOCK_M
    first_col = n_block * BLOCK_N
    rows = (first_row + offs_m)[:, None]
    cols = (first_col + offs_n)[None, :]
    s = deep_dot(
        q, first_row, offs_m, stride_qm, sq, k, first_col, offs_n, stride_kn, sk,
        head_dim, BLOCK_M, BLOCK_N, BLOCK_D, 0, DEPTH,
    )  # fmt: skip
    s = s * scale
    if softcap > 0.0:
        s, _ = capped(s, softcap, 1.0 / softcap)
    s += alibi_bias(slope, rows, cols, shift)
    lse_rows = tl.load(lse + first_row + offs_m, mask=first_row + offs_m < sq, other=float("inf"))
    p = tl.exp(s - lse_rows[:, None])
    keep = keep_mask(rng_state, p_dropout, plane, first_row, first_col, BLOCK_M, BLOCK_N, SHARED, False)
    smallest = 6.103515625e-05 if dmask.dtype.element_ty == tl.float16 else 1.1754943508222875e-38
    p = tl.where(keep, p, -tl.maximum(p, smallest))
    p = tl.where(rows < sq, hide(p, 0.0, rows, cols, shift, sk, window_left, window_right), 0.0)
    tile = dmask + (rows.to(tl.int64) * seqlen_k + cols)
    tl.store(tile, p.to(dmask.dtype.element_ty), mask=(rows < seqlen_q) & (cols < seqlen_k))
