"""Tiles in the kernels: reading, multiplying and writing rows of a matrix.

A tile has a power of two of columns. Head dims between two of these are served by pairs of tiles, BLOCK_D columns and
the TAIL after them, so that dim 96 does the work of 64 + 32 columns, not of 128. Where TAIL is 0 the second of a pair
repeats the first and no code uses it.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels import flags

PAGE_PER_KEY = tl.constexpr(flags.PAGE_PER_KEY)
PAGE_PER_BLOCK = tl.constexpr(flags.PAGE_PER_BLOCK)


@triton.jit
def load_places(base, places, inside, head_dim, BLOCK_D: tl.constexpr, FLIP: tl.constexpr):
    """Rows `places` elements from `base` as (rows, BLOCK_D); zeros where they are not inside, and beyond `head_dim`.

    FLIP: as (BLOCK_D, rows), for a product with the rows. Flipped after the load they would come to MFMA from shared
    memory with 16 lanes on one bank: Triton's pipeline lays out what a product takes as it was loaded.
    """
    offs_d = tl.arange(0, BLOCK_D)
    if FLIP:
        pointers = base + (offs_d[:, None] + places[None, :])
        mask = (offs_d[:, None] < head_dim) & inside[None, :]
    else:
        pointers = base + (places[:, None] + offs_d[None, :])
        mask = inside[:, None] & (offs_d[None, :] < head_dim)
    return tl.load(pointers, mask=mask, other=0.0)


@triton.jit
def load_tile(base, start, offsets, stride, limit, head_dim, BLOCK_D: tl.constexpr, FLIP: tl.constexpr = False):
    """Rows start + offsets of a matrix by `load_places`; zeros beyond row `limit` and column `head_dim`."""
    base += start * stride.to(tl.int64)
    return load_places(base, offsets * stride, start + offsets < limit, head_dim, BLOCK_D, FLIP)


@triton.jit
def held_columns(head_dim, VEC: tl.constexpr, BLOCK_D: tl.constexpr):
    """Columns 0 .. BLOCK_D - 1 where those beyond head_dim repeat its last VEC, for `load_rows`."""
    offs_d = tl.arange(0, BLOCK_D)
    return tl.minimum(offs_d // VEC * VEC, head_dim - VEC) + offs_d % VEC


@triton.jit
def load_rows(base, start, offsets, stride, columns, FLIP: tl.constexpr = False):
    """Rows start + offsets of a matrix that all exist, without a mask. Columns beyond the head dim repeat others:
    they meet zeros in a product, or make columns of a result that are never stored. FLIP as in `load_places`."""
    base += start * stride.to(tl.int64)
    if FLIP:
        pointers = base + (columns[:, None] + offsets[None, :] * stride)
    else:
        pointers = base + (offsets[:, None] * stride + columns[None, :])
    return tl.load(pointers)


@triton.jit
def store_tile(base, tile, offsets, stride, limit, head_dim, BLOCK_D: tl.constexpr):
    """Stores rows `offsets` of a tile, in the element type of `base`, up to row `limit` and column `head_dim`."""
    offs_d = tl.arange(0, BLOCK_D)
    inside = (offsets[:, None] < limit) & (offs_d[None, :] < head_dim)
    tl.store(base + (offsets[:, None] * stride + offs_d[None, :]), tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_pair(
    base, start, offsets, stride, limit, head_dim, columns, tail_columns,
    BLOCK_D: tl.constexpr, TAIL: tl.constexpr, MASK: tl.constexpr, FLIP: tl.constexpr = False,
):  # fmt: skip
    """A pair of tiles by `load_tile` with MASK, which needs no columns, else by `load_rows`."""
    if MASK:
        tile = load_tile(base, start, offsets, stride, limit, head_dim, BLOCK_D, FLIP)
    else:
        tile = load_rows(base, start, offsets, stride, columns, FLIP)
    tail = tile
    if TAIL:
        if MASK:
            tail = load_tile(base + BLOCK_D, start, offsets, stride, limit, head_dim - BLOCK_D, TAIL, FLIP)
        else:
            tail = load_rows(base + BLOCK_D, start, offsets, stride, tail_columns, FLIP)
    return tile, tail


@triton.jit
def held_pair(head_dim, VEC: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """The columns of a pair for `load_rows`, each from its own first."""
    columns = held_columns(head_dim, VEC, BLOCK_D)
    tail_columns = columns
    if TAIL:  # for head dims above BLOCK_D alone
        columns = tl.arange(0, BLOCK_D)
        tail_columns = held_columns(head_dim - BLOCK_D, VEC, TAIL)
    return columns, tail_columns


@triton.jit
def load_paged_pair(
    pages, table, rows, leftpad, page_size, stride_page, stride, limit, head_dim,
    BLOCK_D: tl.constexpr, TAIL: tl.constexpr, FLIP: tl.constexpr = False,
):  # fmt: skip
    """A pair of rows of a sequence whose pages a row of the block table names; zeros beyond `limit` and `head_dim`.
    Row 0 comes after the `leftpad` rows that start the first page. FLIP as in `load_places`."""
    inside = rows < limit
    place = rows + leftpad
    page = tl.load(table + place // page_size, mask=inside, other=0)
    places = page.to(tl.int64) * stride_page + (place % page_size) * stride
    tile = load_places(pages, places, inside, head_dim, BLOCK_D, FLIP)
    tail = tile
    if TAIL:
        tail = load_places(pages + BLOCK_D, places, inside, head_dim - BLOCK_D, TAIL, FLIP)
    return tile, tail


@triton.jit
def zero_pair(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """Accumulators of a pair, fp32."""
    acc = tl.zeros((ROWS, BLOCK_D), tl.float32)
    tail = acc
    if TAIL:
        tail = tl.zeros((ROWS, TAIL), tl.float32)
    return acc, tail


@triton.jit
def dot_pair(a, a_tail, b, b_tail, TAIL: tl.constexpr):
    """Rows of a times rows of b, which is a flipped pair, over the columns of both."""
    product = tl.dot(a, b, input_precision="ieee")
    if TAIL:
        product = tl.dot(a_tail, b_tail, product, input_precision="ieee")
    return product


@triton.jit
def add_product(weights, tile, tail, acc, acc_tail, TAIL: tl.constexpr):
    """acc + weights times a pair's rows."""
    acc = tl.dot(weights, tile, acc, input_precision="ieee")
    if TAIL:
        acc_tail = tl.dot(weights, tail, acc_tail, input_precision="ieee")
    return acc, acc_tail


