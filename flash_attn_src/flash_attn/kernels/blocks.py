"""Masks of blocks, ranges and ids in the kernels of whole sequences: the tiles that a program visits, and what it hides
in them.

`tile_lists` lists the tiles of each block of queries (for dk and dv: of each block of keys): from the front those that
need no mask, from the back the others. A loop over keys becomes a loop over the places of a list, so that both loops of
a kernel keep their form.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.common import (
    HAS_BITS,
    HAS_BLOCKS,
    HAS_HIDDEN,
    HAS_IDS,
    HAS_RANGES,
    PARTIAL_BLOCK,
    WHOLE_BLOCK,
)


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
def listed_masked(tiles, i, full_hi, list_length, BLOCK: tl.constexpr):
    """As `listed`, where the places from full_hi // BLOCK on are those at the list's back. Its last place is empty."""
    place = i // BLOCK
    return tl.load(tiles + tl.where(i < full_hi, place, list_length - 2 + full_hi // BLOCK - place)) * BLOCK


@triton.jit
def mask_parts(
    key_ranges, ids_q, ids_k, hidden_queries, ranges_b, ranges_h, ids_qb, ids_kb, hidden_b, hidden_h, batch64, head
):  # fmt: skip
    """The pointers of a head to the parts of a mask that are no blocks. Strides are in elements.

    key_ranges: int32 (batch, nheads, seqlen_q, 2, 2), two ranges of keys for each query: the first key, and the key
    behind the last one. Or int32 (batch, nheads, seqlen_q, words), where bit j % 32 of word j // 32 shows key j.
    ids_q (batch, seqlen_q), ids_k (batch, seqlen_k): int32, a query sees keys with its id.
    hidden_queries: int32 (batch, nheads, seqlen_k, 2, 2), two ranges of queries for each key, which do not see it.
    """
    p_ranges = key_ranges + (batch64 * ranges_b + head * ranges_h.to(tl.int64))
    p_hidden = hidden_queries + (batch64 * hidden_b + head * hidden_h.to(tl.int64))
    return p_ranges, ids_q + batch64 * ids_qb, ids_k + batch64 * ids_kb, p_hidden


@triton.jit
def load_ranges(p_ranges, rows):
    """The two ranges of the queries, or keys, `rows`: start and end of the one, start and end of the other."""
    p_row = p_ranges + rows * 4
    return tl.load(p_row), tl.load(p_row + 1), tl.load(p_row + 2), tl.load(p_row + 3)


@triton.jit
def hide_unseen(
    x, fill, rows, cols, block_rows, block_cols, first_col, bounds, scores, BY_KEYS: tl.constexpr,
    WITH_BITS: tl.constexpr,
):  # fmt: skip
    """x where the window and all parts of the mask let the queries `rows` see the keys `cols`, else fill. A whole block
    shows its keys whatever the window and the other parts hide.

    block_rows and block_cols are positions of the blocks: of each query and the first key of the tile, BY_KEYS of the
    first query and each key. The tile lies in one block along the other axis, so the load of blocks is a vector and no
    tile, and the window is two bounds of each query or key, as in `scores.apply_mask`. Positions outside of the
    sequence read the last one, because the key's bound hides them, and rows past the last query are never stored.
    first_col: the first key of the tile. WITH_BITS: whether the mask may have bits.
    """
    last_row, last_col = bounds.seqlen_q - 1, bounds.seqlen_k - 1
    at_row = tl.minimum(block_rows, last_row) // scores.block_q
    at_col = tl.minimum(block_cols, last_col) // scores.block_k
    p_seen = scores.bias + scores.bias_offset + at_row * scores.bias_stride + at_col
    b_seen = tl.load(p_seen, mask=(scores.flags & HAS_BLOCKS) != 0, other=PARTIAL_BLOCK)
    whole = b_seen == WHOLE_BLOCK
    if BY_KEYS:
        first = tl.where(whole, 0, cols - bounds.shift - bounds.window_right)
        last = tl.where(whole, last_row, cols - bounds.shift + bounds.window_left)
        last = tl.where((b_seen != 0) & (cols <= last_col), last, -1)
        x = tl.where(rows <= last, x, fill)
        x = tl.where(rows >= first, x, fill)
    else:
        first = tl.where(whole, 0, rows + bounds.shift - bounds.window_left)
        last = tl.where(whole, last_col, tl.minimum(rows + bounds.shift + bounds.window_right, last_col))
        last = tl.where(b_seen != 0, last, -1)
        x = tl.where(cols <= last, x, fill)
        x = tl.where(cols >= first, x, fill)
    if WITH_BITS:
        if scores.flags & HAS_BITS:
            # A few words of each query, because a load for each score takes longer.
            words, place = (bounds.seqlen_k + 31) // 32, first_col // 32
            p_words = scores.key_ranges + tl.minimum(rows, last_row) * words.to(tl.int64)
            b_word = tl.load(p_words + tl.minimum(place, words - 1))
            WORDS: tl.constexpr = (x.shape[0] if BY_KEYS else x.shape[1]) // 32
            for i in tl.static_range(1, WORDS):
                b_word = tl.where(cols // 32 < place + i, b_word, tl.load(p_words + tl.minimum(place + i, words - 1)))
            x = tl.where((((b_word >> (cols % 32)) & 1) != 0) | whole, x, fill)
    if scores.flags & HAS_RANGES:
        start, end, other_start, other_end = load_ranges(scores.key_ranges, tl.minimum(rows, last_row))
        inside = ((cols >= start) & (cols < end)) | ((cols >= other_start) & (cols < other_end))
        x = tl.where(inside | whole, x, fill)
    if scores.flags & HAS_IDS:
        b_id_q = tl.load(scores.ids_q + tl.minimum(rows, last_row))
        b_id_k = tl.load(scores.ids_k + tl.minimum(cols, last_col))
        x = tl.where((b_id_q == b_id_k) | whole, x, fill)
    if scores.flags & HAS_HIDDEN:
        start, end, other_start, other_end = load_ranges(scores.hidden_queries, tl.minimum(cols, last_col))
        inside = ((rows >= start) & (rows < end)) | ((rows >= other_start) & (rows < other_end))
        x = tl.where(inside & (whole == 0), fill, x)
    return x
