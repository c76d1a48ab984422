"""Backward attention: the gradient of a bias of the scores, after `backward_dq`. The formulas are in `backward`.

`attn_bwd_dbias` serves a bias of every score, `attn_bwd_ddiagonals` a bias of distances.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import gradient_exponents, power_of_two
from flash_attn.kernels.common import BIAS_IS_FP32, LOG2E, RUNTIME_ARGUMENTS, row_stride
from flash_attn.kernels.groups import Bounds, Heads, Rows, RowStats, ScoreMod, Scores, Tile
from flash_attn.kernels.scores import apply_mask, load_bias, modified
from flash_attn.kernels.tiles import deep_dot


@triton.jit
def _score_gradients(
    q, k, v, dout, bias, stats, norms, scale, softcap, stride_lb, stride_lh,
    nheads, group, head_dim, bounds, flags, entry, head, first_row, first_col,
    VEC: tl.constexpr, TILE, USE_ANCHOR_DOT: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """The gradients of a head's scores after the bias, [BLOCK_M, BLOCK_N], from row first_row and column first_col on.

    0 where a score is hidden. q, k, v, dout, bias: `groups.Heads`, the strides as kernels get them. stats:
    `groups.RowStats` of all heads.
    """
    BLOCK_M: tl.constexpr = TILE.BLOCK_M
    BLOCK_N: tl.constexpr = TILE.BLOCK_N
    BLOCK_D: tl.constexpr = TILE.BLOCK_D
    BLOCK_K: tl.constexpr = TILE.BLOCK_K
    seqlen_q, seqlen_k = bounds.seqlen_q, bounds.seqlen_k
    head_dim *= VEC
    stride_qm = row_stride(q.stride_m, VEC)
    stride_kn = row_stride(k.stride_m, VEC)
    stride_vn = row_stride(v.stride_m, VEC)
    stride_gm = row_stride(dout.stride_m, VEC)
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pos_m = (first_row + offs_m)[:, None]  # [BLOCK_M, 1]
    pos_n = (first_col + offs_n)[None, :]  # [1, BLOCK_N]
    entry64 = entry.to(tl.int64)
    head64 = (head * VEC).to(tl.int64)
    kv_head64 = (head // group * VEC).to(tl.int64)
    row64 = entry64 * stride_lb + head.to(tl.int64) * stride_lh + first_row
    b_lse = tl.load(stats.lse + row64 + offs_m, mask=first_row + offs_m < seqlen_q, other=float("inf"))[:, None]
    b_delta = tl.load(stats.delta + row64 + offs_m, mask=first_row + offs_m < seqlen_q, other=0.0)[:, None]
    b_lost = tl.load(stats.lost + row64 + offs_m, mask=first_row + offs_m < seqlen_q, other=0.0)[:, None]
    p_q = q.base + (entry64 * q.stride_b * VEC + head64 * q.stride_h)
    p_k = k.base + (entry64 * k.stride_b * VEC + kv_head64 * k.stride_h)
    b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
        Rows(p_q, stride_qm, seqlen_q, head_dim, offs_m, offs_m), first_row, offs_m,
        Rows(p_k, stride_kn, seqlen_k, head_dim, offs_n, offs_n), first_col, offs_n,
        BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_K,
    )  # fmt: skip
    dout_factor = None
    if WEIGHT_SHIFT:
        for_dout, _for_ds = gradient_exponents(norms, entry * (nheads // group) + head // group)
        dout_factor = power_of_two(for_dout)
    p_do = dout.base + (entry64 * dout.stride_b * VEC + head64 * dout.stride_h)
    p_v = v.base + (entry64 * v.stride_b * VEC + kv_head64 * v.stride_h)
    b_dp = deep_dot(  # [BLOCK_M, BLOCK_N]
        Rows(p_do, stride_gm, seqlen_q, head_dim, offs_m, offs_m), first_row, offs_m,
        Rows(p_v, stride_vn, seqlen_k, head_dim, offs_n, offs_n), first_col, offs_n,
        BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_K, False, dout_factor,
    )  # fmt: skip
    if WEIGHT_SHIFT:
        b_dp = b_dp * power_of_two(-for_dout)
    bias_offset = entry64 * bias.stride_b + head.to(tl.int64) * bias.stride_h
    scores = Scores(
        scale,
        softcap,
        0.0,
        0.0,
        bias.base,
        0,
        bias.base,
        bias_offset,
        bias.stride_m,
        flags,
        1,
        1,
        q.base,
        q.base,
        q.base,
        q.base,
    )
    b_s, _ = modified(b_s, scores, bounds, pos_m, pos_n, ScoreMod("bias", False, 0, USE_ANCHOR_DOT))
    b_s += load_bias(scores, bounds, first_row, offs_m[:, None], pos_n, USE_ANCHOR_DOT)
    b_p = tl.exp2((b_s - b_lse) * LOG2E - b_lost)  # [BLOCK_M, BLOCK_N]
    b_p = tl.where(b_lse == float("inf"), 0.0, b_p)
    return apply_mask(b_p, 0.0, pos_m, pos_n, bounds) * (b_dp - b_delta)


@triton.jit(do_not_specialize=(*RUNTIME_ARGUMENTS, "batch", "planes_b", "planes_h"))
def attn_bwd_dbias(
    q, k, v, dout, lse, delta, bias, dbias, norms,
    scale, softcap,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_gb, stride_gm, stride_gh, stride_lb, stride_lh, stride_sb, stride_sh, stride_sm,
    batch, nheads, group, planes_b, planes_h, seqlen_q, seqlen_k, head_dim, window_left, window_right,
    m_blocks, n_blocks, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_ANCHOR_DOT: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """One program: one tile of dbias (planes_b, planes_h, seqlen_q, seqlen_k), the sum over all that share the bias.

    planes_b is 1 or batch, planes_h is 1 or nheads. dbias is contiguous, in the type of bias. Each sum has a fixed
    order. Grid: n_blocks * m_blocks * planes_b * planes_h. Units as in `attn_fwd`. Sequences are dense. delta: as
    `attn_bwd_dq` leaves it, `lost_by_rounding` behind it.
    """
    pid = tl.program_id(0)
    n_block = pid % n_blocks
    m_block = pid // n_blocks % m_blocks
    plane = pid // n_blocks // m_blocks
    bounds = Bounds(seqlen_q, seqlen_k, seqlen_k - seqlen_q, window_left, window_right)
    first_row = m_block * BLOCK_M
    first_col = n_block * BLOCK_N
    pos_m = first_row + tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    pos_n = first_col + tl.arange(0, BLOCK_N)[None, :]  # [1, BLOCK_N]
    inside = (pos_m < seqlen_q) & (pos_n < seqlen_k)  # [BLOCK_M, BLOCK_N]
    all_q, all_k = Heads(q, stride_qb, stride_qm, stride_qh), Heads(k, stride_kb, stride_kn, stride_kh)
    all_v, all_dout = Heads(v, stride_vb, stride_vn, stride_vh), Heads(dout, stride_gb, stride_gm, stride_gh)
    all_bias = Heads(bias, stride_sb, stride_sm, stride_sh)
    stats = RowStats(lse, delta, delta + batch.to(tl.int64) * stride_lb)
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    sharing_h = nheads // planes_h
    for i in tl.range(0, batch // planes_b * sharing_h):
        entry = plane // planes_h + i // sharing_h
        head = plane % planes_h + i % sharing_h
        b_sum += _score_gradients(
            all_q, all_k, all_v, all_dout, all_bias, stats, norms, scale, softcap, stride_lb, stride_lh,
            nheads, group, head_dim, bounds, flags, entry, head, first_row, first_col,
            VEC, Tile(BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_D, 0, BLOCK_K), USE_ANCHOR_DOT, WEIGHT_SHIFT,
        )  # fmt: skip
    offsets = (plane.to(tl.int64) * seqlen_q + pos_m) * seqlen_k + pos_n  # [BLOCK_M, BLOCK_N]
    is_wide = (flags & BIAS_IS_FP32) != 0
    tl.store(dbias.to(tl.pointer_type(tl.float32)) + offsets, b_sum, mask=inside & is_wide)
    tl.store(dbias + offsets, b_sum.to(dbias.dtype.element_ty), mask=inside & (is_wide == 0))


@triton.jit(do_not_specialize=(*RUNTIME_ARGUMENTS, "batch", "first", "diagonals"))
def attn_bwd_ddiagonals(
    q, k, v, dout, lse, delta, bias, sums, norms,
    scale, softcap,
    stride_qb, stride_qm, stride_qh, stride_kb, stride_kn, stride_kh, stride_vb, stride_vn, stride_vh,
    stride_gb, stride_gm, stride_gh, stride_lb, stride_lh, stride_sb, stride_sh, stride_sm,
    batch, nheads, group, seqlen_q, seqlen_k, head_dim, window_left, window_right,
    m_blocks, n_blocks, first, diagonals, flags,
    VEC: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_ANCHOR_DOT: tl.constexpr, WEIGHT_SHIFT: tl.constexpr,
):  # fmt: skip
    """One program: the tiles of a head on one diagonal of tiles, so that a place in a tile has the same distance of key
    and query in all of them.

    sums, fp32 (batch, nheads, 2, diagonals + 1, BLOCK_M): the sum of both parts at place x of the last two axes is that
    of the gradients at distance (first - 1) * BLOCK_M + x + 1. A diagonal of tiles writes one block of each part, and
    nobody the first part's last block and the second part's first. first: the diagonal of program 0; n_block - m_block
    is the number of a diagonal. BLOCK_N is BLOCK_M. Grid: diagonals * nheads * batch. Otherwise as `attn_bwd_dbias`.
    """
    tl.static_assert(BLOCK_M == BLOCK_N)
    pid = tl.program_id(0)
    diagonal = first + pid % diagonals
    plane = pid // diagonals
    entry = plane // nheads
    head = plane % nheads
    bounds = Bounds(seqlen_q, seqlen_k, seqlen_k - seqlen_q, window_left, window_right)
    m_first = tl.maximum(0, -diagonal)
    m_last = tl.minimum(m_blocks, n_blocks - diagonal)
    nearest = diagonal * BLOCK_M - bounds.shift
    if (nearest - BLOCK_M >= window_right) | (nearest + BLOCK_M <= -window_left):
        m_last = m_first
    all_q, all_k = Heads(q, stride_qb, stride_qm, stride_qh), Heads(k, stride_kb, stride_kn, stride_kh)
    all_v, all_dout = Heads(v, stride_vb, stride_vn, stride_vh), Heads(dout, stride_gb, stride_gm, stride_gh)
    all_bias = Heads(bias, stride_sb, stride_sm, stride_sh)
    stats = RowStats(lse, delta, delta + batch.to(tl.int64) * stride_lb)
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    for m_block in tl.range(m_first, m_last):
        b_sum += _score_gradients(
            all_q, all_k, all_v, all_dout, all_bias, stats, norms, scale, softcap, stride_lb, stride_lh,
            nheads, group, head_dim, bounds, flags, entry, head,
            m_block * BLOCK_M, (m_block + diagonal) * BLOCK_M,
            VEC, Tile(BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_D, 0, BLOCK_K), USE_ANCHOR_DOT, WEIGHT_SHIFT,
        )  # fmt: skip
    # Rows move so far to the right that a column has one distance.
    offs_m = tl.arange(0, BLOCK_M)[:, None]  # [BLOCK_M, 1]
    offs_x = tl.arange(0, 2 * BLOCK_M)  # [2 * BLOCK_M]
    cols = offs_x[None, :] + offs_m - (BLOCK_M - 1)  # [BLOCK_M, 2 * BLOCK_M]
    inside = (cols >= 0) & (cols < BLOCK_N)
    b_moved = tl.gather(b_sum, tl.minimum(tl.maximum(cols, 0), BLOCK_N - 1), 1)
    b_x = tl.sum(tl.where(inside, b_moved, 0.0), 0)  # [2 * BLOCK_M]
    length = (diagonals + 1) * BLOCK_M
    offs_x += plane.to(tl.int64) * (2 * length) + pid % diagonals * BLOCK_M
    tl.store(sums + offs_x + tl.where(tl.arange(0, 2 * BLOCK_M) < BLOCK_M, 0, length), b_x)