@triton.jit
def store_pair(base, tile, tail, offsets, stride, limit, head_dim, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """`store_tile` of a pair."""
    store_tile(base, tile, offsets, stride, limit, head_dim, BLOCK_D)
    if TAIL:
        store_tile(base + BLOCK_D, tail, offsets, stride, limit, head_dim - BLOCK_D, TAIL)


@triton.jit
def clear_outside(
    base, value, stride, start, length, total, is_first, is_last, first, step, head_dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr,
):  # fmt: skip
    """Packed rows outside of every sequence become `value`: those before the first one are cleared by its programs,
    those after the last one, to row `total`, by that one's. A program starts with the `first` of them, and goes on
    `step` rows further: together they take each row once."""
    before = tl.where(is_first, start, 0)
    after = tl.where(is_last, total - start - length, 0)
    for i in tl.range(first, before + after, step):
        row = i + tl.arange(0, ROWS)
        inside = row < before + after
        row = tl.where(row < before, row, row - before + start + length)
        rows = base + row.to(tl.int64)[:, None] * stride
        filled = tl.full((ROWS, BLOCK_D), value, base.dtype.element_ty)
        offs_d = tl.arange(0, BLOCK_D)[None, :]
        tl.store(rows + offs_d, filled, mask=inside[:, None] & (offs_d < head_dim))
        if TAIL:
            offs_t = BLOCK_D + tl.arange(0, TAIL)[None, :]
            filled = tl.full((ROWS, TAIL), value, base.dtype.element_ty)
            tl.store(rows + offs_t, filled, mask=inside[:, None] & (offs_t < head_dim))


@triton.jit
def _deep_width(head_dim, BLOCK_D: tl.constexpr, TAIL: tl.constexpr):
    """How far a product goes. Of a pair it is not known to the compiler, which would unroll the six pieces of dim 96
    into more registers than there are (gfx1100: 318 of them in memory)."""
    width = BLOCK_D
    if TAIL:
        width = head_dim
    return width


@triton.jit
def deep_dot(
    a, a_start, a_offsets, a_stride, a_limit, b, b_start, b_offsets, b_stride, b_limit, head_dim,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Rows of a times rows of b, transposed, over the head dim in pieces of DEPTH that are read from memory.

    For targets whose registers cannot hold a whole operand: without matrix cores a thread keeps entire rows.
    """
    product = tl.zeros((ROWS, COLS), tl.float32)
    for d in tl.range(0, _deep_width(head_dim, BLOCK_D, TAIL), DEPTH):
        a_part = load_tile(a + d, a_start, a_offsets, a_stride, a_limit, head_dim - d, DEPTH)
        b_part = load_tile(b + d, b_start, b_offsets, b_stride, b_limit, head_dim - d, DEPTH)
        product = tl.dot(a_part, tl.trans(b_part), product, input_precision="ieee")
    return product


@triton.jit
def deep_row_sums(
    a, a_stride, b, b_stride, offsets, limit, head_dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """Sums of a * b over each of their rows `offsets`, in pieces as `deep_dot`."""
    sums = tl.zeros((ROWS,), tl.float32)
    for d in tl.range(0, _deep_width(head_dim, BLOCK_D, TAIL), DEPTH):
        a_part = load_tile(a + d, 0, offsets, a_stride, limit, head_dim - d, DEPTH)
        b_part = load_tile(b + d, 0, offsets, b_stride, limit, head_dim - d, DEPTH)
        sums += tl.sum(a_part.to(tl.float32) * b_part.to(tl.float32), 1)
    return sums


@triton.jit
def deep_dot_paged(
    a, a_offsets, a_stride, a_limit, pages, table, rows, leftpad, page_size, stride_page, stride, limit, head_dim,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_D: tl.constexpr, TAIL: tl.constexpr, DEPTH: tl.constexpr,
):  # fmt: skip
    """`deep_dot` of rows of a with rows of a paged cache."""
    product = tl.zeros((ROWS, COLS), tl.float32)
    for d in tl.range(0, _deep_width(head_dim, BLOCK_D, TAIL), DEPTH):
        a_part = load_tile(a + d, 0, a_offsets, a_stride, a_limit, head_dim - d, DEPTH)
        b_part, _ = load_paged_pair(
            pages + d, table, rows, leftpad, page_size, stride_page, stride, limit, head_dim - d, DEPTH, 0
        )
        product = tl.dot(a_part, tl.trans(b_part), product, input_precision="ieee")
    return product
