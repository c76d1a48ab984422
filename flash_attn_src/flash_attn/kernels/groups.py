"""Groups of arguments: named tuples that kernels pass to device functions. Triton compiles them to the code of their
fields.

A kernel itself takes a flat list. Triton specializes the numbers in a tuple even if `do_not_specialize` names the tuple
(3.3 to 3.7), and would compile the kernel again for each value of a stride.

Groups of constants have names in capitals. Build such a group in the call that it is passed to: Triton turns the
constants of an assigned tuple into run-time values. No field may be None, because Triton 3.3 refuses it.
"""

from __future__ import annotations

from typing import Any, NamedTuple


class Rows(NamedTuple):
    """A tensor with its stride: the rows of one head of q, k, v or dout.

    base: points at row 0. stride: elements from a row to the next one. limit, head_dim: how many rows and columns
    exist. offs_d, offs_t: the columns of a pair of tiles, for `tiles.load_unmasked`.
    """

    base: Any
    stride: Any
    limit: Any
    head_dim: Any
    offs_d: Any
    offs_t: Any


class Heads(NamedTuple):
    """A tensor of all batch entries and heads: where it begins, and its steps from an entry, a row, a head to the next
    one."""

    base: Any
    stride_b: Any
    stride_m: Any
    stride_h: Any


class Bounds(NamedTuple):
    """The lengths of a sequence and its window. Query i sees the keys i + shift - window_left to i + shift +
    window_right."""

    seqlen_q: Any
    seqlen_k: Any
    shift: Any
    window_left: Any
    window_right: Any


class KeyTiles(NamedTuple):
    """The pairs of tiles of k and v of a block of keys."""

    k: Any
    k_tail: Any
    v: Any
    v_tail: Any


class RowStats(NamedTuple):
    """Pointers to the numbers of each query of a head: softmax_lse, delta, and `backward.lost_by_rounding`."""

    lse: Any
    delta: Any
    lost: Any


class Factors(NamedTuple):
    """Powers of two that dk and dv multiply dout, dout v^T and delta by, None for nothing: `backward`."""

    dout: Any
    dp: Any
    delta: Any


class Pages(NamedTuple):
    """A page table: `table` points at the sequence's row. Row 0 of a sequence is row `leftpad` of its first page.

    size: rows of a page. stride_k, stride_v: elements from a page to the next one, int64.
    """

    table: Any
    size: Any
    leftpad: Any
    stride_k: Any
    stride_v: Any


class Scores(NamedTuple):
    """Score modifiers of one head. `ScoreMod` says which of them a kernel has; the other fields are not read.

    slope: of ALiBi. plane: the number of the head in the batch, for dropout. bias: points at the tensor; bias_offset:
    elements to the head's first row, int64; bias_stride: elements from a row to the next one. flags: of the kernel.
    block_q, block_k: the queries and keys of an element of a block mask, which takes the place of the bias. key_ranges,
    ids_q, ids_k, hidden_queries: point at the first query or key of the head: see `blocks`.
    """

    scale: Any
    softcap: Any
    slope: Any
    p_dropout: Any
    rng_state: Any
    plane: Any
    bias: Any
    bias_offset: Any
    bias_stride: Any
    flags: Any
    block_q: Any
    block_k: Any
    key_ranges: Any
    ids_q: Any
    ids_k: Any
    hidden_queries: Any


class ScoreMod(NamedTuple):
    """The constants of score modifiers.

    SCORE_MOD: see `operation.FORWARD_KINDS`. HAS_MASK: see `forward.attn_fwd`. DROPOUT_BITS_SHARED: see
    `dropout.keep_mask`. USE_ANCHOR_DOT: see `scores.load_bias`.
    """

    SCORE_MOD: Any
    HAS_MASK: Any
    DROPOUT_BITS_SHARED: Any
    USE_ANCHOR_DOT: Any


class Tile(NamedTuple):
    """The sizes of a tile: queries, keys, columns of q and k, columns of v, and the columns that are multiplied at
    once.

    Columns are a pair of tiles: see `tiles`.
    """

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_D_TAIL: Any
    BLOCK_V: Any
    BLOCK_V_TAIL: Any
    BLOCK_K: Any


class Softmax(NamedTuple):
    """How weights are made: WEIGHT_SHIFT, NUM_PARTIAL_SUMS, LAZY_RESCALE, see `forward.attn_fwd`; BREAK_DOT_CHAIN, see
    `forward._attend_block`; ROUND_HALF_UP, see `common.cast`."""

    ROUND_HALF_UP: Any
    BREAK_DOT_CHAIN: Any
    NUM_PARTIAL_SUMS: Any
    WEIGHT_SHIFT: Any
    LAZY_RESCALE: Any


class PagedRows(NamedTuple):
    """Rows of one head of a cache.

    base: points at row 0 of page 0. stride: elements from a row to the next one; page_stride: to the next page, int64.
    head_dim: how many columns exist.
    """

    base: Any
    stride: Any
    head_dim: Any
    page_stride: Any


class CachePages(NamedTuple):
    """The page table of a cache: as `Pages`, with the numbers by which `decode` finds the page of a key.

    shift: pages are counted in units of 2 ** shift rows. inverse: one divided by the units of a page, fp32.
    """

    table: Any
    size: Any
    leftpad: Any
    shift: Any
    inverse: Any


class SeenKeys(NamedTuple):
    """The keys that each row of a tile sees: `first` to `last`, and its diagonal. real: the rows that exist. begin: no
    row sees a key before it."""

    real: Any
    diagonal: Any
    first: Any
    last: Any
    begin: Any


class QueryRows(NamedTuple):
    """Pointers to the rows of a tile of queries. bits: the same rows, where they have 16 bits over a cache in FP8.
    factor: these rows are multiplied by it."""

    rows: Any
    bits: Any
    factor: Any
    flags: Any


class CacheScores(NamedTuple):
    """Score modifiers of the rows of a tile. slope: of ALiBi, for each row."""

    scale: Any
    softcap: Any
    slope: Any


class CacheTile(NamedTuple):
    """The sizes of a tile, as `Tile`, without tails. HAS_CAST: see `fp8_cast.from_fp8`."""

    BLOCK_M: Any
    BLOCK_N: Any
    BLOCK_D: Any
    BLOCK_V: Any
    BLOCK_K: Any
    HAS_CAST: Any
