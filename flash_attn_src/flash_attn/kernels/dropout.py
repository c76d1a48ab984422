"""Dropout in the kernels: the random number of a score depends only on its head, row and column."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _philox(a, b, c, d, seed):
    """Four 32-bit words of Philox-4x32 for a counter (a, b, c, d) and a key of 64 bits.

    Seven rounds pass BigCrush (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011, table 2).
    """
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        # A 64-bit product is one instruction for both halves.
        first = a.to(tl.uint64) * 0xD2511F53
        second = c.to(tl.uint64) * 0xCD9E8D57
        a = (second >> 32).to(tl.uint32) ^ b ^ low
        b = second.to(tl.uint32)
        c = (first >> 32).to(tl.uint32) ^ d ^ high
        d = first.to(tl.uint32)
        low += 0x9E3779B9
        high += 0xBB67AE85
    return a, b, c, d


@triton.jit
def _spread(
    b_word, ROWS: tl.constexpr, COLS: tl.constexpr, PAIR: tl.constexpr, LOW: tl.constexpr, OUTER: tl.constexpr,
    GAP: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """The word of a Philox call at each score that the call serves, [ROWS, COLS]."""
    ACROSS: tl.constexpr = COLS // (OUTER * GAP * INNER)
    b_word = tl.reshape(b_word, (ROWS // (PAIR * LOW), 1, LOW, ACROSS, 1, GAP, 1))
    b_word = tl.broadcast_to(b_word, (ROWS // (PAIR * LOW), PAIR, LOW, ACROSS, OUTER, GAP, INNER))
    return tl.reshape(b_word, (ROWS, COLS))


@triton.jit
def keep_mask(
    rng_state, p_dropout, plane, first_row, first_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr, USE_TRANSPOSE: tl.constexpr,
):  # fmt: skip
    """The keep mask of a tile, int1 [ROWS, COLS], with USE_TRANSPOSE [COLS, ROWS].

    It is Philox of (seed, offset) in rng_state, a pure function of plane (batch entry and head), row and column. So
    every kernel and every tiling of a target draws the same mask.

    One Philox call serves sixteen scores. DROPOUT_BITS_SHARED has the bits in which the columns of these scores differ:
    four bits, or three bits, and then their rows differ in the lowest bit of DROPOUT_BITS_SHARED. The highest two bits
    choose one of the call's four words for a score. The score rotates that word by a byte of its own and compares all
    32 bits. So p_dropout is exact to 2^-24, and the bits that two scores of a word share decide only one score in 256.

    Where DROPOUT_BITS_SHARED has the bits that a target's matrix instructions keep in one thread, threads exchange
    nothing, and the word of a score is known when the kernel is compiled. With USE_TRANSPOSE a thread holds scores of
    many calls. Each word is then drawn once and goes through shared memory.
    """
    # The bits of DROPOUT_BITS_SHARED as columns: groups of INNER neighbours, OUTER groups that are GAP * INNER apart.
    LOW: tl.constexpr = DROPOUT_BITS_SHARED & -DROPOUT_BITS_SHARED
    SECOND: tl.constexpr = (DROPOUT_BITS_SHARED - LOW) & (LOW - DROPOUT_BITS_SHARED)
    THIRD: tl.constexpr = (DROPOUT_BITS_SHARED - LOW - SECOND) & (LOW + SECOND - DROPOUT_BITS_SHARED)
    FOURTH: tl.constexpr = DROPOUT_BITS_SHARED - LOW - SECOND - THIRD
    PAIR: tl.constexpr = 1 if FOURTH else 2
    HIGH: tl.constexpr = FOURTH if FOURTH else THIRD
    MIDDLE: tl.constexpr = THIRD if FOURTH else SECOND
    INNER: tl.constexpr = (DROPOUT_BITS_SHARED + 1) & ~DROPOUT_BITS_SHARED
    REST: tl.constexpr = DROPOUT_BITS_SHARED - INNER + 1
    GAP: tl.constexpr = (REST & -REST) // INNER if REST else 1
    SPAN: tl.constexpr = 16 // PAIR * GAP
    WIDTH: tl.constexpr = COLS if COLS < SPAN else SPAN
    OUTER: tl.constexpr = WIDTH // (GAP * INNER)
    row = tl.arange(0, ROWS // PAIR)
    col = tl.arange(0, COLS // (OUTER * INNER))
    rows = (first_row + row // LOW * (PAIR * LOW) + row % LOW)[:, None]  # [ROWS // PAIR, 1]
    cols = (first_col // SPAN * SPAN + col // GAP * SPAN + col % GAP * INNER)[None, :]  # [1, COLS // (OUTER * INNER)]
    zero = (rows + cols) * 0  # [ROWS // PAIR, COLS // (OUTER * INNER)]
    a, b, c, d = _philox(
        (cols + zero).to(tl.uint32),
        (rows + zero).to(tl.uint32),
        (plane + zero).to(tl.uint32),
        (tl.load(rng_state + 1).to(tl.int32) + zero).to(tl.uint32),
        tl.load(rng_state).to(tl.uint64),
    )
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    if USE_TRANSPOSE and COLS >= SPAN:
        # One tensor of words, because the compiler would compute four tensors a second time in another layout.
        b_words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS // PAIR, COLS // SPAN, GAP, 4, 1))
        b_words = tl.broadcast_to(b_words, (ROWS // PAIR, COLS // SPAN, GAP, 4, 4 // PAIR))
        b_words = tl.permute(tl.reshape(b_words, (ROWS // PAIR, COLS // SPAN, GAP, OUTER, INNER)), (0, 1, 3, 2, 4))
        b_words = tl.reshape(b_words, (ROWS // (PAIR * LOW), 1, LOW, COLS))
        b_word = tl.reshape(tl.broadcast_to(b_words, (ROWS // (PAIR * LOW), PAIR, LOW, COLS)), (ROWS, COLS))
    else:
        a = _spread(a, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        b = _spread(b, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        c = _spread(c, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        d = _spread(d, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        if COLS < SPAN:
            col += first_col
        b_middle = (col & MIDDLE) != 0
        b_word = tl.where((col & HIGH) != 0, tl.where(b_middle, d, c), tl.where(b_middle, b, a))
    b_half = (col & SECOND) if FOURTH else (row & LOW)
    b_turn = (tl.where(b_half != 0, 16, 0) + tl.where((col & LOW) != 0, 8, 0)).to(tl.uint32)
    b_number = (b_word << b_turn) | (b_word >> ((32 - b_turn) & 31))  # [ROWS, COLS]
    threshold = (tl.full((1, 1), 4294967296.0, tl.float32) * p_dropout).to(tl.uint32)
    b_keep = b_number >= threshold  # [ROWS, COLS]
    return tl.trans(b_keep) if USE_TRANSPOSE else b_keep


@triton.jit
def apply_dropout(b_p, b_keep, p_dropout):
    """b_p where b_keep, else 0.

    The 0 is a variable. With a constant the compiler first casts b_p to 16 bits for the next product, and then unpacks
    and packs 16-bit numbers around every selection.
    """
    return tl.where(b_keep, b_p, p_dropout - p_dropout)
