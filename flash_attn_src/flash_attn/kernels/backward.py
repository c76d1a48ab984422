"""Backward attention: what both of its kernels do with a tile of scores.

`backward_dq` computes delta and dq by blocks of queries, then `backward_dkdv` computes dk and dv by blocks of keys.
With p = exp(s - lse) and delta = rowsum(dout * out): dv = p^T dout, ds = p * (dout v^T - delta), dq = scale * ds k,
dk = scale * ds^T q (Dao et al., FlashAttention, 2022, algorithm 4). One program sums each output element in a fixed
order, so every run gives the same result.

Where the matrix unit flushes subnormals, `backward_norms` runs first. Then p is 2 ** WEIGHT_SHIFT times as large for
dv, dout is multiplied by a power of two before its products, and so is ds: one for each row in dq, one for each head in
dk and dv, which are sums over rows. All is undone on the fp32 accumulators.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.blocks import hide_unseen
from flash_attn.kernels.common import LOG2E, shifted
from flash_attn.kernels.dropout import apply_dropout, keep_mask
from flash_attn.kernels.scores import apply_mask, load_bias, modified, unmodified
from flash_attn.kernels.tiles import deep_dot

# Above this magnitude softmax_lse is rounded so far that weights are wrong by more than 2^-16.
_LARGE_LSE = tl.constexpr(256.0)
# Columns of q and k that `lost_by_rounding` multiplies at once. Every head dim of a kernel is a multiple.
_LOST_BLOCK_K = tl.constexpr(16)


@triton.jit
def lost_by_rounding(b_lse, b_sink, q, k, first, lo, hi, bounds, scores, TILE, MOD):
    """log2 of the sum of a row's weights exp(score - lse), sink included, in a call with a bias. [BLOCK_M]

    It is 0, and not computed, unless lse is large. In a row whose keys are all hidden by a bias of -1e9 or of the
    lowest number, lse is that number: the logarithm of the number of keys is less than its last bit.
    """
    b_lost = tl.zeros((TILE.BLOCK_M,), tl.float32)  # [BLOCK_M]
    b_large = (tl.abs(b_lse) > _LARGE_LSE) & (b_lse != float("inf"))  # [BLOCK_M]
    if tl.max(b_large.to(tl.int32), 0) > 0:
        offs_m = tl.arange(0, TILE.BLOCK_M)  # [BLOCK_M]
        offs_n = tl.arange(0, TILE.BLOCK_N)  # [BLOCK_N]
        b_sum = tl.exp2((b_sink - b_lse) * LOG2E)  # [BLOCK_M]
        for n in tl.range(lo, hi, TILE.BLOCK_N):
            b_s = deep_dot(  # [BLOCK_M, BLOCK_N]
                q, 0, offs_m, k, n, offs_n,
                TILE.BLOCK_M, TILE.BLOCK_N, TILE.BLOCK_D, TILE.BLOCK_D_TAIL, _LOST_BLOCK_K,
            )  # fmt: skip
            b_s, _ = modified(b_s, scores, bounds, offs_m[:, None], offs_n[None, :], MOD)
            rows, cols = offs_m[:, None], n + offs_n[None, :]
            b_s += load_bias(scores, bounds, first, rows, cols, MOD.USE_ANCHOR_DOT)
            b_p = tl.exp2((b_s - b_lse[:, None]) * LOG2E)  # [BLOCK_M, BLOCK_N]
            b_sum += tl.sum(apply_mask(b_p, 0.0, first + rows, cols, bounds), 1)
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
    """The powers of two for (dout, ds) of key head number `plane`, from the norms that `backward_norms` wrote."""
    return _exponents(tl.load(norms + 2 * plane), norms, plane)


@triton.jit
def row_exponents(b_do, b_do_tail, norms, plane, BLOCK_V_TAIL: tl.constexpr):
    """The powers of two for (dout, ds) of each query, from its own row of dout: [BLOCK_M] both.

    The rows of dq are sums over keys, so each row has its own, where rows of dout differ by more than fp16 holds.
    """
    b_square = tl.sum(b_do.to(tl.float32) * b_do.to(tl.float32), 1)  # [BLOCK_M]
    if BLOCK_V_TAIL:
        b_square += tl.sum(b_do_tail.to(tl.float32) * b_do_tail.to(tl.float32), 1)
    return _exponents(tl.where(b_square < float("inf"), b_square, 0.0), norms, plane)


@triton.jit
def _exponents(square, norms, plane):
    """The powers of two for (dout, ds) where dout has rows of this squared norm.

    dout: its rows get norms below 2 ** 14. Up to 2 ** 15, the largest that fp16 has: from 2 ** 10 on none of its
    elements is subnormal.
    ds: at most |dout| |v| / 2, since ds = p (dp - sum of p dp) and the sum of p is at most 1. So 2 ** 15 is reached at
    most, half of what fp16 holds, and 2 ** -29 of it is not yet flushed.
    """
    of_dout = _exponent(square)
    of_v = _exponent(tl.load(norms + 2 * plane + 1))
    for_dout = tl.minimum(tl.maximum(14 - of_dout, -8), 15)
    for_ds = tl.minimum(tl.maximum(16 - of_dout - of_v, -32), 64)
    return for_dout, for_ds


@triton.jit
def grad_scores(
    b_s, b_dp, b_lse, b_delta, pos_m, pos_n, first, first_col, b_bias, b_lost, bounds, scores, dp_factor,
    TILE, USE_MASK: tl.constexpr, MOD, USE_TRANSPOSE: tl.constexpr, P_SHIFT: tl.constexpr,
):  # fmt: skip
    """From raw scores q k^T and dout v^T to (p for dv, ds for dq and dk). With dropout the caller divides both by
    1 - p_dropout.

    Every tile is queries by keys, with USE_TRANSPOSE keys by queries. Positions, lse, delta and b_lost come in the
    shape that broadcasts to it. first, first_col: the first query and key. lse is in natural units and +inf where a row
    saw no key, so p is 0 there. b_lost, of `lost_by_rounding`, and b_bias: for kind `bias` alone.
    P_SHIFT: p and ds are 2 ** P_SHIFT times as large. dp_factor: what dout v^T is multiplied by, None for nothing;
    b_delta is multiplied already.
    """
    if dp_factor is not None:
        b_dp = b_dp * dp_factor
    if USE_MASK and USE_TRANSPOSE:
        # Rows past the last query are zeros and have lse +inf. An infinite key makes their scores NaN, which become the
        # lowest number, of weight 0. A selection by lse would take registers from the loop without a mask (sm_90,
        # head dim 64, 2026-11-24: 340 instructions instead of 326, and products of dq that wait for each other).
        b_s = tl.where(b_s == b_s, b_s, -3.4e38)
    b_s, b_tanh = modified(b_s, scores, bounds, pos_m, pos_n, MOD)
    # b_p: [BLOCK_M, BLOCK_N], with USE_TRANSPOSE [BLOCK_N, BLOCK_M]
    if MOD.SCORE_MOD == "bias":
        b_p = tl.exp2((b_s + b_bias - b_lse) * LOG2E - shifted(b_lost, P_SHIFT))
    elif (MOD.SCORE_MOD == "plain" or MOD.SCORE_MOD == "dropout") or MOD.SCORE_MOD == "blocks":
        b_p = tl.exp2(b_s * (scores.scale * LOG2E) - shifted(b_lse * LOG2E, P_SHIFT))
    else:
        b_p = tl.exp2(b_s - shifted(b_lse * LOG2E, P_SHIFT))
    if USE_MASK:
        if not MOD.HAS_MASK:
            b_p = apply_mask(b_p, 0.0, pos_m, pos_n, bounds)
        elif USE_TRANSPOSE:
            b_p = hide_unseen(
                b_p, 0.0, pos_m, pos_n, first, pos_n, first_col, bounds, scores, True, MOD.SCORE_MOD == "any"
            )
        else:
            b_p = hide_unseen(
                b_p, 0.0, pos_m, pos_n, pos_m, first_col, first_col, bounds, scores, False, MOD.SCORE_MOD == "any"
            )
    b_kept = b_p
    b_ds = b_p * (b_dp - b_delta)
    if MOD.SCORE_MOD == "dropout" or MOD.SCORE_MOD == "any":
        p_dropout = scores.p_dropout
        if MOD.SCORE_MOD == "dropout" or p_dropout > 0.0:
            b_keep = keep_mask(
                scores.rng_state, p_dropout, scores.plane, first, first_col,
                TILE.BLOCK_M, TILE.BLOCK_N, MOD.DROPOUT_BITS_SHARED, USE_TRANSPOSE,
            )  # fmt: skip
            b_kept = apply_dropout(b_p, b_keep, p_dropout)
            b_ds = b_kept * b_dp - b_p * (b_delta * (1.0 - p_dropout))
    return b_kept, unmodified(b_ds, b_tanh, scores, MOD)
