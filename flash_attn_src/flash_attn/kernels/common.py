"""Device functions that the attention kernels share: which sequence, which keys, which scores."""

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
PACKED_BLOCKS = tl.constexpr(flags.PACKED_BLOCKS)
ROTARY_INTERLEAVED = tl.constexpr(flags.ROTARY_INTERLEAVED)
ROTARY_MOVES = tl.constexpr(flags.ROTARY_MOVES)

MAX_ROW_STRIDE = tl.constexpr(flags.MAX_ROW_STRIDE)

# How many sequences `locate` looks at at once.
_SCAN = tl.constexpr(256)

LOG2E = tl.constexpr(1.4426950408889634)
LN2 = tl.constexpr(0.6931471805599453)

# The JIT may not fold these into a kernel when they happen to be 1 or a multiple of 16: it would compile anew.
RUNTIME_ARGUMENTS = (
    "nheads", "group", "parts", "seqlen_q", "seqlen_k", "total_k", "head_dim", "window_left", "window_right",
    "m_blocks", "n_blocks", "page_size", "planes", "chunk", "flags", "scale", "softcap", "p_dropout",
    "stride_lb", "stride_lh", "stride_ab", "stride_tb",
    *(f"stride_{tensor}{axis}" for tensor in ("q", "k", "v", "o", "g", "dq", "dk", "dv") for axis in "bmnh"),
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
    """A row stride in elements, from units of 16 bytes. What is assumed of it lets AMD's compiler prove that
    offsets within a tile stay below 2 GiB and use buffer instructions: masks become bounds, not branches."""
    _assume_row_stride(stride)
    return stride * VEC


@triton.jit
def place(blocks, planes, chunk, NUM_XCDS: tl.constexpr):
    """Which (block, plane) of blocks x planes this program works on; a plane is a batch entry and head.

    Planes are taken in chunks: all blocks of `chunk` planes, block by block, before the next chunk. Small chunks
    keep the keys of what runs at the same time in the cache, large ones start all heavy blocks first. Programs
    go to the NUM_XCDS of a GPU in turn, each with a cache of its own, so neighbouring planes stay on one die.
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
def locate(blocks, planes, heads, chunk, cu_seqlens, flags, BLOCK: tl.constexpr, NUM_XCDS: tl.constexpr):
    """What this program works on, as (block, blocks, batch, head): block `block` of the `blocks` of one sequence.
    Grid: blocks * planes, planes = heads * batch; with PACKED_BLOCKS blocks * heads.

    PACKED_BLOCKS: sequence b has the packed blocks from cu_seqlens[b] // BLOCK + b to where the next one's begin. That
    is one for each BLOCK rows that it starts, or one more, and asks for no sum over the sequences before. `block` is
    outside of [0, blocks) in a program that has no sequence.
    """
    packed = (flags & PACKED_BLOCKS) != 0
    block, plane = place(blocks, tl.where(packed, heads, planes), chunk, NUM_XCDS)
    head = plane % heads
    batch = plane // heads
    if packed:  # the last sequence that begins at this block or before: a search by _SCAN parts at once
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
    """First row and length of a batch entry's queries."""
    start = batch * 0
    if flags & HAS_CU_SEQLENS_Q:
        start = tl.load(cu_seqlens_q + batch)
        seqlen = tl.load(cu_seqlens_q + batch + 1) - start
    return start, seqlen


@triton.jit
def key_span(batch, seqlen, cu_seqlens_k, seqused_k, leftpad_k, flags):
    """First row and length of a batch entry's keys, after seqused_k and leftpad_k."""
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
    """Key range [lo, hi) that the query rows [first, first + rows) see, and the part [full_lo, full_hi)
    of it, in whole blocks, where every row sees every key and no mask is needed. All but hi are multiples of
    BLOCK. Row i sees keys i + shift - window_left .. i + shift + window_right."""
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
    """Query range that sees any of the keys [first, first + cols), and the unmasked part of it: the transpose
    of `key_bounds`. A block of keys that reaches beyond seqlen_k is masked throughout."""
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
def hide(x, fill, rows, cols, shift, seqlen_k, window_left, window_right):
    """x where the rows see the columns, else fill: cols - rows - shift within [-window_left, window_right], and
    below seqlen_k.

    Two selections by bounds of the row, in this form for the registers it leaves: the difference of row and
    column would be an integer kept for every score (sm_90: 168 registers instead of 136), the conjunction of both
    comparisons a pair of scalar registers each (gfx90a: 105 spilled to lanes instead of 36).
    """
    last = tl.minimum(rows + shift + window_right, seqlen_k - 1)
    x = tl.where(cols <= last, x, fill)
    return tl.where(cols >= rows + shift - window_left, x, fill)


@triton.jit
def capped(s, cap, inverse):
    """cap * tanh(s * inverse), and the tanh."""
    # tanh(x) = 1 - 2 / (exp(2 x) + 1): no overflow on either side, and every target has exp2 and rsqrt, which
    # squared is a fraction of the instructions of a division.
    root = tl.math.rsqrt(tl.exp2(s * (2.0 * LOG2E * inverse)) + 1.0)
    tanh = 1.0 - 2.0 * root * root
    return tanh * cap, tanh


@triton.jit
def narrow(x, dtype: tl.constexpr, HALF_UP: tl.constexpr):
    """x (fp32) in an operand's type. HALF_UP: bfloat16 by adding half a unit and cutting off, which differs from
    rounding to even in ties alone and takes 1.5 instructions an element instead of 5 where the GPU has none."""
    if HALF_UP and dtype == tl.bfloat16:
        y = ((x.to(tl.uint32, bitcast=True) + 0x8000) >> 16).to(tl.uint16).to(tl.bfloat16, bitcast=True)
    else:
        y = x.to(dtype)
    return y


@triton.jit
def alibi_bias(slope, rows, cols, shift):
    """-slope * distance from the diagonal that ends in the bottom right corner; positions below 2^24 are exact."""
    return -slope * tl.abs((rows + shift).to(tl.float32) - cols.to(tl.float32))
