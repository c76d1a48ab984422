"""Backward attention: what both of its kernels do with a tile of scores.

`backward_dq` computes delta and dq by blocks of queries, then `backward_dkdv` computes dk and dv by blocks of keys.
With p = exp(s - lse) and delta = rowsum(dout * out): dv = p^T dout, ds = p * (dout v^T - delta), dq = scale * ds k,
dk = scale * ds^T q (Dao et al., FlashAttention, 2022, algorithm 4). One program sums each output element in a fixed
order, so every run gives the same result.

Where the matrix unit flushes subnormals, `backward_norms` runs first. Then p is 2 ** WEIGHT_SHIFT times as large for
dv, dout is multiplied by a power of two before its products, and so is ds. All is undone on the fp32 accumulators.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import LOG2E, alibi_bias, apply_mask, apply_softcap, load_bias, shifted
from flash_attn.kernels.dropout import apply_dropout, keep_mask
from flash_attn.kernels.tiles import deep_dot

# Above this magnitude softmax_lse is rounded so far that weights are wrong by more than 2^-16.
_LARGE_LSE = tl.constexpr(256.0)
# Columns of q and k that `lost_by_rounding` multiplies at once. Every head dim of a kernel is a multiple.
_LOST_DEPTH = tl.constexpr(16)


@triton.jit
def lost_by_rounding(
    p_q, p_k, b_lse, b_sink, first, seqlen_q, seqlen_k, stride_qm, stride_kn, head_dim,
    scale, shift, window_left, window_right, softcap, bias, bias_offset, stride_sm, flags, lo, hi,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, ANCHOR: tl.constexpr,
):  # fmt: skip
    """log2 of the sum of a row's weights exp(score - lse), sink included, in a call with a bias. [BLOCK_M]

    It is 0, and not computed, unless lse is large. In a row whose keys are all hidden by a bias of -1e9 or of the
    lowest number, lse is that number: the logarithm of the number of keys is less than its last bit.
    """
    b_lost = tl.zeros((BLOCK_M,), tl.float32)  # [BLOCK_M]
    b_large = (tl.abs(b_lse) > _LARGE_LSE) & (b_lse != float("inf"))  # [BLOCK_M]
    if tl.max(b_large.to(tl.int32), 0) > 0:
        offs_m = tl.arange(0, BLOCK_M)  # [BLOCK_M]
        offs_n = tl.arange(0, BLOCK_N)  # [BLOCK_N]
        b_sum = tl.exp2((b_sink - b_lse) * LOG2E)  # [BLOCK_M]
        for n in tl.range(lo, hi, BLOCK_N):
            b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
                p_q, 0, offs_m, stride_qm, seqlen_q - first, p_k, n, offs_n, stride_kn, seqlen_k,
                head_dim, BLOCK_M, BLOCK_N, BLOCK_D, TAIL, _LOST_DEPTH,
            )  # fmt: skip
            b_s = b_s * scale
            if softcap > 0.0:
                b_s, _ = apply_softcap(b_s, softcap, 1.0 / softcap)
            rows, cols = offs_m[:, None], n + offs_n[None, :]
            b_s += load_bias(bias, bias_offset, first, rows, stride_sm, cols, seqlen_q, seqlen_k, flags, ANCHOR)
            b_p = tl.exp2((b_s - b_lse[:, None]) * LOG2E)  # [BLOCK_M, BLOCK_N]
            b_sum += tl.sum(apply_mask(b_p, 0.0, first + rows, cols, shift, seqlen_k, window_left, window_right), 1)
        b_lost = tl.where(b_large, tl.log2(b_sum), 0.0)
    return b_lost


@triton.jit
def power_of_two(exponent):
    """2 ** exponent, fp32, for exponents from -126 to 127."""
    return ((exponent + 127) << 23).to(tl.float32, bitcast=True)


@triton.jit
def _exponent(square):
    """The smallest e with x < 2 ** e, for the square of x, at least 0 and finite. -63 for 0."""
    return ((square.to(tl.int32, bitcast=True) >> 23) - 125) >> 1


@triton.jit
def gradient_exponents(norms, plane):
    """The powers of two for (dout, ds) of a key head: `norms` are what `backward_norms` found, plane is its number.

    dout: its rows get norms below 2 ** 14. Up to 2 ** 15, the largest that fp16 has: from 2 ** 10 on none of its
    elements is subnormal.
    ds: at most |dout| |v| / 2, since ds = p (dp - sum of p dp) and the sum of p is at most 1. So 2 ** 15 is reached at
    most, half of what fp16 holds, and 2 ** -29 of it is not yet flushed.
    """
    of_dout = _exponent(tl.load(norms + 2 * plane))
    of_v = _exponent(tl.load(norms + 2 * plane + 1))
    for_dout = tl.minimum(tl.maximum(14 - of_dout, -8), 15)
    for_ds = tl.minimum(tl.maximum(16 - of_dout - of_v, -32), 64)
    return for_dout, for_ds


@triton.jit
def grad_scores(
    b_s, b_dp, b_lse, b_delta, pos_m, pos_n, seqlen_k, scale, shift, window_left, window_right,
    softcap, slope, p_dropout, rng_state, plane, first_row, first_col, b_bias, b_lost, dp_factor,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    MASK: tl.constexpr, KIND: tl.constexpr, SHARED: tl.constexpr, FLIP: tl.constexpr, P_SHIFT: tl.constexpr,
):  # fmt: skip
    """From raw scores q k^T and dout v^T to (p for dv, ds for dq and dk). With dropout the caller divides both by
    1 - p_dropout.

    Every tile is queries by keys, with FLIP keys by queries. Positions, lse and delta come in the shape that
    broadcasts to it. lse is in natural units and +inf where a row saw no key, so p is 0 there. b_bias and b_lost, of
    `lost_by_rounding`: for kind `bias` alone.
    P_SHIFT: p and ds are 2 ** P_SHIFT times as large. dp_factor: what dout v^T is multiplied by, None for nothing;
    b_delta is multiplied already.
    """
    if dp_factor is not None:
        b_dp = b_dp * dp_factor
    if MASK and FLIP:
        # Rows past the last query are zeros and have lse +inf. An infinite key makes their scores NaN, which become the
        # lowest number, of weight 0. A selection by lse would take registers from the loop without a mask (sm_90,
        # head dim 64, 2026-11-24: 340 instructions instead of 326, and products of dq that wait for each other).
        b_s = tl.where(b_s == b_s, b_s, -3.4e38)
    if KIND == "plain" or KIND == "dropout":
        b_p = tl.exp2(
            b_s * (scale * LOG2E) - shifted(b_lse * LOG2E, P_SHIFT)
        )  # [BLOCK_M, BLOCK_N], with FLIP [BLOCK_N, BLOCK_M]
    elif KIND == "bias":  # in natural units: see `load_bias`
        b_s = b_s * scale
        b_tanh = tl.zeros_like(b_s)
        if softcap > 0.0:
            b_s, b_tanh = apply_softcap(b_s, softcap, 1.0 / softcap)
        b_p = tl.exp2(
            (b_s + b_bias - b_lse) * LOG2E - shifted(b_lost, P_SHIFT)
        )  # [BLOCK_M, BLOCK_N], with FLIP [BLOCK_N, BLOCK_M]
    else:
        b_s = b_s * (scale * LOG2E)
        if KIND != "alibi":
            b_tanh = tl.zeros_like(b_s)
            if KIND == "softcap" or softcap > 0.0:
                b_s, b_tanh = apply_softcap(b_s, softcap * LOG2E, 1.0 / (softcap * LOG2E))
        if KIND != "softcap":
            b_s += alibi_bias(slope * LOG2E, pos_m, pos_n, shift)
        b_p = tl.exp2(b_s - shifted(b_lse * LOG2E, P_SHIFT))  # [BLOCK_M, BLOCK_N], with FLIP [BLOCK_N, BLOCK_M]
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
