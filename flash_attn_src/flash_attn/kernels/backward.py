"""Backward attention in two kernels: delta and dq by blocks of queries (`backward_dq`), then dk and dv by blocks of
keys (`backward_dkdv`). Here: what both do with a tile of scores.

With p = exp(s - lse) and delta = rowsum(dout * out): dv = p^T dout, ds = p * (dout v^T - delta),
dq = scale * ds k, dk = scale * ds^T q (Dao et al., FlashAttention, 2022, algorithm 4). Each output element
is summed by one program in a fixed order, so the result is the same in every run.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import LOG2E, alibi_bias, capped, hide
from flash_attn.kernels.dropout import dropped, keep_mask


@triton.jit
def grad_scores(
    s, dp, lse, delta, rows, cols, seqlen_k, scale, shift, window_left, window_right,
    softcap, slope, p_dropout, rng_state, plane, first_row, first_col,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """From raw scores q k^T and dout v^T to (p for dv, ds for dq and dk), where there is dropout neither divided by
    1 - p_dropout yet. rows and cols, lse and delta come broadcast to the tile's orientation, which is keys by
    queries with FLIP; lse in natural units, +inf where a row saw no key, so p is 0 there."""
    if KIND == "plain" or KIND == "dropout":
        p = tl.exp2(s * (scale * LOG2E) - lse * LOG2E)
    else:
        s = s * (scale * LOG2E)
        if KIND != "alibi":
            tanh = tl.zeros_like(s)
            if KIND == "softcap" or softcap > 0.0:
                s, tanh = capped(s, softcap * LOG2E, 1.0 / (softcap * LOG2E))
        if KIND != "softcap":
            s += alibi_bias(slope * LOG2E, rows, cols, shift)
        p = tl.exp2(s - lse * LOG2E)
    if MASK:
        p = hide(p, 0.0, rows, cols, shift, seqlen_k, window_left, window_right)
    kept = p
    ds = p * (dp - delta)
    if KIND == "dropout" or KIND == "any":
        if KIND == "dropout" or p_dropout > 0.0:
            keep = keep_mask(rng_state, p_dropout, plane, first_row, first_col, BLOCK_M, BLOCK_N, SHARED, FLIP)
            kept = dropped(p, keep, p_dropout)
            ds = kept * dp - p * (delta * (1.0 - p_dropout))
    if KIND == "softcap" or KIND == "any":
        ds = ds * (1.0 - tanh * tanh)
    return kept, ds
