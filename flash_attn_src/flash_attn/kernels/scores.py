"""Score modifiers: softcap, ALiBi, a bias, sinks and the mask. The kernels of whole sequences modify their scores here,
forward and backward.

`groups.Scores` has the values of a head, `groups.ScoreMod` has the constants of a kernel. A new modifier is a kind in
`operation.KINDS`, its formula in `modified` and the derivative of its formula in `unmodified`. A modifier with a number
for each head takes the slot of `alibi_slopes`: see `load_slope`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import BIAS_IS_FP32, HAS_ALIBI_SLOPES, LOG2E, SINKS_LIKE_OUT


@triton.jit
def modified(b_s, scores, bounds, pos_m, pos_n, MOD):
    """(scaled and modified scores, tanh of the softcap) of products q k^T, without mask and bias.

    Scores are in the units of exp2, with a bias in natural units: see `load_bias`. Kinds without softcap, ALiBi and
    bias give the products as they are. The caller adds the bias, because it decides when to load it. pos_m, pos_n:
    queries and keys, in shapes that broadcast to the tile.
    """
    scale, softcap, b_tanh = scores.scale, scores.softcap, b_s
    if MOD.SCORE_MOD == "bias":
        b_s = b_s * scale
        b_tanh = tl.zeros_like(b_s)
        if softcap > 0.0:
            b_s, b_tanh = apply_softcap(b_s, softcap, 1.0 / softcap)
    elif (MOD.SCORE_MOD == "alibi" or MOD.SCORE_MOD == "softcap") or MOD.SCORE_MOD == "any":
        b_s = b_s * (scale * LOG2E)
        if MOD.SCORE_MOD != "alibi":
            b_tanh = tl.zeros_like(b_s)
            if MOD.SCORE_MOD == "softcap" or softcap > 0.0:
                b_s, b_tanh = apply_softcap(b_s, softcap * LOG2E, 1.0 / (softcap * LOG2E))
        if MOD.SCORE_MOD != "softcap":
            b_s += alibi_bias(scores.slope * LOG2E, pos_m, pos_n, bounds.shift)
    return b_s, b_tanh


@triton.jit
def unmodified(b_ds, b_tanh, scores, MOD):  # noqa: ARG001
    """The gradients of scores before `modified`, from the gradients after it. scores: for modifiers that multiply."""
    if (MOD.SCORE_MOD == "softcap" or MOD.SCORE_MOD == "bias") or MOD.SCORE_MOD == "any":
        b_ds = b_ds * (1.0 - b_tanh * b_tanh)
    return b_ds


@triton.jit
def load_slope(alibi_slopes, stride, batch, head, flags, SCORE_MOD: tl.constexpr):
    """The value of a head that `modified` takes: the slope of ALiBi, 0 if unused.

    stride: elements from a batch entry to the next one.
    """
    slope = 0.0
    if SCORE_MOD == "alibi" or SCORE_MOD == "any":
        if flags & HAS_ALIBI_SLOPES:
            slope = tl.load(alibi_slopes + batch * stride + head)
    return slope


@triton.jit
def apply_mask(x, fill, rows, cols, bounds):
    """x where the row sees the column, else fill.

    A row sees a column if cols - rows - shift is within [-window_left, window_right] and the column is below seqlen_k.
    Two selections by bounds of the row take the fewest registers (2026-11-21). The difference of row and column would
    be one integer for every score (sm_90: 168 registers, not 136). One selection by both comparisons would keep a pair
    of scalar registers for each (gfx90a: 105 spills to lanes, not 36).
    """
    last = tl.minimum(rows + bounds.shift + bounds.window_right, bounds.seqlen_k - 1)
    x = tl.where(cols <= last, x, fill)
    return tl.where(cols >= rows + bounds.shift - bounds.window_left, x, fill)


@triton.jit
def apply_softcap(s, cap, inverse):
    """cap * tanh(s * inverse), and the tanh."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1) overflows on neither side. Every target has exp2 and rsqrt, and the square of
    # rsqrt takes far fewer instructions than a division.
    root = tl.math.rsqrt(tl.exp2(s * (2.0 * LOG2E * inverse)) + 1.0)
    tanh = 1.0 - 2.0 * root * root
    return tanh * cap, tanh


