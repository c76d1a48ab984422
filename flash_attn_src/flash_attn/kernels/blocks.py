"""Block-sparse attention in the kernels of whole sequences: which tiles a program visits, and what it hides in them.

`tile_lists` lists the tiles of each block of queries (for dk and dv: of each block of keys), first the tiles that need
no mask, then the others. A loop over keys becomes a loop over the places of a list, so that
both loops of a kernel keep their form.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def listed_bounds(counts, row, BLOCK: tl.constexpr):
    """(lo, full_lo, full_hi, hi) as `common.key_bounds` gives them, of places in the list `row` times BLOCK.

    counts: int32 (lists, 2), the tiles without a mask and all tiles of a list.
    """
    full = tl.load(counts + 2 * row)
    every = tl.load(counts + 2 * row + 1)
    return 0, 0, full * BLOCK, every * BLOCK


@triton.jit
def listed(tiles, i, BLOCK: tl.constexpr):
    """The first key (or query) of the tile at place i // BLOCK of a list. tiles: int32, points at the list.

    A loop loads a place ahead, because the addresses of its keys wait for it. So a list has a place behind its last
    tile: a load with a mask would be a branch in the loop.
    """
    return tl.load(tiles + i // BLOCK) * BLOCK


@triton.jit
def hide_blocks(x, fill, rows, cols, bounds, scores):
    """x where the block mask lets the queries `rows` see the keys `cols`, else fill.

    One of rows and cols is the first position of a tile that lies in one block of the mask, so the load is a vector and
    no tile. Positions outside of the sequence read the last block, because another mask hides them.
    """
    block_rows = tl.minimum(rows, bounds.seqlen_q - 1) // scores.block_q
    block_cols = tl.minimum(cols, bounds.seqlen_k - 1) // scores.block_k
    p_seen = scores.bias + scores.bias_offset + block_rows * scores.bias_stride + block_cols
    return tl.where(tl.load(p_seen) != 0, x, fill)
