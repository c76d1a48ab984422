"""Backward attention: the gradient of a bias of the scores, after `backward_dq`. The formulas are in `backward`."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.backward import gradient_exponents, power_of_two
from flash_attn.kernels.common import BIAS_IS_FP32, LOG2E, RUNTIME_ARGUMENTS, row_stride
from flash_attn.kernels.groups import Bounds, Rows, ScoreMod, Scores
from flash_attn.kernels.scores import apply_mask, load_bias, modified
from flash_attn.kernels.tiles import deep_dot


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
    head_dim *= VEC
    stride_qm = row_stride(stride_qm, VEC)
    stride_kn = row_stride(stride_kn, VEC)
    stride_vn = row_stride(stride_vn, VEC)
    stride_gm = row_stride(stride_gm, VEC)
    first_row = m_block * BLOCK_M
    first_col = n_block * BLOCK_N
    offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
    offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
    pos_m = (first_row + offs_m)[:, None]  # [BLOCK_M, 1]
    pos_n = (first_col + offs_n)[None, :]  # [1, BLOCK_N]
    inside = (pos_m < seqlen_q) & (pos_n < seqlen_k)  # [BLOCK_M, BLOCK_N]
    b_sum = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)  # [BLOCK_M, BLOCK_N]
    sharing_h = nheads // planes_h
    for i in tl.range(0, batch // planes_b * sharing_h):
        entry = plane // planes_h + i // sharing_h
        head = plane % planes_h + i % sharing_h
        entry64 = entry.to(tl.int64)
        head64 = (head * VEC).to(tl.int64)
        kv_head64 = (head // group * VEC).to(tl.int64)
        row64 = entry64 * stride_lb + head.to(tl.int64) * stride_lh + first_row
        b_lse = tl.load(lse + row64 + offs_m, mask=first_row + offs_m < seqlen_q, other=float("inf"))[:, None]
        b_delta = tl.load(delta + row64 + offs_m, mask=first_row + offs_m < seqlen_q, other=0.0)[:, None]
        p_lost = delta + batch.to(tl.int64) * stride_lb + row64
        b_lost = tl.load(p_lost + offs_m, mask=first_row + offs_m < seqlen_q, other=0.0)[:, None]
        p_q = q + (entry64 * stride_qb * VEC + head64 * stride_qh)
        p_k = k + (entry64 * stride_kb * VEC + kv_head64 * stride_kh)
        b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
            Rows(p_q, stride_qm, seqlen_q, head_dim, offs_m, offs_m), first_row, offs_m,
            Rows(p_k, stride_kn, seqlen_k, head_dim, offs_n, offs_n), first_col, offs_n,
            BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_K,
        )  # fmt: skip
        dout_factor = None
        if WEIGHT_SHIFT:
            for_dout, _for_ds = gradient_exponents(norms, entry * (nheads // group) + head // group)
            dout_factor = power_of_two(for_dout)
        p_do = dout + (entry64 * stride_gb * VEC + head64 * stride_gh)
        p_v = v + (entry64 * stride_vb * VEC + kv_head64 * stride_vh)
        b_dp = deep_dot(  # [BLOCK_M, BLOCK_N]
            Rows(p_do, stride_gm, seqlen_q, head_dim, offs_m, offs_m), first_row, offs_m,
            Rows(p_v, stride_vn, seqlen_k, head_dim, offs_n, offs_n), first_col, offs_n,
            BLOCK_M, BLOCK_N, BLOCK_D, 0, BLOCK_K, False, dout_factor,
        )  # fmt: skip
        if WEIGHT_SHIFT:
            b_dp = b_dp * power_of_two(-for_dout)
        bias_offset = entry64 * stride_sb + head.to(tl.int64) * stride_sh
        scores = Scores(scale, softcap, 0.0, 0.0, bias, 0, bias, bias_offset, stride_sm, flags, 1, 1, q, q, q)
        b_s, _ = modified(b_s, scores, bounds, pos_m, pos_n, ScoreMod("bias", 0, USE_ANCHOR_DOT))
        b_s += load_bias(scores, bounds, first_row, offs_m[:, None], pos_n, USE_ANCHOR_DOT)
        b_p = tl.exp2((b_s - b_lse) * LOG2E - b_lost)  # [BLOCK_M, BLOCK_N]
        b_p = tl.where(b_lse == float("inf"), 0.0, b_p)
        b_sum += apply_mask(b_p, 0.0, pos_m, pos_n, bounds) * (b_dp - b_delta)
    offsets = (plane.to(tl.int64) * seqlen_q + pos_m) * seqlen_k + pos_n  # [BLOCK_M, BLOCK_N]
    is_wide = (flags & BIAS_IS_FP32) != 0
    tl.store(dbias.to(tl.pointer_type(tl.float32)) + offsets, b_sum, mask=inside & is_wide)
    tl.store(dbias + offsets, b_sum.to(dbias.dtype.element_ty), mask=inside & (is_wide == 0))
