"""Device functions that the attention kernels share: program order, lengths, masks, casts."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import flags

HAS_CU_SEQLENS_Q = tl.constexpr(flags.HAS_CU_SEQLENS_Q)
HAS_CU_SEQLENS_K = tl.constexpr(flags.HAS_CU_SEQLENS_K)
HAS_SEQUSED_K = tl.constexpr(flags.HAS_SEQUSED_K)
HAS_LEFTPAD_K = tl.constexpr(flags.HAS_LEFTPAD_K)
HAS_ALIBI = tl.constexpr(flags.HAS_ALIBI)
HAS_CACHE_BATCH_IDX = tl.constexpr(flags.HAS_CACHE_BATCH_IDX)
HAS_ROTARY_SEQLENS = tl.constexpr(flags.HAS_ROTARY_SEQLENS)
HAS_DESCALE = tl.constexpr(flags.HAS_DESCALE)
HAS_BLOCK_TABLE = tl.constexpr(flags.HAS_BLOCK_TABLE)
HAS_SINKS = tl.constexpr(flags.HAS_SINKS)
SINKS_LIKE_OUT = tl.constexpr(flags.SINKS_LIKE_OUT)
BIAS_IS_FP32 = tl.constexpr(flags.BIAS_IS_FP32)
PACKED_BLOCKS = tl.constexpr(flags.PACKED_BLOCKS)
ROTARY_INTERLEAVED = tl.constexpr(flags.ROTARY_INTERLEAVED)
ROTARY_MOVES = tl.constexpr(flags.ROTARY_MOVES)

MAX_ROW_STRIDE = tl.constexpr(flags.MAX_ROW_STRIDE)

# How many sequences `schedule` compares at once.
_SCAN = tl.constexpr(256)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The JIT must not fold these arguments into a kernel when they are 1 or a multiple of 16, because it would compile the
# kernel again for each such value.
RUNTIME_ARGUMENTS = (
    "nheads", "group", "parts", "seqlen_q", "seqlen_k", "total_k", "head_dim", "head_dim_v", "window_left",
    "window_right", "m_blocks", "n_blocks", "page_size", "planes", "chunk", "flags", "scale", "softcap", "p_dropout",
    "stride_lb", "stride_lh", "stride_ab", "stride_tb",
    *(f"stride_{tensor}{axis}" for tensor in ("q", "k", "v", "o", "g", "dq", "dk", "dv", "s") for axis in "bmnh"),
)  # fmt: skip


if hasattr(tl, "assume"):

    @triton.jit
    def _assume_row_stride(stride):
        tl.assume(stride >= 0)
        tl.assume(stride < MAX_ROW_STRIDE)

else:  # Triton 3.1

    @triton.jit
    def _assume_row_stride(stride):
        pass


@triton.jit
def row_stride(stride, VEC: tl.constexpr):
    """A row stride in elements, from a stride in units of 16 bytes.

    The assumed bounds let AMD's compiler prove that offsets within a tile stay below 2 GiB. It then uses buffer
    instructions, where a mask is a bound and not a branch.
    """
    _assume_row_stride(stride)
    return stride * VEC


@triton.jit
def program_order(blocks, planes, chunk, NUM_XCDS: tl.constexpr):
    """The (block, plane) of blocks x planes that this program works on. A plane is one head of one batch entry.

    Programs take planes in chunks: all blocks of `chunk` planes, block by block, then the next chunk. With small
    chunks the keys of the programs that run together stay in the cache. With large chunks all heavy blocks start first.
    XCD swizzle: the hardware deals programs to the NUM_XCDS compute dies in turn, and each die has a cache of its own.
    So the order keeps neighbouring planes on one die.
    """
    pid = tl.program_id(0)
    first = pid // (blocks * chunk) * chunk
    rest = pid - first * blocks
    here = tl.minimum(chunk, planes - first)
    plane = rest % here
    if NUM_XCDS > 1:
        if here % NUM_XCDS == 0:
            plane = plane % NUM_XCDS * (here // NUM_XCDS) + plane // NUM_XCDS
    return rest // here, first + plane


@triton.jit
def schedule(blocks, planes, heads, chunk, cu_seqlens, flags, BLOCK: tl.constexpr, NUM_XCDS: tl.constexpr):
    """The tile scheduler: (block, blocks, batch, head), block `block` of the `blocks` blocks of one sequence.

    Grid: blocks * planes with planes = heads * batch. With PACKED_BLOCKS: blocks * heads.
    PACKED_BLOCKS: the packed blocks of sequence b begin at cu_seqlens[b] // BLOCK + b and end where sequence b + 1
    begins. So a sequence has one block for each BLOCK rows, or one more, and no sum over earlier sequences is needed.
    A program without a sequence gets a `block` outside of [0, blocks).
    """
    packed = (flags & PACKED_BLOCKS) != 0
    block, plane = program_order(blocks, tl.where(packed, heads, planes), chunk, NUM_XCDS)
    head = plane % heads
    batch = plane // heads
    if packed:  # a search for the last sequence that begins at or before this block, by _SCAN sequences at once
        batch = 0
        step = 1
        while step * _SCAN < planes // heads:
            step *= _SCAN
        while step > 0:
            later = batch + step * (1 + tl.arange(0, _SCAN))
            inside = later < planes // heads
            start = tl.load(cu_seqlens + later, mask=inside, other=0)
            batch += tl.sum((inside & (start // BLOCK + later <= block)).to(tl.int32), 0) * step
            step //= _SCAN
        begin = tl.load(cu_seqlens + batch) // BLOCK + batch
        blocks = tl.load(cu_seqlens + batch + 1) // BLOCK + batch + 1 - begin
        block -= begin
    return block, blocks, batch, head


@triton.jit
def query_span(batch, seqlen, cu_seqlens_q, flags):
    """The first row and the length of a batch entry's queries."""
    start = batch * 0
    if flags & HAS_CU_SEQLENS_Q:
        start = tl.load(cu_seqlens_q + batch)
        seqlen = tl.load(cu_seqlens_q + batch + 1) - start
    return start, seqlen


