"""Cross entropy of rows of logits, with label smoothing and a penalty on the square of log Z."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import LN2, LOG2E, LOSS_HAS_LSE, LOSS_IS_SPLIT

_RUNTIME_ARGUMENTS = (
    "smoothing", "scale", "square_scale", "ignore_index", "classes", "first_class", "cols", "stride", "stride_d",
    "flags",
)  # fmt: skip


@triton.jit
def _scores(logits, start, cols, scale, BLOCK_N: tl.constexpr):
    """scale * logits for BLOCK_N columns of a row from `start` on, fp32 [BLOCK_N]. Returns them twice: with 0 for the
    columns after the last, and with -inf for them."""
    offs_n = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    b_s = tl.load(logits + offs_n, mask=offs_n < cols, other=0.0).to(tl.float32) * scale  # [BLOCK_N]
    return b_s, tl.where(offs_n < cols, b_s, float("-inf"))


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def cross_entropy_fwd(
    logits, labels, loss, lse, z_loss, smoothing, scale, square_scale,
    ignore_index, classes, first_class, cols, stride, flags, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one row of s = scale * logits.

    lse = log sum exp s, z_loss = square_scale * lse ** 2 and loss = lse - (1 - smoothing) * s[label] - smoothing *
    sum(s) / classes + z_loss. Both losses are 0 where label is ignore_index. loss is NaN where label is no class.

    LOSS_HAS_LSE: lse is given. LOSS_IS_SPLIT: the row holds only the classes from first_class on. loss then lacks lse
    and z_loss, and the label's term where another row holds the label. cols and strides are in units of UNIT elements.
    """
    cols *= UNIT
    row = tl.program_id(0)
    label = tl.load(labels + row)
    logits += row.to(tl.int64) * (stride * UNIT)
    b_max = tl.full((BLOCK_N,), float("-inf"), tl.float32)  # [BLOCK_N]
    b_exps = tl.zeros((BLOCK_N,), tl.float32)  # [BLOCK_N]
    b_sums = tl.zeros((BLOCK_N,), tl.float32)  # [BLOCK_N]
    if (flags & LOSS_HAS_LSE == 0) or (smoothing > 0.0):
        # With four pieces at a time every fifth exponential is for the old maximum. With one piece it would be every
        # second.
        for start in range(0, cols, 4 * BLOCK_N):
            sum_a, b_a = _scores(logits, start, cols, scale, BLOCK_N)
            sum_b, b_b = _scores(logits, start + BLOCK_N, cols, scale, BLOCK_N)
            sum_c, b_c = _scores(logits, start + 2 * BLOCK_N, cols, scale, BLOCK_N)
            sum_d, b_d = _scores(logits, start + 3 * BLOCK_N, cols, scale, BLOCK_N)
            b_sums += (sum_a + sum_b) + (sum_c + sum_d)
            b_max_new = tl.maximum(b_max, tl.maximum(tl.maximum(b_a, b_b), tl.maximum(b_c, b_d)))  # [BLOCK_N]
            b_base = tl.where(b_max_new == float("-inf"), 0.0, b_max_new)  # [BLOCK_N]
            b_exps *= tl.exp2((b_max - b_base) * LOG2E)
            b_exps += tl.exp2((b_a - b_base) * LOG2E) + tl.exp2((b_b - b_base) * LOG2E)
            b_exps += tl.exp2((b_c - b_base) * LOG2E) + tl.exp2((b_d - b_base) * LOG2E)
            b_max = b_max_new  # [BLOCK_N]
    if flags & LOSS_HAS_LSE:
        log_z = tl.load(lse + row)
    else:
        peak = tl.max(b_max, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        log_z = base + tl.log2(tl.sum(b_exps * tl.exp2((b_max - base) * LOG2E), 0)) * LN2
        tl.store(lse + row, log_z)
    place = label - first_class
    here = (place >= 0) & (place < cols)
    picked = tl.load(logits + place, mask=here, other=0.0).to(tl.float32) * scale
    value = -(1.0 - smoothing) * picked
    if smoothing > 0.0:  # because the sum is -inf where classes are masked
        value -= smoothing * tl.sum(b_sums, 0) / classes
    penalty = square_scale * log_z * log_z
    if flags & LOSS_IS_SPLIT == 0:
        value += log_z + penalty
    value = tl.where((label >= 0) & (label < classes), value, float("nan"))
    ignored = label == ignore_index
    tl.store(loss + row, tl.where(ignored, 0.0, value))
    tl.store(z_loss + row, tl.where(ignored, 0.0, penalty))


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def cross_entropy_bwd(
    logits, labels, lse, dloss, dlogits, smoothing, scale, square_scale,
    ignore_index, classes, first_class, cols, stride, stride_d, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """dlogits = dloss * scale * (softmax * (1 + 2 * square_scale * lse) - target). dlogits may be logits.

    Grid: (rows, column blocks).
    """
    cols *= UNIT
    row = tl.program_id(0)
    offs_n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)  # [BLOCK_N]
    label = tl.load(labels + row)
    factor = tl.where(label == ignore_index, 0.0, tl.load(dloss + row) * scale)
    log_z = tl.load(lse + row)
    b_s = tl.load(  # [BLOCK_N]
        logits + row.to(tl.int64) * (stride * UNIT) + offs_n, mask=offs_n < cols, other=float("-inf")
    ).to(tl.float32)
    b_p = tl.exp2((b_s * scale - log_z) * LOG2E) * (1.0 + 2.0 * square_scale * log_z)  # [BLOCK_N]
    b_p -= tl.where(offs_n == label - first_class, 1.0 - smoothing, 0.0) + smoothing / classes
    b_grad = tl.where(label == ignore_index, 0.0, factor * b_p)  # [BLOCK_N]
    tl.store(
        dlogits + row.to(tl.int64) * (stride_d * UNIT) + offs_n, b_grad.to(dlogits.dtype.element_ty), mask=offs_n < cols
    )
