"""Tiles in the kernels: loading, multiplying and storing rows of a matrix.

The number of columns of a tile is a power of two. A pair of tiles, BLOCK_D columns and the BLOCK_D_TAIL columns after
them,
serves head dims between two powers of two: head dim 96 does the work of 64 + 32 columns, not of 128. Where BLOCK_D_TAIL
is 0 the second tile of a pair repeats the first and no code uses it.

Names: `p_x` points to elements of x, `b_x` is a tile of x (b for block), `offs_x` are offsets along an axis, `pos_x`
are positions in a sequence.
"""

from __future__ import annotations

import triton
import triton.language as tl

from flash_attn.kernels.groups import Rows


@triton.jit
def load_at(base, row_offsets, inside, head_dim, BLOCK_D: tl.constexpr, USE_TRANSPOSE: tl.constexpr):
    """The rows that begin `row_offsets` elements after `base`, [rows, BLOCK_D].

    Zeros in rows that are not `inside` and in columns beyond `head_dim`.
    USE_TRANSPOSE: [BLOCK_D, rows], for a product with the rows. A transposition after the load would cost bank
    conflicts, 16 lanes on one bank for MFMA, because Triton's pipeline keeps a tile in shared memory in the layout of
    its load.
    """
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    if USE_TRANSPOSE:
        p_tile = base + (offs_d[:, None] + row_offsets[None, :])
        mask = (offs_d[:, None] < head_dim) & inside[None, :]
    else:
        p_tile = base + (row_offsets[:, None] + offs_d[None, :])
        mask = inside[:, None] & (offs_d[None, :] < head_dim)
    return tl.load(p_tile, mask=mask, other=0.0)


@triton.jit
def load_tile(
    base, start, offsets, stride, limit, head_dim,
    BLOCK_D: tl.constexpr, USE_TRANSPOSE: tl.constexpr = False, begin=None,
):  # fmt: skip
    """Rows start + offsets of a matrix by `load_at`. Zeros beyond row `limit`, before row `begin` and beyond column
    `head_dim`."""
    base += start * stride.to(tl.int64)
    inside = start + offsets < limit
    if begin is not None:
        inside = inside & (start + offsets >= begin)
    return load_at(base, offsets * stride, inside, head_dim, BLOCK_D, USE_TRANSPOSE)


