"""Backward attention: delta and dq by blocks of queries. The formulas are in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import grad_scores, gradient_exponents, lost_by_rounding, power_of_two
from flash_attn.kernels.common import (
    HAS_ALIBI,
    HAS_CU_SEQLENS_Q,
    HAS_SINKS,
    RUNTIME_ARGUMENTS,
    cast,
    join_sinks,
    key_bounds,
    key_span,
    load_bias,
    load_sinks,
    query_span,
    row_stride,
    schedule,
)
from flash_attn.kernels.tiles import (
    add_product,
    clamped_pair,
    clear_outside,
    deep_dot,
    deep_row_sums,
    dot_pair,
    load_pair,
    rescaled,
    spoil_beyond,
    store_pair,
    zeros_pair,
)


@triton.jit
def _dq_block(
    b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, p_q, p_do, b_lse, b_delta, p_k, p_v,
    n, first, pos_m, seqlen_q, seqlen_k,
    stride_qm, stride_gm, stride_kn, stride_vn, head_dim, offs_d, offs_t, head_dim_v, offs_vd, offs_vt,
    scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
    bias, bias_offset, stride_sm, flags, b_lost, dout_factor, dp_factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    BLOCK_V: tl.constexpr, TAIL_V: tl.constexpr, DEPTH: tl.constexpr, MASK: tl.constexpr, KIND: tl.constexpr,
    HALF_UP: tl.constexpr, SHARED: tl.constexpr, ANCHOR: tl.constexpr,
):  # fmt: skip
    """Adds one block of keys to dq of a block of queries. dout_factor: what p_do must be multiplied by, as b_do is."""
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pos_n = n + offs_n  # [BLOCK_N]
    b_k, b_k_tail = load_pair(
        p_k, n, offs_n, stride_kn, seqlen_k, head_dim, offs_d, offs_t, BLOCK_D, TAIL, MASK
    )  # [BLOCK_N, BLOCK_D], [BLOCK_N, TAIL]
    if DEPTH < BLOCK_D + TAIL:
        b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
            p_q, 0, pos_m - first, stride_qm, seqlen_q - first, p_k, n, offs_n, stride_kn, seqlen_k,
            head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, DEPTH,
        )  # fmt: skip
        b_dp = deep_dot(  # [BLOCK_M, BLOCK_N]
            p_do, 0, pos_m - first, stride_gm, seqlen_q - first, p_v, n, offs_n, stride_vn, seqlen_k,
            head_dim_v, BLOCK_M, BLOCK_N, BLOCK_V, TAIL_V, DEPTH, False, dout_factor,
        )  # fmt: skip
    else:
        b_v, b_v_tail = load_pair(
            p_v, n, offs_n, stride_vn, seqlen_k, head_dim_v, offs_vd, offs_vt, BLOCK_V, TAIL_V, MASK
        )  # [BLOCK_N, BLOCK_V], [BLOCK_N, TAIL_V]
        b_s = dot_pair(b_q, b_q_tail, tl.trans(b_k), tl.trans(b_k_tail), TAIL)  # [BLOCK_M, BLOCK_N]
        b_dp = dot_pair(b_do, b_do_tail, tl.trans(b_v), tl.trans(b_v_tail), TAIL_V)  # [BLOCK_M, BLOCK_N]
    b_bias = b_lse
    if KIND == "bias":
        rows, cols = (pos_m - first)[:, None], pos_n[None, :]
        b_bias = load_bias(bias, bias_offset, first, rows, stride_sm, cols, seqlen_q, seqlen_k, flags, ANCHOR)
    _, b_ds = grad_scores(  # [BLOCK_M, BLOCK_N]
        b_s, b_dp, b_lse[:, None], b_delta[:, None], pos_m[:, None], pos_n[None, :], seqlen_k,
        scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane, first, n, b_bias,
        b_lost[:, None], dp_factor, BLOCK_M, BLOCK_N, MASK, KIND, SHARED, False, 0,
    )  # fmt: skip
    return add_product(cast(b_ds, b_k.dtype, HALF_UP), b_k, b_k_tail, b_dq, b_dq_tail, TAIL)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def attn_bwd_dq(
    q, k, v, out, dout, lse, delta, dq,
    cu_seqlens_q, cu_seqlens_k, seqused_k, leftpad_k, alibi_slopes, rng_state, bias, sinks, norms,
    scale, softcap, p_dropout,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_ob, stride_om, stride_oh, stride_gb, stride_gm, stride_gh,
    stride_dqb, stride_dqm, stride_dqh,
    stride_lb, stride_lh, stride_ab,
    nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right, m_blocks, planes, chunk, flags,
    stride_sb, stride_sh, stride_sm,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
    VALUE_DIM: tl.constexpr, DEPTH: tl.constexpr, KIND: tl.constexpr, NUM_XCDS: tl.constexpr, HALF_UP: tl.constexpr,
    SHARED: tl.constexpr, ANCHOR: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """One program: dq and delta of BLOCK_M query rows of one head. Grid, units and VALUE_DIM as in `attn_fwd`.

    With kind `bias` delta has room for a second tensor of its size behind it, which gets `lost_by_rounding`.
    """
    BLOCK_V: tl.constexpr = VALUE_DIM if VALUE_DIM else BLOCK_D
    TAIL_V: tl.constexpr = 0 if VALUE_DIM else TAIL
    m_block, blocks, batch, head = schedule(m_blocks, planes, nheads, chunk, cu_seqlens_q, flags, BLOCK_M, NUM_XCDS)
    if (m_block < 0) | (m_block >= blocks):
        return
    m_block = blocks - 1 - m_block
    plane = batch * nheads + head
    q_start, sq = query_span(batch, seqlen_q, cu_seqlens_q, flags)
    first = m_block * BLOCK_M
    batch64 = batch.to(tl.int64)
    head64 = (head * VEC).to(tl.int64)
    stride_dqm = row_stride(stride_dqm, VEC)
    p_dq = dq + (batch64 * stride_dqb * VEC + head64 * stride_dqh)
    if flags & HAS_CU_SEQLENS_Q:  # stride_lh is then the number of all packed rows
        clear_outside(
            p_dq, 0.0, stride_dqm, q_start, sq, stride_lh, batch == 0, batch == planes // nheads - 1,
            first, blocks * BLOCK_M, head_dim * VEC, BLOCK_M, BLOCK_D, TAIL,
        )  # fmt: skip
        p_delta_all = delta + head.to(tl.int64) * stride_lh
        spoil_beyond(p_delta_all, 1, q_start, sq, first, blocks * BLOCK_M, 1, BLOCK_M, 1, 0)
    if first >= sq:
        return
    k_start, sk = key_span(batch, seqlen_k, cu_seqlens_k, seqused_k, leftpad_k, flags)
    shift = sk - sq
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)
    stride_om = row_stride(stride_om, VEC)
    stride_gm = row_stride(stride_gm, VEC)

    row64 = (q_start + first).to(tl.int64)
    kv_head = (head // group * VEC).to(tl.int64)
    p_q = q + (batch64 * stride_qb * VEC + head64 * stride_qh + row64 * stride_qm)
    p_o = out + (batch64 * stride_ob * VEC + head64 * stride_oh + row64 * stride_om)
    p_do = dout + (batch64 * stride_gb * VEC + head64 * stride_gh + row64 * stride_gm)
    p_dq += row64 * stride_dqm
    p_k = k + (batch64 * stride_kb * VEC + kv_head * stride_kh + k_start.to(tl.int64) * stride_kn)
    p_v = v + (batch64 * stride_vb * VEC + kv_head * stride_vh + k_start.to(tl.int64) * stride_vn)
    p_lse = lse + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64)
    p_delta = delta + (batch64 * stride_lb + head.to(tl.int64) * stride_lh + row64)

    slope = 0.0
    if KIND == "alibi" or KIND == "any":
        if flags & HAS_ALIBI:
            slope = tl.load(alibi_slopes + batch * stride_ab + head)
    bias_offset = batch64
    if KIND == "bias":
        bias_offset = batch64 * stride_sb + head.to(tl.int64) * stride_sh
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    pos_m = first + offs_m  # [BLOCK_M]
    offs_d, offs_t = clamped_pair(head_dim, VEC, BLOCK_D, TAIL)  # [BLOCK_D], [TAIL]
    head_dim_v = VALUE_DIM if VALUE_DIM else head_dim
    offs_vd, offs_vt = offs_d, offs_t  # [BLOCK_V], [TAIL_V]
    if VALUE_DIM:
        offs_vd, offs_vt = clamped_pair(head_dim_v, VEC, BLOCK_V, TAIL_V)
    b_q, b_q_tail = load_pair(
        p_q, 0, offs_m, stride_qm, sq - first, head_dim, offs_d, offs_t, BLOCK_D, TAIL, True
    )  # [BLOCK_M, BLOCK_D], [BLOCK_M, TAIL]
    b_do, b_do_tail = load_pair(
        p_do, 0, offs_m, stride_gm, sq - first, head_dim_v, offs_vd, offs_vt, BLOCK_V, TAIL_V, True
    )  # [BLOCK_M, BLOCK_V], [BLOCK_M, TAIL_V]
    if DEPTH < BLOCK_D + TAIL:
        b_delta = deep_row_sums(  # [BLOCK_M]
            p_o, stride_om, p_do, stride_gm, offs_m, sq - first, head_dim_v, BLOCK_M, BLOCK_V, TAIL_V, DEPTH
        )
    else:
        b_o, b_o_tail = load_pair(
            p_o, 0, offs_m, stride_om, sq - first, head_dim_v, offs_vd, offs_vt, BLOCK_V, TAIL_V, True
        )  # [BLOCK_M, BLOCK_V], [BLOCK_M, TAIL_V]
        b_delta = tl.sum(b_o.to(tl.float32) * b_do.to(tl.float32), 1)  # [BLOCK_M]
        if TAIL_V:
            b_delta += tl.sum(b_o_tail.to(tl.float32) * b_do_tail.to(tl.float32), 1)
    tl.store(p_delta + offs_m, b_delta, mask=pos_m < sq)
    dout_factor, dp_factor = None, None
    if WEIGHT_SHIFT:
        for_dout, for_ds = gradient_exponents(norms, batch * (nheads // group) + head // group)
        dout_factor, dp_factor = power_of_two(for_dout), power_of_two(for_ds - for_dout)
        b_do, b_do_tail = rescaled(b_do, dout_factor), rescaled(b_do_tail, dout_factor)
        b_delta = b_delta * power_of_two(for_ds)
    b_lse = tl.load(p_lse + offs_m, mask=pos_m < sq, other=float("inf"))  # [BLOCK_M]
    b_dq, b_dq_tail = zeros_pair(BLOCK_M, BLOCK_D, TAIL)  # [BLOCK_M, BLOCK_D], [BLOCK_M, TAIL]
    lo, full_lo, full_hi, hi = key_bounds(first, BLOCK_M, shift, sk, window_left, window_right, BLOCK_N)
    b_lost = b_lse
    if KIND == "bias":
        wide, narrow = load_sinks(sinks, head, (flags & HAS_SINKS) != 0, flags, q.dtype.element_ty)
        b_lost = lost_by_rounding(  # [BLOCK_M]
            p_q, p_k, b_lse, join_sinks(wide, narrow, flags, True), first, sq, sk, stride_qm, stride_kn, head_dim,
            scale, shift, window_left, window_right, softcap, bias, bias_offset, stride_sm, flags, lo, hi,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, ANCHOR,
        )  # fmt: skip
        tl.store(p_delta + planes.to(tl.int64) * stride_lh + offs_m, b_lost, mask=pos_m < sq)
    for n in tl.range(full_lo, full_hi, BLOCK_N):
        b_dq, b_dq_tail = _dq_block(
            b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, p_q, p_do, b_lse, b_delta, p_k, p_v,
            n, first, pos_m, sq, sk,
            stride_qm, stride_gm, stride_kn, stride_vn, head_dim, offs_d, offs_t, head_dim_v, offs_vd, offs_vt,
            scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
            bias, bias_offset, stride_sm, flags, b_lost, dout_factor, dp_factor,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, BLOCK_V, TAIL_V, DEPTH, False, KIND, HALF_UP, SHARED, ANCHOR,
        )  # fmt: skip
    if DEPTH >= BLOCK_D + TAIL:
        if head_dim < BLOCK_D + TAIL:  # an infinity in a column that is repeated past head_dim: see `attn_fwd`
            lost = tl.max(tl.max((b_dq != b_dq).to(tl.int32), 1), 0)
            if TAIL:
                lost = tl.maximum(lost, tl.max(tl.max((b_dq_tail != b_dq_tail).to(tl.int32), 1), 0))
            if lost > 0:
                b_dq, b_dq_tail = zeros_pair(BLOCK_M, BLOCK_D, TAIL)
                full_hi = full_lo
    skipped = full_hi - full_lo
    for i in tl.range(lo, hi - skipped, BLOCK_N):
        n = tl.where(i < full_lo, i, i + skipped)
        b_dq, b_dq_tail = _dq_block(
            b_dq, b_dq_tail, b_q, b_q_tail, b_do, b_do_tail, p_q, p_do, b_lse, b_delta, p_k, p_v,
            n, first, pos_m, sq, sk,
            stride_qm, stride_gm, stride_kn, stride_vn, head_dim, offs_d, offs_t, head_dim_v, offs_vd, offs_vt,
            scale, shift, window_left, window_right, softcap, slope, p_dropout, rng_state, plane,
            bias, bias_offset, stride_sm, flags, b_lost, dout_factor, dp_factor,
            BLOCK_M, BLOCK_N, BLOCK_D, TAIL, BLOCK_V, TAIL_V, DEPTH, True, KIND, HALF_UP, SHARED, ANCHOR,
        )  # fmt: skip
    if KIND == "dropout" or KIND == "any":
        scale /= 1.0 - p_dropout
    if WEIGHT_SHIFT:
        scale *= power_of_two(-for_ds)
    store_pair(p_dq, b_dq * scale, b_dq_tail * scale, offs_m, stride_dqm, sq - first, head_dim, BLOCK_D, TAIL)