@triton.jit
def alibi_bias(slope, rows, cols, shift):
    """-slope * distance from the diagonal that ends in the bottom right corner. Exact for positions below 2^24."""
    return -slope * tl.abs((rows + shift).to(tl.float32) - cols.to(tl.float32))


@triton.jit
def load_bias(scores, bounds, row, rows, cols, USE_ANCHOR_DOT: tl.constexpr):
    """The bias of scores in natural units, in the shape to which rows and cols broadcast; 0 outside of it.

    In the units of exp2 the lowest numbers of fp32 and bf16, by which masks hide keys, would be -inf. A row of them
    would be a row without keys. So scores with a bias, their maxima and their sinks stay in natural units.

    row: the first of the block; rows count from it. Columns are dense. Rows and columns outside read the last ones,
    because a load with a mask takes three times the instructions.
    USE_ANCHOR_DOT: adds a product of zeros, so that the tile has the layout of scores. Otherwise Triton computes the
    softmax in the layout of the loads and in the layout of scores.
    """
    seqlen_q, seqlen_k = bounds.seqlen_q, bounds.seqlen_k
    inside = (rows < seqlen_q - row) & (cols < seqlen_k)
    offsets = tl.minimum(rows, seqlen_q - row - 1) * scores.bias_stride + tl.minimum(cols, seqlen_k - 1)
    offset = scores.bias_offset + row * scores.bias_stride.to(tl.int64)
    if scores.flags & BIAS_IS_FP32:
        b_bias = tl.load(scores.bias.to(tl.pointer_type(tl.float32)) + offset + offsets)
    else:
        b_bias = tl.load(scores.bias + offset + offsets).to(tl.float32)
    b_bias = tl.where(inside, b_bias, 0.0)
    if USE_ANCHOR_DOT:
        left = tl.zeros((b_bias.shape[0], 16), scores.bias.dtype.element_ty)
        right = tl.zeros((16, b_bias.shape[1]), scores.bias.dtype.element_ty)
        b_bias = tl.dot(left, right, b_bias)
    return b_bias


@triton.jit
def load_sinks(sinks, heads, there, flags, dtype: tl.constexpr):
    """The sinks of query heads as they lie in memory: in fp32, and in `dtype`, the element type of the result. One of
    the two loads is masked off. `join_sinks` computes with them: a program waits for its loads at the first operation.
    there: whether there are sinks.
    """
    like_out = (flags & SINKS_LIKE_OUT) != 0
    b_wide = tl.load(sinks + heads, mask=there & (like_out == 0), other=float("-inf"))
    b_narrow = tl.load(sinks.to(tl.pointer_type(dtype)) + heads, mask=there & like_out, other=float("-inf"))
    return b_wide, b_narrow


@triton.jit
def join_sinks(b_wide, b_narrow, flags, NATURAL: tl.constexpr = False):
    """What `load_sinks` gave as sinks in the units of exp2, with NATURAL in natural units; -inf for no sink."""
    b_sinks = tl.where((flags & SINKS_LIKE_OUT) != 0, b_narrow.to(tl.float32), b_wide)
    return b_sinks if NATURAL else b_sinks * LOG2E


@triton.jit
def add_sink(b_m, b_l, b_sink, NATURAL: tl.constexpr = False):
    """(maximum, sum of weights, factor of the accumulators) of rows after their sinks joined the softmax.

    A sink is a score without a value, -inf where there is none. A row that saw no key has b_m = -inf and b_l = 0.
    Scores are in the units of exp2, with NATURAL in natural units.
    """
    b_m_new = tl.maximum(b_m, b_sink)
    b_m_sub = tl.where(b_m_new == float("-inf"), 0.0, b_m_new)
    if NATURAL:
        b_alpha = tl.exp2((b_m - b_m_sub) * LOG2E)
        b_l = b_l * b_alpha + tl.exp2((b_sink - b_m_sub) * LOG2E)
    else:
        b_alpha = tl.exp2(b_m - b_m_sub)
        b_l = b_l * b_alpha + tl.exp2(b_sink - b_m_sub)
    return b_m_new, b_l, b_alpha
