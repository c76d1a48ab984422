"""Device functions that the attention kernels share: program order, lengths, casts."""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import flags, modifiers

# The numbers of `flags`, by their names there, and the bits of `modifiers`, as kernels take them.
globals().update({name: tl.constexpr(x) for name, x in vars(flags).items() if name.isupper()})
globals().update({name: tl.constexpr(x) for name, x in modifiers.BITS.items()})

# How many sequences `schedule` compares at once.
_SCAN = tl.constexpr(256)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The JIT must not fold these arguments into a kernel when they are 1 or a multiple of 16, because it would compile the
# kernel again for each such value.
RUNTIME_ARGUMENTS = (
    "nheads", "group", "parts", "seqlen_q", "seqlen_k", "total_k", "head_dim", "head_dim_v", "window_left",
    "window_right", "m_blocks", "n_blocks", "page_size", "planes", "chunk", "flags", "scale", "softcap", "p_dropout",
    "q_blocks", "k_blocks", "list_rows", "full_length",
    "lists", "lists_b", "lists_h", "list_length", "block_m", "block_n", "block_q", "block_k", "by_keys",
    "ranges_b", "ranges_h", "ids_qb", "ids_kb", "hidden_b", "hidden_h",
    "adds", "exps", "exchanges", "loads", "barriers", "products", "streams",
    "stride_lb", "stride_lh", "stride_ab", "stride_tb",
    *(f"stride_{tensor}{axis}" for tensor in ("q", "k", "v", "o", "g", "dq", "dk", "dv", "s") for axis in "bmnh"),
)  # fmt: skip


@triton.jit
def row_stride(stride, VEC: tl.constexpr):
    """A row stride in elements, from a stride in units of 16 bytes.

    The assumed bounds let AMD's compiler prove that offsets within a tile stay below 2 GiB. It then uses buffer
    instructions, where a mask is a bound and not a branch.
    """
    tl.assume(stride >= 0)
    tl.assume(stride < MAX_ROW_STRIDE)
    return stride * VEC


@triton.jit
def program_order(blocks, planes, chunk, NUM_XCDS: tl.constexpr):
    """The (block, plane) of blocks x planes that this program works on. A plane is one head of one batch entry.

    Programs take planes in chunks: all blocks of `chunk` planes, block by block, then the next chunk. With small
    chunks the keys of the programs that run together stay in the cache. With large chunks all heavy blocks start first.
    XCD swizzle: the hardware deals programs to the NUM_XCDS compute dies in turn, and each die has a cache of its own.
    So the order keeps neighbouring planes on one die.
    chunk: of the planes in its lower CHUNK_BITS bits, and above them the number of the first program of this launch.
    """
    pid = tl.program_id(0) + (chunk >> CHUNK_BITS)
    chunk = chunk & CHUNK_MASK
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
def key_bounds(first, rows, bounds, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the query rows [first, first + rows) see keys in [lo, hi).

    In [full_lo, full_hi) every row sees every key, so no mask is needed. All bounds but hi are multiples of BLOCK.
    Row i sees the keys i + shift - window_left to i + shift + window_right.
    """
    last = first + rows - 1
    hi = tl.maximum(tl.minimum(bounds.seqlen_k, last + bounds.shift + bounds.window_right + 1), 0)
    lo = tl.minimum(tl.maximum(first + bounds.shift - bounds.window_left, 0), hi) // BLOCK * BLOCK
    full_lo = (tl.maximum(last + bounds.shift - bounds.window_left, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_hi = (
        tl.maximum(tl.minimum(bounds.seqlen_k, first + bounds.shift + bounds.window_right + 1), 0) // BLOCK * BLOCK
    )
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.cdiv(hi, BLOCK) * BLOCK)
    full_hi = tl.maximum(full_hi, full_lo)
    return lo, full_lo, full_hi, hi


@triton.jit
def query_bounds(first, cols, bounds, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi): the queries that see any of the keys [first, first + cols), like `key_bounds`.

    A block of keys that reaches beyond seqlen_k needs the mask everywhere.
    """
    last = tl.minimum(first + cols, bounds.seqlen_k) - 1
    hi = tl.maximum(tl.minimum(bounds.seqlen_q, last - bounds.shift + bounds.window_left + 1), 0)
    lo = tl.minimum(tl.maximum(first - bounds.shift - bounds.window_right, 0), hi) // BLOCK * BLOCK
    full_lo = (tl.maximum(first + cols - 1 - bounds.shift - bounds.window_right, 0) + BLOCK - 1) // BLOCK * BLOCK
    full_hi = tl.maximum(tl.minimum(bounds.seqlen_q, first - bounds.shift + bounds.window_left + 1), 0) // BLOCK * BLOCK
    full_lo = tl.minimum(tl.maximum(full_lo, lo), tl.cdiv(hi, BLOCK) * BLOCK)
    full_hi = tl.maximum(full_hi, full_lo)
    if first + cols > bounds.seqlen_k:
        full_hi = full_lo
    return lo, full_lo, full_hi, hi


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
def cast(x, dtype: tl.constexpr, ROUND_HALF_UP: tl.constexpr):
    """x (fp32) in the type of an operand.

    ROUND_HALF_UP: to bfloat16 by adding half a unit and cutting off. It differs from rounding to even only in ties. On
    a GPU without an instruction for the cast it takes 1.5 instructions for each element, rounding to even takes 5.
    """
    if ROUND_HALF_UP and dtype == tl.bfloat16:
        y = ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y
