"""Cross entropy of rows of logits, with label smoothing and a penalty on the square of log Z."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import flags
from flash_attn.kernels.common import LN2, LOG2E

HAS_LSE = tl.constexpr(flags.LOSS_HAS_LSE)
IS_SPLIT = tl.constexpr(flags.LOSS_IS_SPLIT)

_RUNTIME_ARGUMENTS = (
    "smoothing", "scale", "square_scale", "ignore_index", "classes", "first_class", "cols", "stride", "stride_d",
    "flags",
)  # fmt: skip


@triton.jit
def _scores(logits, start, cols, scale, BLOCK_N: tl.constexpr):
    """Columns of a row of scale * logits, fp32: (those, 0 outside; those, -inf outside)."""
    offs = start + tl.arange(0, BLOCK_N)
    s = tl.load(logits + offs, mask=offs < cols, other=0.0).to(tl.float32) * scale
    return s, tl.where(offs < cols, s, float("-inf"))


@triton.jit(do_not_specialize=_RUNTIME_ARGUMENTS)
def cross_entropy_fwd(
    logits, labels, loss, lse, z_loss, smoothing, scale, square_scale,
    ignore_index, classes, first_class, cols, stride, flags, UNIT: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """Per row, of s = scale * logits: lse = log sum exp s, z_loss = square_scale * lse ** 2 and
    loss = lse - (1 - smoothing) * s[label] - smoothing * sum(s) / classes + z_loss; 0 where label is ignore_index,
    NaN where it is no class.

    HAS_LSE: lse is given. IS_SPLIT: the row holds the classes from first_class alone; loss lacks lse and z_loss,
    and the label's term where another part holds it. cols and strides come in units of UNIT elements.
    One program a row.
    """
    cols *= UNIT
    row = tl.program_id(0)
    label = tl.load(labels + row)
    logits += row.to(tl.int64) * (stride * UNIT)
    top = tl.full((BLOCK_N,), float("-inf"), tl.float32)
    exps = tl.zeros((BLOCK_N,), tl.float32)
    sums = tl.zeros((BLOCK_N,), tl.float32)
    if (flags & HAS_LSE == 0) or (smoothing > 0.0):
        # Of four pieces at a time every fifth exponential is for the old maximum; of one it would be every other.
        for start in range(0, cols, 4 * BLOCK_N):
            sum_a, a = _scores(logits, start, cols, scale, BLOCK_N)
            sum_b, b = _scores(logits, start + BLOCK_N, cols, scale, BLOCK_N)
            sum_c, c = _scores(logits, start + 2 * BLOCK_N, cols, scale, BLOCK_N)
            sum_d, d = _scores(logits, start + 3 * BLOCK_N, cols, scale, BLOCK_N)
            sums += (sum_a + sum_b) + (sum_c + sum_d)
            new = tl.maximum(top, tl.maximum(tl.maximum(a, b), tl.maximum(c, d)))
            base = tl.where(new == float("-inf"), 0.0, new)
            exps *= tl.exp2((top - base) * LOG2E)
            exps += tl.exp2((a - base) * LOG2E) + tl.exp2((b - base) * LOG2E)
            exps += tl.exp2((c - base) * LOG2E) + tl.exp2((d - base) * LOG2E)
            top = new
    if flags & HAS_LSE:
        log_z = tl.load(lse + row)
    else:
        peak = tl.max(top, 0)
        base = tl.where(peak == float("-inf"), 0.0, peak)
        log_z = base + tl.log2(tl.sum(exps * tl.exp2((top - base) * LOG2E), 0)) * LN2
        tl.store(lse + row, log_z)
    place = label - first_class
    here = (place >= 0) & (place < cols)
    picked = tl.load(logits + place, mask=here, other=0.0).to(tl.float32) * scale
    value = -(1.0 - smoothing) * picked
    if smoothing > 0.0:  # the sum is -inf where classes are masked
        value -= smoothing * tl.sum(sums, 0) / classes
    penalty = square_scale * log_z * log_z
    if flags & IS_SPLIT == 0:
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
    """dlogits, which may be logits: dloss * scale * (softmax * (1 + 2 * square_scale * lse) - target).
    Grid: (rows, column blocks)."""
    cols *= UNIT
    row = tl.program_id(0)
    offs = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    label = tl.load(labels + row)
    factor = tl.where(label == ignore_index, 0.0, tl.load(dloss + row) * scale)
    log_z = tl.load(lse + row)
    s = tl.load(logits + row.to(tl.int64) * (stride * UNIT) + offs, mask=offs < cols, other=float("-inf")).to(
        tl.float32
    )
    p = tl.exp2((s * scale - log_z) * LOG2E) * (1.0 + 2.0 * square_scale * log_z)
    p -= tl.where(offs == label - first_class, 1.0 - smoothing, 0.0) + smoothing / classes
    grad = tl.where(label == ignore_index, 0.0, factor * p)
    tl.store(dlogits + row.to(tl.int64) * (stride_d * UNIT) + offs, grad.to(dlogits.dtype.element_ty), mask=offs < cols)