@triton.jit
def clamped_columns(head_dim, VEC: tl.constexpr, BLOCK_D: tl.constexpr, ASYNC_COPY: tl.constexpr = False):
    """The columns 0 to BLOCK_D - 1 for `load_unmasked`: columns beyond head_dim repeat its last VEC columns.

    ASYNC_COPY: the loads are copies straight to shared memory. For them AMD's compiler must use buffer instructions, so
    it must know that offsets are positive. It waits wrongly for the other instruction, `global_load_lds`.
    """
    last = head_dim - VEC
    if ASYNC_COPY:
        tl.assume(last >= 0)
        tl.assume(last < BLOCK_D)
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    return tl.minimum(offs_d // VEC * VEC, last) + offs_d % VEC


@triton.jit
def load_unmasked(base, start, offsets, stride, columns, USE_TRANSPOSE: tl.constexpr = False):
    """Rows start + offsets of a matrix, without a mask, because all of them exist.

    Columns beyond the head dim repeat other columns. They meet zeros in a product, or they make columns of a result
    that are never stored. USE_TRANSPOSE as in `load_at`.
    """
    base += start * stride.to(tl.int64)
    if USE_TRANSPOSE:
        p_tile = base + (columns[:, None] + offsets[None, :] * stride)
    else:
        p_tile = base + (offsets[:, None] * stride + columns[None, :])
    return tl.load(p_tile)


@triton.jit
def store_tile(base, b_tile, offsets, stride, limit, head_dim, BLOCK_D: tl.constexpr):
    """Stores a tile as rows `offsets`, in the element type of `base`, up to row `limit` and column `head_dim`."""
    offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
    inside = (offsets[:, None] < limit) & (offs_d[None, :] < head_dim)  # [rows, BLOCK_D]
    tl.store(base + (offsets[:, None] * stride + offs_d[None, :]), b_tile.to(base.dtype.element_ty), mask=inside)


@triton.jit
def load_pair(
    rows, start, offsets,
    BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr, USE_MASK: tl.constexpr, USE_TRANSPOSE: tl.constexpr = False,
    begin=None,
):  # fmt: skip
    """A pair of tiles, the rows start + offsets of `groups.Rows`: with USE_MASK by `load_tile`, else by
    `load_unmasked`."""
    if USE_MASK:  # [rows, BLOCK_D], with USE_TRANSPOSE [BLOCK_D, rows]
        b_tile = load_tile(
            rows.base, start, offsets, rows.stride, rows.limit, rows.head_dim, BLOCK_D, USE_TRANSPOSE, begin
        )
    else:
        b_tile = load_unmasked(rows.base, start, offsets, rows.stride, rows.offs_d, USE_TRANSPOSE)
    b_tail = b_tile
    if BLOCK_D_TAIL:
        if USE_MASK:
            b_tail = load_tile(
                rows.base + BLOCK_D, start, offsets, rows.stride, rows.limit, rows.head_dim - BLOCK_D, BLOCK_D_TAIL,
                USE_TRANSPOSE, begin,
            )  # fmt: skip
        else:
            b_tail = load_unmasked(rows.base + BLOCK_D, start, offsets, rows.stride, rows.offs_t, USE_TRANSPOSE)
    return b_tile, b_tail


@triton.jit
def clamped_pair(
    head_dim, VEC: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr, ASYNC_COPY: tl.constexpr = False
):  # fmt: skip
    """The columns of both tiles of a pair for `load_unmasked`, each counted from the first column of its tile."""
    offs_d = clamped_columns(head_dim, VEC, BLOCK_D, ASYNC_COPY and BLOCK_D_TAIL == 0)  # [BLOCK_D]
    offs_t = offs_d  # [BLOCK_D_TAIL]
    if BLOCK_D_TAIL:  # for head dims above BLOCK_D alone
        offs_d = tl.arange(0, BLOCK_D)  # [BLOCK_D]
        offs_t = clamped_columns(head_dim - BLOCK_D, VEC, BLOCK_D_TAIL, ASYNC_COPY)  # [BLOCK_D_TAIL]
    return offs_d, offs_t


@triton.jit
def load_paged_pair(
    rows, pages, stride_page, offsets,
    BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr, USE_TRANSPOSE: tl.constexpr = False, begin=None,
):  # fmt: skip
    """A pair of tiles of a sequence in pages (`groups.Pages`), with one page lookup per key.

    rows.base points at page 0. Zeros beyond rows.limit and rows.head_dim, and before row `begin`. USE_TRANSPOSE as in
    `load_at`.
    """
    inside = offsets < rows.limit  # [rows]
    if begin is not None:
        inside = inside & (offsets >= begin)
    position = offsets + pages.leftpad  # [rows]
    page = tl.load(pages.table + position // pages.size, mask=inside, other=0)  # [rows]
    row_offsets = page.to(tl.int64) * stride_page + (position % pages.size) * rows.stride  # [rows]
    # [rows, BLOCK_D], with USE_TRANSPOSE [BLOCK_D, rows]
    b_tile = load_at(rows.base, row_offsets, inside, rows.head_dim, BLOCK_D, USE_TRANSPOSE)
    b_tail = b_tile
    if BLOCK_D_TAIL:
        b_tail = load_at(rows.base + BLOCK_D, row_offsets, inside, rows.head_dim - BLOCK_D, BLOCK_D_TAIL, USE_TRANSPOSE)
    return b_tile, b_tail


@triton.jit
def zeros_pair(ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr):
    """The accumulators of a pair, fp32."""
    b_acc = tl.zeros((ROWS, BLOCK_D), tl.float32)  # [ROWS, BLOCK_D]
    b_tail = b_acc  # [ROWS, BLOCK_D_TAIL]
    if BLOCK_D_TAIL:
        b_tail = tl.zeros((ROWS, BLOCK_D_TAIL), tl.float32)  # [ROWS, BLOCK_D_TAIL]
    return b_acc, b_tail


@triton.jit
def rescaled(b_x, factor):
    """b_x times a power of two that its type holds, None for nothing."""
    return b_x if factor is None else b_x * factor.to(b_x.dtype)


@triton.jit
def dot_pair(b_a, b_a_tail, b_b, b_b_tail, BLOCK_D_TAIL: tl.constexpr):
    """Rows of a times rows of b, summed over the columns of both tiles of the pairs. b is a flipped pair."""
    b_product = tl.dot(b_a, b_b, input_precision="ieee")  # [rows of a, rows of b]
    if BLOCK_D_TAIL:
        b_product = tl.dot(b_a_tail, b_b_tail, b_product, input_precision="ieee")
    return b_product


@triton.jit
def add_product(b_weights, b_tile, b_tail, b_acc, b_acc_tail, BLOCK_D_TAIL: tl.constexpr):
    """The accumulators plus weights times a pair of tiles."""
    b_acc = tl.dot(b_weights, b_tile, b_acc, input_precision="ieee")
    if BLOCK_D_TAIL:
        b_acc_tail = tl.dot(b_weights, b_tail, b_acc_tail, input_precision="ieee")
    return b_acc, b_acc_tail


@triton.jit
def store_pair(
    base, b_tile, b_tail, offsets, stride, limit, head_dim, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr
):
    """`store_tile` for both tiles of a pair."""
    store_tile(base, b_tile, offsets, stride, limit, head_dim, BLOCK_D)
    if BLOCK_D_TAIL:
        store_tile(base + BLOCK_D, b_tail, offsets, stride, limit, head_dim - BLOCK_D, BLOCK_D_TAIL)


@triton.jit
def clear_outside(
    base, value, stride, start, length, total, is_first, is_last, first, step, head_dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr,
):  # fmt: skip
    """Sets packed rows outside of every sequence to `value`, and rows of the sequence without a program to NaN.

    The programs of the first sequence take the rows before it. The programs of the last sequence take the rows after
    it, up to row `total`. A program starts at row `first` of these rows and goes on in steps of `step` rows, so that
    the programs together take each row once.
    """
    before = tl.where(is_first, start, 0)
    after = tl.where(is_last, total - start - length, 0)
    for i in tl.range(first, before + after, step):
        offs_m = i + tl.arange(0, ROWS)  # [ROWS]
        inside = offs_m < before + after  # [ROWS]
        offs_m = tl.where(offs_m < before, offs_m, offs_m - before + start + length)
        _fill_rows(base, value, offs_m, inside, stride, head_dim, ROWS, BLOCK_D, BLOCK_D_TAIL)
    spoil_beyond(base, stride, start, length, first, step, head_dim, ROWS, BLOCK_D, BLOCK_D_TAIL)


@triton.jit
def spoil_beyond(
    base, stride, start, length, first, step, head_dim,
    ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr,
):  # fmt: skip
    """Sets the rows of a sequence that have no program in the grid to NaN: the rows from row `step` on.

    A sequence has such rows where the caller's longest length is too small. The host sizes the grid by that length,
    because only the device knows the true lengths.
    """
    for i in tl.range(first + step, length, step):
        offs_m = i + tl.arange(0, ROWS)  # [ROWS]
        _fill_rows(base, float("nan"), start + offs_m, offs_m < length, stride, head_dim, ROWS, BLOCK_D, BLOCK_D_TAIL)


@triton.jit
def _fill_rows(
    base, value, offs_m, inside, stride, head_dim, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr
):
    """Sets the rows offs_m that are `inside` to `value`."""
    p_rows = base + offs_m.to(tl.int64)[:, None] * stride  # [ROWS, 1]
    b_fill = tl.full((ROWS, BLOCK_D), value, base.dtype.element_ty)
    offs_d = tl.arange(0, BLOCK_D)[None, :]
    tl.store(p_rows + offs_d, b_fill, mask=inside[:, None] & (offs_d < head_dim))
    if BLOCK_D_TAIL:
        offs_t = BLOCK_D + tl.arange(0, BLOCK_D_TAIL)[None, :]
        b_fill = tl.full((ROWS, BLOCK_D_TAIL), value, base.dtype.element_ty)
        tl.store(p_rows + offs_t, b_fill, mask=inside[:, None] & (offs_t < head_dim))


@triton.jit
def _deep_width(head_dim, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr):
    """The width of a product. For a pair it is a run-time number, so that the compiler does not unroll the pieces.

    Unrolled, the six pieces of head dim 96 spilled 318 registers to scratch on gfx1100 (2026-11-22).
    """
    width = BLOCK_D
    if BLOCK_D_TAIL:
        width = head_dim
    return width


@triton.jit
def deep_dot(
    a, a_start, a_offsets, b, b_start, b_offsets,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr, BLOCK_K: tl.constexpr,
    USE_PEELING: tl.constexpr = False, a_factor=None, b_factor=None,
):  # fmt: skip
    """Rows of a times rows of b (`groups.Rows`), transposed, with the head dim loaded in pieces of BLOCK_K columns.

    a_factor, b_factor: see `rescaled`.

    For targets whose registers cannot hold a whole operand: without a matrix unit a thread keeps whole rows.
    USE_PEELING: one piece is multiplied after the loop. Triton then sees that the product goes into another one and
    lays both out alike, where it would pass the first through shared memory, two bytes at a time.
    """
    b_product = tl.zeros((ROWS, COLS), tl.float32)  # [ROWS, COLS]
    for d in tl.range(BLOCK_K if USE_PEELING else 0, _deep_width(a.head_dim, BLOCK_D, BLOCK_D_TAIL), BLOCK_K):
        b_a, b_b = _pieces(a, a_start, a_offsets, b, b_start, b_offsets, d, BLOCK_K)
        b_a, b_b = rescaled(b_a, a_factor), rescaled(b_b, b_factor)
        b_product = tl.dot(b_a, tl.trans(b_b), b_product, input_precision="ieee")
    if USE_PEELING:
        b_a, b_b = _pieces(a, a_start, a_offsets, b, b_start, b_offsets, 0, BLOCK_K)
        b_a, b_b = rescaled(b_a, a_factor), rescaled(b_b, b_factor)
        b_product = tl.dot(b_a, tl.trans(b_b), b_product, input_precision="ieee")
    return b_product


@triton.jit
def _pieces(a, a_start, a_offsets, b, b_start, b_offsets, d, BLOCK_K: tl.constexpr):
    """The columns d to d + BLOCK_K of rows of a and of b, [ROWS, BLOCK_K] and [COLS, BLOCK_K]."""
    b_a = load_tile(a.base + d, a_start, a_offsets, a.stride, a.limit, a.head_dim - d, BLOCK_K)  # [ROWS, BLOCK_K]
    b_b = load_tile(b.base + d, b_start, b_offsets, b.stride, b.limit, a.head_dim - d, BLOCK_K)  # [COLS, BLOCK_K]
    return b_a, b_b


@triton.jit
def deep_row_sums(
    a, b, offsets, ROWS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr, BLOCK_K: tl.constexpr
):
    """Sums of a * b over each of the rows `offsets`, in pieces like `deep_dot`."""
    b_sums = tl.zeros((ROWS,), tl.float32)  # [ROWS]
    for d in tl.range(0, _deep_width(a.head_dim, BLOCK_D, BLOCK_D_TAIL), BLOCK_K):
        b_a, b_b = _pieces(a, 0, offsets, b, 0, offsets, d, BLOCK_K)
        b_sums += tl.sum(b_a.to(tl.float32) * b_b.to(tl.float32), 1)
    return b_sums


@triton.jit
def deep_dot_paged(
    a, a_offsets, b, pages, stride_page, b_offsets,
    ROWS: tl.constexpr, COLS: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_D_TAIL: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """`deep_dot` of rows of a with rows of b in pages: see `load_paged_pair`."""
    b_product = tl.zeros((ROWS, COLS), tl.float32)  # [ROWS, COLS]
    for d in tl.range(0, _deep_width(a.head_dim, BLOCK_D, BLOCK_D_TAIL), BLOCK_K):
        b_a = load_tile(a.base + d, 0, a_offsets, a.stride, a.limit, a.head_dim - d, BLOCK_K)  # [ROWS, BLOCK_K]
        b_b, _ = load_paged_pair(  # [COLS, BLOCK_K]
            Rows(b.base + d, b.stride, b.limit, b.head_dim - d, b.offs_d, b.offs_t), pages, stride_page, b_offsets,
            BLOCK_K, 0,
        )  # fmt: skip
        b_product = tl.dot(b_a, tl.trans(b_b), b_product, input_precision="ieee")
    return b_product
