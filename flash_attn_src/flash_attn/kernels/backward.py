"""Backward attention: what both of its kernels do with a tile of scores.

`backward_dq` computes delta and dq by blocks of queries, then `backward_dkdv` computes dk and dv by blocks of keys.
With p = exp(s - lse) and delta = rowsum(dout * out): dv = p^T dout, ds = p * (dout v^T - delta), dq = scale * ds k,
dk = scale * ds^T q (Dao et al., FlashAttention, 2022, algorithm 4). One program sums each output element in a fixed
order, so every run gives the same result.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import LOG2E, alibi_bias, apply_mask, apply_softcap
from flash_attn.kernels.dropout import apply_dropout, keep_mask


@triton.jit
def grad_scores(
    b_s, b_dp, b_lse, b_delta, pos_m, pos_n, seqlen_k, scale, shift, window_left, window_right,
    softcap, slope, p_dropout, rng_state, plane, first_row, first_col, b_bias,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """From raw scores q k^T and dout v^T to (p for dv, ds for dq and dk). With dropout the caller divides both by
    1 - p_dropout.

    Every tile is queries by keys, with FLIP keys by queries. Positions, lse and delta come in the shape that
    broadcasts to it. lse is in natural units and +inf where a row saw no key, so p is 0 there. b_bias: for kind `bias`
    alone, in the units of exp2.
    """
    if MASK and FLIP:
        # Rows past the last query are zeros and have lse +inf. An infinite key makes their scores NaN, which become the
        # lowest number, of weight 0. A selection by lse would take registers from the loop without a mask (sm_90,
        # head dim 64, 2026-11-24: 340 instructions instead of 326, and products of dq that wait for each other).
        b_s = tl.where(b_s == b_s, b_s, -3.4e38)
    if KIND == "plain" or KIND == "dropout":
        b_p = tl.exp2(b_s * (scale * LOG2E) - b_lse * LOG2E)  # [BLOCK_M, BLOCK_N], with FLIP [BLOCK_N, BLOCK_M]
    else:
        b_s = b_s * (scale * LOG2E)
        if KIND != "alibi":
            b_tanh = tl.zeros_like(b_s)
            if KIND == "softcap" or softcap > 0.0:
                b_s, b_tanh = apply_softcap(b_s, softcap * LOG2E, 1.0 / (softcap * LOG2E))
        if KIND == "bias":
            b_s += b_bias
        elif KIND != "softcap":
            b_s += alibi_bias(slope * LOG2E, pos_m, pos_n, shift)
        b_p = tl.exp2(b_s - b_lse * LOG2E)  # [BLOCK_M, BLOCK_N], with FLIP [BLOCK_N, BLOCK_M]
    if MASK:
        b_p = apply_mask(b_p, 0.0, pos_m, pos_n, shift, seqlen_k, window_left, window_right)
    b_kept = b_p
    b_ds = b_p * (b_dp - b_delta)
    if KIND == "dropout" or KIND == "any":
        if KIND == "dropout" or p_dropout > 0.0:
            b_keep = keep_mask(rng_state, p_dropout, plane, first_row, first_col, BLOCK_M, BLOCK_N, SHARED, FLIP)
            b_kept = apply_dropout(b_p, b_keep, p_dropout)
            b_ds = b_kept * b_dp - b_p * (b_delta * (1.0 - p_dropout))
    if KIND == "softcap" or KIND == "bias" or KIND == "any":
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    return b_kept, b_ds
