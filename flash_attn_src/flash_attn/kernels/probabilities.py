"""The attention probabilities, for return_attn_probs. The forward never stores them."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import HAS_ALIBI_SLOPES, RUNTIME_ARGUMENTS, key_span, query_span, row_stride
from flash_attn.kernels.dropout import keep_mask
from flash_attn.kernels.groups import Bounds, Rows
from flash_attn.kernels.scores import alibi_bias, apply_mask, apply_softcap
from flash_attn.kernels.tiles import deep_dot


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_probabilities(
    q, k, lse, dmask,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, n_blocks, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    DROPOUT_BITS_SHARED: tl.constexpr,
):  # fmt: skip
    """dmask (batch, heads, seqlen_q, seqlen_k): exp(score - lse), negative where dropout drops it, 0 where masked.

    A dropped probability that underflows becomes the smallest normal number, so that its sign shows.
    One program: one tile. Grid: m_blocks * n_blocks * nheads * batch. Units as in `attn_fwd`.
    """
    pid = tl.program_id(0)
    n_block = pid % n_blocks
    m_block = pid // n_blocks % m_blocks
    plane = pid // n_blocks // m_blocks
    head = plane % nheads
    batch = plane // nheads
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    bounds = Bounds(sq, sk, sk - sq, window_left, window_right)
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    batch64 = batch.to(tl.int64)
    p_q = q + (batch64 * stride_qb * VEC + (head * VEC).to(tl.int64) * stride_qh + q_start.to(tl.int64) * stride_qm)
    p_k = k + (batch64 * stride_kb * VEC + (head // group * VEC).to(tl.int64) * stride_kh)
    p_k += k_start.to(tl.int64) * stride_kn
    p_lse = lse + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + q_start)
    p_dmask = dmask + plane.to(tl.int64) * seqlen_q * seqlen_k
    slope = 0.0
    if flags & HAS_ALIBI_SLOPES:
        slope = tl.load(alibi_slopes + batch * stride_ab + head)

    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    first_row = m_block * BLOCK_M
    first_col = n_block * BLOCK_N
    pos_m = (first_row + offs_m)[:, None]  # [BLOCK_M, 1]
    pos_n = (first_col + offs_n)[None, :]  # [1, BLOCK_N]
    b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
        Rows(p_q, stride_qm, sq, head_dim, offs_m, offs_m), first_row, offs_m,
        Rows(p_k, stride_kn, sk, head_dim, offs_n, offs_n), first_col, offs_n,
        BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_K,
    )  # fmt: skip
    b_s = b_s * scale
    if softcap > 0.0:
        b_s, _ = apply_softcap(b_s, softcap, 1.0 / softcap)
    b_s += alibi_bias(slope, pos_m, pos_n, bounds.shift)
    b_lse = tl.load(p_lse + first_row + offs_m, mask=first_row + offs_m < sq, other=float("inf"))  # [BLOCK_M]
    b_p = tl.exp(b_s - b_lse[:, None])  # [BLOCK_M, BLOCK_N]
    b_keep = keep_mask(
        rng_state, p_dropout, plane, first_row, first_col, BLOCK_M, BLOCK_N, DROPOUT_BITS_SHARED, False
    )  # [BLOCK_M, BLOCK_N]
    smallest = 6.103515625e-05 if p_dmask.dtype.element_ty == tl.float16 else 1.1754943508222875e-38
    b_p = tl.where(b_keep, b_p, -tl.maximum(b_p, smallest))
    b_p = tl.where(pos_m < sq, apply_mask(b_p, 0.0, pos_m, pos_n, bounds), 0.0)
    p_tile = p_dmask + (pos_m.to(tl.int64) * seqlen_k + pos_n)  # [BLOCK_M, BLOCK_N]
    tl.store(p_tile, b_p.to(p_dmask.dtype.element_ty), mask=(pos_m < seqlen_q) & (pos_n < seqlen_k))
