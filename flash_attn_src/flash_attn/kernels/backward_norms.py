"""Backward attention: how large the rows of dout and v are, for GPUs whose products flush subnormals.

It runs before `backward_dq`. `backward.gradient_exponents` turns the norms into the powers of two by which dout and the
gradients of the scores are multiplied.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import HAS_CU_SEQLENS_K, HAS_CU_SEQLENS_Q, RUNTIME_ARGUMENTS, row_stride
from flash_attn.kernels.tiles import load_tile


@triton.jit
def _span(batch, seqlen, cu_seqlens, is_packed):
    """The first row and the length of a sequence."""
    start = batch * 0
    if is_packed:
        start = tl.load(cu_seqlens + batch)
        seqlen = tl.load(cu_seqlens + batch + 1) - start
    return start, seqlen


@triton.jit
def _largest_square(b_most, base, stride, length, head_dim, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr):
    """The maximum of b_most and of the squared norms of `length` rows, row by row of a tile."""
    for m in tl.range(0, length, BLOCK_M):
        b_square = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
        for d in tl.range(0, head_dim, BLOCK_D):
            b_x = load_tile(base + d, m, tl.arange(0, BLOCK_M), stride, length, head_dim - d, BLOCK_D)
            b_x = b_x.to(tl.float32)  # [BLOCK_M, BLOCK_D]
            b_square += tl.sum(b_x * b_x, 1)
        # A row with an infinity or a NaN spoils the gradients that it reaches, and must not decide about the others.
        b_most = tl.maximum(b_most, tl.where(b_square < float("inf"), b_square, 0.0))
    return b_most


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_bwd_norms(
    dout, v, norms, cu_seqlens_q, cu_seqlens_k,
    stride_gb, stride_gm, stride_gh, stride_vb, stride_vn, stride_vh,
    nheads, group, seqlen_q, seqlen_k, head_dim, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """One program: the largest squared norm of a row of v, and of dout, of one key head and its `group` query heads.

    Grid: nheads / group * batch. norms (batch, nheads / group, 2): of dout, of v. head_dim: of dout and v. Units as in
    `attn_fwd`.
    """
    plane = tl.program_id(0)
    heads = nheads // group
    head = plane % heads
    batch = plane // heads
    batch64 = batch.to(tl.int64)
    q_start, sq = _span(batch, seqlen_q, cu_seqlens_q, (flags & HAS_CU_SEQLENS_Q) != 0)
    k_start, sk = _span(batch, seqlen_k, cu_seqlens_k, (flags & HAS_CU_SEQLENS_K) != 0)
    head_dim *= VEC
    stride_gm = row_stride(stride_gm, VEC)
    stride_vn = row_stride(stride_vn, VEC)
    b_dout = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    for member in tl.range(0, group):
        p_do = dout + (batch64 * stride_gb * VEC + ((head * group + member) * VEC).to(tl.int64) * stride_gh)
        p_do += q_start.to(tl.int64) * stride_gm
        b_dout = _largest_square(b_dout, p_do, stride_gm, sq, head_dim, BLOCK_M, BLOCK_D)
    p_v = v + (batch64 * stride_vb * VEC + (head * VEC).to(tl.int64) * stride_vh + k_start.to(tl.int64) * stride_vn)
    b_v = _largest_square(tl.zeros((BLOCK_M,), tl.float32), p_v, stride_vn, sk, head_dim, BLOCK_M, BLOCK_D)
    tl.store(norms + 2 * plane, tl.max(b_dout, 0))
    tl.store(norms + 2 * plane + 1, tl.max(b_v, 0))
