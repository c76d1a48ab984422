"""The lists of tiles that the attention kernels of kind `blocks` visit, made from a mask on the device at each call.

One program makes one list: the tiles of keys of a tile of queries, or, for dk and dv, the tiles of queries of a tile of
keys. First come the tiles in which every query sees every key, then the tiles with a key to hide.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import operation
from flash_attn.kernels.common import RUNTIME_ARGUMENTS

# No block of a mask begins or ends inside of so many queries or keys, counted from a multiple of it.
_PIECE = tl.constexpr(operation.SPARSE_BLOCK)


@triton.jit
def _in_blocks(p_seen, stride, first_m, last_m, first_n, last_n, block_m, block_n, block_q, block_k, real):
    """(whether a block of each tile is visible, whether every block of it is), int1 [TILES] both."""
    some = first_m < 0  # [TILES]
    whole = first_m >= 0  # [TILES]
    for r in tl.range(0, block_m, _PIECE):
        rows = tl.minimum(first_m + r, last_m) // block_q  # [TILES]
        for c in tl.range(0, block_n, _PIECE):
            cols = tl.minimum(first_n + c, last_n) // block_k  # [TILES]
            b_seen = tl.load(p_seen + rows.to(tl.int64) * stride + cols, mask=real, other=0) != 0  # [TILES]
            some = some | b_seen
            whole = whole & b_seen
    return some, whole


@triton.jit
def _sums_before(x, SIZE: tl.constexpr):
    """The sum of the elements before each element of x [SIZE], by a reduction, because SIZE is small."""
    place = tl.arange(0, SIZE)
    return tl.sum(tl.where(place[None, :] < place[:, None], x[None, :], 0), 1)


@triton.jit(do_not_specialize=RUNTIME_ARGUMENTS)
def list_tiles(
    tiles, tile_counts, block_mask,
    stride_sb, stride_sh, stride_sm,
    nheads, seqlen_q, seqlen_k, window_left, window_right,
    block_m, block_n, block_q, block_k, lists, list_length, by_keys,
    BLOCK_N: tl.constexpr,
):  # fmt: skip
    """One program: one of the `lists` lists of a plane. Grid: lists * planes, a plane is a head of a batch entry.

    nheads, and the strides of a batch entry and a head, are those of the mask: 1 and 0 where one serves all.
    block_m, block_n: the tile of the attention kernel, in queries and keys. block_q, block_k: a block of the mask.
    by_keys: 1 for a list of tiles of queries for each tile of keys, 0 for the other way round.
    tiles: int32 (planes, lists, list_length), a place more than a list has tiles. tile_counts: int32 (planes, lists,
    2), how many tiles need no mask, and all of them.
    """
    pid = tl.program_id(0)
    outer, plane = pid % lists, pid // lists
    batch64, head64 = (plane // nheads).to(tl.int64), (plane % nheads).to(tl.int64)
    p_seen = block_mask + (batch64 * stride_sb + head64 * stride_sh)
    p_tiles = tiles + pid.to(tl.int64) * list_length
    shift, most = seqlen_k - seqlen_q, list_length - 1
    counted = 0
    for turn in tl.static_range(2):  # tiles without a mask, then the others
        for start in tl.range(0, most, BLOCK_N):
            inner = start + tl.arange(0, BLOCK_N)  # [BLOCK_N]
            real = inner < most  # [BLOCK_N]
            m, n = tl.where(by_keys != 0, inner, outer), tl.where(by_keys != 0, outer, inner)
            first_m, first_n = m * block_m, n * block_n  # [BLOCK_N] both
            last_m = tl.minimum(first_m + block_m, seqlen_q) - 1
            last_n = tl.minimum(first_n + block_n, seqlen_k) - 1
            some = (first_n <= last_m + shift + window_right) & (last_n >= first_m + shift - window_left)
            whole = (last_n <= first_m + shift + window_right) & (first_n >= last_m + shift - window_left)
            # A loop without a mask loads whole tiles. A tile of queries past the last query is not loaded in a loop
            # over keys, and keys past the last key need the mask in both.
            whole = whole & (first_n + block_n <= seqlen_k) & ((by_keys == 0) | (first_m + block_m <= seqlen_q))
            b_some, b_whole = _in_blocks(
                p_seen, stride_sm, first_m, last_m, first_n, last_n, block_m, block_n, block_q, block_k, real
            )
            some, whole = some & b_some, whole & b_whole
            listed = (real & some & (whole if turn == 0 else whole == 0)).to(tl.int32)  # [BLOCK_N]
            tl.store(p_tiles + counted + _sums_before(listed, BLOCK_N), inner, mask=listed != 0)
            counted += tl.sum(listed, 0)
        tl.store(tile_counts + 2 * pid.to(tl.int64) + turn, counted)
