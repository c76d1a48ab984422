"""Dropout in the kernels: random numbers that depend on a score's place alone."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _philox(a, b, c, d, seed):
    """Four 32-bit words of Philox-4x32 for a counter (a, b, c, d) and a key of 64 bits. Seven rounds pass BigCrush
    (Salmon et al., Parallel random numbers: as easy as 1, 2, 3, 2011, table 2)."""
    low = seed.to(tl.uint32)
    high = (seed >> 32).to(tl.uint32)
    for _ in tl.static_range(7):
        # As 64-bit products: one instruction for both halves.
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
    word, ROWS: tl.constexpr, COLS: tl.constexpr, PAIR: tl.constexpr, LOW: tl.constexpr, OUTER: tl.constexpr,
    GAP: tl.constexpr, INNER: tl.constexpr,
):  # fmt: skip
    """A call's word at each score that the call serves, (ROWS, COLS)."""
    ACROSS: tl.constexpr = COLS // (OUTER * GAP * INNER)
    word = tl.reshape(word, (ROWS // (PAIR * LOW), 1, LOW, ACROSS, 1, GAP, 1))
    word = tl.broadcast_to(word, (ROWS // (PAIR * LOW), PAIR, LOW, ACROSS, OUTER, GAP, INNER))
    return tl.reshape(word, (ROWS, COLS))


@triton.jit
def keep_mask(
    rng_state, p_dropout, plane, first_row, first_col,
    ROWS: tl.constexpr, COLS: tl.constexpr, SHARED: tl.constexpr, FLIP: tl.constexpr,
):  # fmt: skip
    """Dropout's keep mask of a tile, (ROWS, COLS) of int1: Philox of (seed, offset) in rng_state, a pure function
    of plane (batch and head), row and column, so that every kernel and every tiling of a target draws the same.

    One Philox call serves sixteen scores. SHARED has the bits in which their columns differ: four, or three and then
    their rows differ in its lowest. A score takes the call's word that the highest two say, turned by a byte of its
    own. All 32 bits of that are compared: p_dropout is honoured to 2^-24, and what two scores of a word have in common
    decides one in 256 of them.

    Where SHARED has the bits that a target's matrix instructions keep in one thread, nothing has to be exchanged, and
    which word a score takes is known when the kernel is compiled. With FLIP the mask is for a tile of keys by queries,
    where a thread holds scores of many calls: the words then go through shared memory, each drawn once.
    """
    # The bits of SHARED as columns: INNER neighbours, and OUTER of those, GAP * INNER apart.
    LOW: tl.constexpr = SHARED & -SHARED
    SECOND: tl.constexpr = (SHARED - LOW) & (LOW - SHARED)
    THIRD: tl.constexpr = (SHARED - LOW - SECOND) & (LOW + SECOND - SHARED)
    FOURTH: tl.constexpr = SHARED - LOW - SECOND - THIRD
    PAIR: tl.constexpr = 1 if FOURTH else 2
    HIGH: tl.constexpr = FOURTH if FOURTH else THIRD
    MIDDLE: tl.constexpr = THIRD if FOURTH else SECOND
    INNER: tl.constexpr = (SHARED + 1) & ~SHARED
    REST: tl.constexpr = SHARED - INNER + 1
    GAP: tl.constexpr = (REST & -REST) // INNER if REST else 1
    SPAN: tl.constexpr = 16 // PAIR * GAP
    WIDTH: tl.constexpr = COLS if COLS < SPAN else SPAN
    OUTER: tl.constexpr = WIDTH // (GAP * INNER)
    row = tl.arange(0, ROWS // PAIR)
    col = tl.arange(0, COLS // (OUTER * INNER))
    rows = (first_row + row // LOW * (PAIR * LOW) + row % LOW)[:, None]
    cols = (first_col // SPAN * SPAN + col // GAP * SPAN + col % GAP * INNER)[None, :]
    zero = (rows + cols) * 0
    a, b, c, d = _philox(
        (cols + zero).to(tl.uint32),
        (rows + zero).to(tl.uint32),
        (plane + zero).to(tl.uint32),
        (tl.load(rng_state + 1).to(tl.int32) + zero).to(tl.uint32),
        tl.load(rng_state).to(tl.uint64),
    )
    row = tl.arange(0, ROWS)[:, None]
    col = tl.arange(0, COLS)[None, :]
    if FLIP and COLS >= SPAN:
        # A tensor of words, unlike four tensors, is one that the compiler does not compute again in another layout.
        words = tl.reshape(tl.join(tl.join(a, c), tl.join(b, d)), (ROWS // PAIR, COLS // SPAN, GAP, 4, 1))
        words = tl.broadcast_to(words, (ROWS // PAIR, COLS // SPAN, GAP, 4, 4 // PAIR))
        words = tl.permute(tl.reshape(words, (ROWS // PAIR, COLS // SPAN, GAP, OUTER, INNER)), (0, 1, 3, 2, 4))
        words = tl.reshape(words, (ROWS // (PAIR * LOW), 1, LOW, COLS))
        word = tl.reshape(tl.broadcast_to(words, (ROWS // (PAIR * LOW), PAIR, LOW, COLS)), (ROWS, COLS))
    else:
        a = _spread(a, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        b = _spread(b, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        c = _spread(c, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        d = _spread(d, ROWS, COLS, PAIR, LOW, OUTER, GAP, INNER)
        if COLS < SPAN:
            col += first_col
        middle = (col & MIDDLE) != 0
        word = tl.where((col & HIGH) != 0, tl.where(middle, d, c), tl.where(middle, b, a))
    half = (col & SECOND) if FOURTH else (row & LOW)
    turn = (tl.where(half != 0, 16, 0) + tl.where((col & LOW) != 0, 8, 0)).to(tl.uint32)
    number = (word << turn) | (word >> ((32 - turn) & 31))
    threshold = (tl.full((1, 1), 4294967296.0, tl.float32) * p_dropout).to(tl.uint32)
    keep = number >= threshold
    return tl.trans(keep) if FLIP else keep


@triton.jit
def dropped(p, keep, p_dropout):
    """p where keep, else 0. As a variable: with the constant the compiler first narrows p to the type of the product
    it goes into, and then takes 16-bit numbers apart and together again around every selection."""
    return tl.where(keep, p, p_dropout - p_dropout)