@triton.jit
def key_span(batch, seqlen, cu_seqlens_k, seqused_k, leftpad_k, flags):
    """The first row and the length of a batch entry's keys, after seqused_k and leftpad_k are applied."""
    start = batch * 0
    if flags & HAS_CU_SEQLENS_K:
        start = tl.load(cu_seqlens_k + batch)
        seqlen = tl.load(cu_seqlens_k + batch + 1) - start
    if flags & HAS_SEQUSED_K:
        seqlen = tl.load(seqused_k + batch)
    if flags & HAS_LEFTPAD_K:
        pad = tl.load(leftpad_k + batch)
        start += pad
        seqlen -= pad
    return start, seqlen


@triton.jit
def key_bounds(first, rows, shift, seqlen_k, window_left, window_right, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the query rows [first, first + rows) see keys in [lo, hi).

    In [full_lo, full_hi) every row sees every key, so no mask is needed. All bounds but hi are multiples of BLOCK.
    Row i sees the keys i + shift - window_left to i + shift + window_right.
    """
    last = first + rows - 1
    hi = tl.maximum(tl.minimum(seqlen_k, last + shift + window_right + 1), 0)
    lo = tl.minimum(tl.maximum(first + shift - window_left, 0), hi) // BLOCK * BLOCK
    full_lo = (tl.maximum(last + shift - window_left, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_hi = tl.maximum(tl.minimum(seqlen_k, first + shift + window_right + 1), 0) // BLOCK * BLOCK
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.cdiv(hi, BLOCK) * BLOCK)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_bounds(first, cols, shift, seqlen_q, seqlen_k, window_left, window_right, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the queries that see any of the keys [first, first + cols), like `key_bounds`.

    A block of keys that reaches beyond seqlen_k needs the mask everywhere.
    """
    last = tl.minimum(first + cols, seqlen_k) - 1
    hi = tl.maximum(tl.minimum(seqlen_q, last - shift + window_left + 1), 0)
    lo = tl.minimum(tl.maximum(first - shift - window_right, 0), hi) // BLOCK * BLOCK
    full_lo = (tl.maximum(first + cols - 1 - shift - window_right, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_hi = tl.maximum(tl.minimum(seqlen_q, first - shift + window_left + 1), 0) // BLOCK * BLOCK
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.cdiv(hi, BLOCK) * BLOCK)
    full_hi = tl.maximum(full_hi, full_lo)
    if first + cols > seqlen_k:
        full_hi = full_lo
    return lo, full_lo, full_hi, hi


@triton.jit
def apply_mask(x, fill, rows, cols, shift, seqlen_k, window_left, window_right):
    """x where the row sees the column, else fill.

    A row sees a column if cols - rows - shift is within [-window_left, window_right] and the column is below seqlen_k.
    Two selections by bounds of the row take the fewest registers (2026-11-21). The difference of row and column would
    be one integer for every score (sm_90: 168 registers, not 136). One selection by both comparisons would keep a pair
    of scalar registers for each (gfx90a: 105 spills to lanes, not 36).
    """
    last = tl.minimum(rows + shift + window_right, seqlen_k - 1)
    x = tl.where(cols <= last, x, fill)
    return tl.where(cols >= rows + shift - window_left, x, fill)


@triton.jit
def apply_softcap(s, cap, inverse):
    """cap * tanh(s * inverse), and the tanh."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1) overflows on neither side. Every target has exp2 and rsqrt, and the square of
    # rsqrt takes far fewer instructions than a division.
    root = tl.math.rsqrt(tl.exp2(s * (2.0 * LOG2E * inverse)) + 1.0)
    tanh = 1.0 - 2.0 * root * root
    return tanh * cap, tanh


@triton.jit
def shifted(b_m, WEIGHT_SHIFT: tl.constexpr):
    """What to subtract from scores, in the units of exp2, for weights 2 ** WEIGHT_SHIFT times exp2(score - b_m).

    MI200's products take an fp16 weight below 2 ** -14 as zero, while the sum of weights counts it. The shift makes
    that 2 ** -28 of the largest weight. fp16 holds the largest weight, 2 ** 14, with the rounding error that
    `sum_of_weights` describes. Sums and accumulators are fp32, and the shift is undone after the last key.
    """
    return b_m - WEIGHT_SHIFT if WEIGHT_SHIFT else b_m


@triton.jit
def sum_of_weights(b_m, b_l, values):
    """(whether a row saw no key, the sum of its weights) of a row's maximum and that sum. The sum is NaN where scores
    are so large that weights are lost. `values` points to v, whose type the weights take for the product.

    The compiler computes a weight exp2(s * c - m) with one instruction that rounds once, but m, the largest s * c, was
    rounded before. So the largest weight is exp2(rounding error of m). A sum divided by the sum of weights does not
    change. From m = 3e8 on the largest weight may be so small that fp16 holds it no more: then the row is NaN, not 0.
    fp32 holds weights down to 1e-38.
    """
    least: tl.constexpr = 1e-30 if values.dtype.element_ty == tl.float32 else 0.0009765625
    b_empty = (b_l == 0.0) & (b_m == float("-inf"))
    b_lost = (b_l < least) & (b_m != float("-inf"))
    return b_empty, tl.where(b_lost, float("nan"), b_l)


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
def load_bias(bias, plane_offset, row, rows, stride_sm, cols, seqlen_q, seqlen_k, flags, ANCHOR: tl.constexpr):
    """The bias of scores in natural units, in the shape to which rows and cols broadcast; 0 outside of it.

    In the units of exp2 the lowest numbers of fp32 and bf16, by which masks hide keys, would be -inf. A row of them
    would be a row without keys. So scores with a bias, their maxima and their sinks stay in natural units.

    plane_offset: of the head, int64. row: the first of the block; rows count from it. Columns are dense. Rows and
    columns outside read the last ones, because a load with a mask takes three times the instructions.
    ANCHOR: a product of zeros is added, which gives the tile the layout of scores. Triton would follow the layout of
    the loads into the softmax, and work in both.
    """
    inside = (rows < seqlen_q - row) & (cols < seqlen_k)
    offsets = tl.minimum(rows, seqlen_q - row - 1) * stride_sm + tl.minimum(cols, seqlen_k - 1)
    plane_offset += row * stride_sm.to(tl.int64)
    if flags & BIAS_IS_FP32:
        b_bias = tl.load(bias.to(tl.pointer_type(tl.float32)) + plane_offset + offsets)
    else:
        b_bias = tl.load(bias + plane_offset + offsets).to(tl.float32)
    b_bias = tl.where(inside, b_bias, 0.0)
    if ANCHOR:
        left = tl.zeros((b_bias.shape[0], 16), bias.dtype.element_ty)
        right = tl.zeros((16, b_bias.shape[1]), bias.dtype.element_ty)
        b_bias = tl.dot(left, right, b_bias)
    return b_bias


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


@triton.jit
def cast(x, dtype: tl.constexpr, HALF_UP: tl.constexpr):
    """x (fp32) in the type of an operand.

    HALF_UP: to bfloat16 by adding half a unit and cutting off. It differs from rounding to even only in ties. On a GPU
    without an instruction for the cast it takes 1.5 instructions for each element, rounding to even takes 5.
    """
    if HALF_UP and dtype == tl.bfloat16:
        y = ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def alibi_bias(slope, rows, cols, shift):
    """-slope * distance from the diagonal that ends in the bottom right corner. Exact for positions below 2^24."""
    return -slope * tl.abs((rows + shift).to(tl.float32) - cols.to(tl.float32))
