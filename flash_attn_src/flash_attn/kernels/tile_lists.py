"""The lists of tiles that the attention kernels of kind `blocks` visit, made from a mask on the device at each call.

One program makes one list: the tiles of keys of a tile of queries, or, for dk and dv, the tiles of queries of a tile of
keys. The tiles in which every query sees every key come from its front on, the tiles with a key to hide from its back.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import operation
from flash_attn.kernels.blocks import load_ranges, mask_parts
from flash_attn.kernels.common import (
    HAS_BITS,
    HAS_BLOCKS,
    HAS_HIDDEN,
    HAS_IDS,
    HAS_RANGES,
    PARTIAL_BLOCK,
    RUNTIME_ARGUMENTS,
    WHOLE_BLOCK,
)

# No block of a mask begins or ends inside of so many queries or keys, counted from a multiple of it.
_PIECE = tl.constexpr(operation.SPARSE_BLOCK)


# Queries, or keys, that are looked at together. Every tile is a multiple.
_STEP = tl.constexpr(8)
# A tile with a key to hide, in a count whose lower bits hold the other tiles. More than the tiles of one step.
_PARTIAL = tl.constexpr(1 << 16)


@triton.jit
def _in_blocks(
    p_seen, stride, first_m, last_m, first_n, last_n, block_m, block_n, block_q, block_k, has_blocks, real
):  # fmt: skip
    """The smallest and the largest byte of the blocks of each tile: [TILES] both, PARTIAL_BLOCK without blocks.

    A loop without a step takes the place of a branch, whose tensors Triton 3.7.1 fails to compile for AMD's GPUs.
    """
    low = tl.where(has_blocks, WHOLE_BLOCK, PARTIAL_BLOCK) + first_m * 0  # [TILES]
    high = tl.where(has_blocks, 0, PARTIAL_BLOCK) + first_m * 0  # [TILES]
    for r in tl.range(0, tl.where(has_blocks, block_m, 0), _PIECE):
        rows = tl.minimum(first_m + r, last_m) // block_q  # [TILES]
        for c in tl.range(0, block_n, _PIECE):
            cols = tl.minimum(first_n + c, last_n) // block_k  # [TILES]
            b_seen = tl.load(p_seen + rows.to(tl.int64) * stride + cols, mask=real, other=0).to(tl.int32)  # [TILES]
            low, high = tl.minimum(low, b_seen), tl.maximum(high, b_seen)
    return low, high


@triton.jit
def _in_ranges(p_ranges, first_m, last_m, first_n, last_n, block_m, has_ranges, real):
    """(whether a query of each tile has a range that meets its keys, whether every query has one that holds them all),
    int1 [TILES] both. True where there are no ranges. Queries and keys may change places.

    The outer loop takes one turn, or none, so that a mask without ranges pays for no reduction.
    """
    col, last_col = first_n[:, None], last_n[:, None]  # [TILES, 1] both
    offs = tl.arange(0, _STEP)[None, :]  # [1, _STEP]
    some = (first_n >= 0).to(tl.int32)  # [TILES]
    whole = some
    for _ in tl.range(0, has_ranges.to(tl.int32)):
        b_some = col + offs < 0  # [TILES, _STEP]
        b_whole = col + offs >= 0  # [TILES, _STEP]
        for r in tl.range(0, block_m, _STEP):
            # Past the last query, and in no real tile, the last query and query 0 are looked at once more.
            rows = tl.where(real[:, None], tl.minimum(first_m[:, None] + (r + offs), last_m[:, None]), 0)
            start, end, other_start, other_end = load_ranges(p_ranges, rows)  # [TILES, _STEP] each
            meets = tl.maximum(start, col) < tl.minimum(end, last_col + 1)
            b_some = b_some | meets | (tl.maximum(other_start, col) < tl.minimum(other_end, last_col + 1))
            holds = (start <= col) & (end > last_col)
            b_whole = b_whole & (holds | ((other_start <= col) & (other_end > last_col)))
        some, whole = tl.max(b_some.to(tl.int32), 1), tl.min(b_whole.to(tl.int32), 1)
    return some != 0, whole != 0


@triton.jit
def _extrema(ids, first, last, block, has_ids, real):
    """The smallest and the largest id of the positions of each tile, 0 without ids: [TILES] both."""
    offs = tl.arange(0, _STEP)[None, :]  # [1, _STEP]
    low = first * 0  # [TILES]
    high = low
    for _ in tl.range(0, has_ids.to(tl.int32)):
        b_low = tl.load(ids + first, mask=real, other=0)[:, None] + offs * 0  # [TILES, _STEP]
        b_high = b_low
        for r in tl.range(0, block, _STEP):
            place = tl.where(real[:, None], tl.minimum(first[:, None] + (r + offs), last[:, None]), 0)
            b_id = tl.load(ids + place)  # [TILES, _STEP]
            b_low, b_high = tl.minimum(b_low, b_id), tl.maximum(b_high, b_id)
        low, high = tl.min(b_low, 1), tl.max(b_high, 1)
    return low, high


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def list_tiles(
    tiles, tile_counts, block_mask, key_ranges, ids_q, ids_k, hidden_queries,
    stride_sb, stride_sh, stride_sm,
    nheads, seqlen_q, seqlen_k, window_left, window_right,
    block_m, block_n, lists, list_length, by_keys, flags, block_q, block_k,
    ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one of the `lists` lists of a plane. Grid: lists * planes, a plane is a head of a batch entry.

    nheads: heads that have a mask of their own. A stride is 0 where all entries or heads share a part of the mask.
    block_m, block_n: the tile of the attention kernel, in queries and keys. block_q, block_k: a block of the mask.
    by_keys: 1 for a list of tiles of queries for each tile of keys, 0 for the other way round.
    tiles: int32 (planes, lists, list_length), a place more than a list has tiles, which stays empty at the back.
    tile_counts: int32 (planes, lists, 2), how many tiles need no mask, and all of them. The parts of the mask: see
    `blocks.mask_parts` and `hide_unseen`.
    """
    pid = tl.program_id(0)
    outer, plane = pid % lists, pid // lists
    batch64, head64 = (plane // nheads).to(tl.int64), (plane % nheads).to(tl.int64)
    p_seen = block_mask + (batch64 * stride_sb + head64 * stride_sh)
    p_ranges, p_ids_q, p_ids_k, p_hidden = mask_parts(
        key_ranges, ids_q, ids_k, hidden_queries, ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h,
        batch64, head64,
    )  # fmt: skip
    p_tiles = tiles + pid.to(tl.int64) * list_length
    shift, most = seqlen_k - seqlen_q, list_length - 1
    full, partial = 0, 0
    for start in tl.range(0, most, BLOCK_N):
        inner = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
        real = inner < most  # [BLOCK_N]
        m, n = tl.where(by_keys != 0, inner, outer), tl.where(by_keys != 0, outer, inner)
        first_m, first_n = m * block_m, n * block_n  # [BLOCK_N] both
        last_m = tl.minimum(first_m + block_m, seqlen_q) - 1
        last_n = tl.minimum(first_n + block_n, seqlen_k) - 1
        some = (first_n <= last_m + shift + window_right) & (last_n >= first_m + shift - window_left)
        whole = (last_n <= first_m + shift + window_right) & (first_n >= last_m + shift - window_left)
        b_some, b_whole = _in_ranges(
            p_ranges, first_m, last_m, first_n, last_n, block_m, (flags & HAS_RANGES) != 0, real
        )
        some, whole = some & b_some, whole & b_whole & ((flags & HAS_BITS) == 0)
        has_hidden = (flags & HAS_HIDDEN) != 0
        b_some, b_whole = _in_ranges(p_hidden, first_n, last_n, first_m, last_m, block_n, has_hidden, real)
        some, whole = some & ((b_whole & has_hidden) == 0), whole & ((b_some & has_hidden) == 0)
        has_ids = (flags & HAS_IDS) != 0
        low_q, high_q = _extrema(p_ids_q, first_m, last_m, block_m, has_ids, real)  # [BLOCK_N] both
        low_k, high_k = _extrema(p_ids_k, first_n, last_n, block_n, has_ids, real)  # [BLOCK_N] both
        some = some & (low_q <= high_k) & (low_k <= high_q)
        whole = whole & (low_q == high_q) & (low_k == high_k) & (low_q == low_k)
        low, high = _in_blocks(  # [BLOCK_N] both
            p_seen, stride_sm, first_m, last_m, first_n, last_n, block_m, block_n, block_q, block_k,
            (flags & HAS_BLOCKS) != 0, real,
        )  # fmt: skip
        some = (high == WHOLE_BLOCK) | ((high != 0) & some)
        whole = (low == WHOLE_BLOCK) | ((low != 0) & whole)
        # A loop without a mask loads whole tiles. A tile of queries past the last query is not loaded in a loop over
        # keys, and keys past the last key need the mask in both.
        whole = whole & (first_n + block_n <= seqlen_k) & ((by_keys == 0) | (first_m + block_m <= seqlen_q))
        # Both counts in one number, so that one scan gives both places.
        b_listed = tl.where(real & some, tl.where(whole, 1, _PARTIAL), 0)  # [BLOCK_N]
        b_before = tl.cumsum(b_listed, 0) - b_listed  # [BLOCK_N]
        tl.store(p_tiles + full + b_before % _PARTIAL, inner, mask=b_listed == 1)
        tl.store(p_tiles + most - 1 - partial - b_before // _PARTIAL, inner, mask=b_listed == _PARTIAL)
        counted = tl.sum(b_listed, 0)
        full, partial = full + counted % _PARTIAL, partial + counted // _PARTIAL
    tl.store(tile_counts + 2 * pid.to(tl.int64), full)
    tl.store(tile_counts + 2 * pid.to(tl.int64) + 1, full + partial)
