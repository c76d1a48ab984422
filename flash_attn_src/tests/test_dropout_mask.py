"""Dropout: every tiling draws the numbers of the definition, and the numbers are practically independent."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
import triton
import triton.language as tl
from flash_attn.kernels import targets
from flash_attn.kernels.dropout import keep_mask

DEVICE = "cuda" if torch.cuda.is_available() else "cpu"
SIZE = 128
PLANE, SEED, OFFSET = 5, 0x1234_5678_9ABC_DEF0, 77
LAYOUTS = sorted(
    {targets.get(target).dropout_bits for target in ("sm_90", "gfx90a", "gfx942", "gfx1030", "gfx1100", "gfx1201")}
)


@triton.jit
def _store_mask(
    kept, rng_state, p_dropout, plane,
    SIZE: tl.constexpr, ROWS: tl.constexpr, COLS: tl.constexpr, DROPOUT_BITS_SHARED: tl.constexpr,
    USE_TRANSPOSE: tl.constexpr,
):  # fmt: skip
    first_row = tl.program_id(0) * ROWS
    first_col = tl.program_id(1) * COLS
    keep = keep_mask(rng_state, p_dropout, plane, first_row, first_col, ROWS, COLS, DROPOUT_BITS_SHARED, USE_TRANSPOSE)
    if USE_TRANSPOSE:
        keep = tl.trans(keep)
    rows = first_row + tl.arange(0, ROWS)[:, None]
    tl.store(kept + rows * SIZE + first_col + tl.arange(0, COLS)[None, :], keep.to(tl.int8))


def philox(counter: tuple[np.ndarray, ...], seed: int) -> list[np.ndarray]:
    """Philox-4x32 of seven rounds, as Salmon et al. (2011) define it."""
    a, b, c, d = (np.asarray(word, np.uint64) for word in counter)
    low, high = seed & 0xFFFFFFFF, seed >> 32
    for _ in range(7):
        first, second = a * np.uint64(0xD2511F53), c * np.uint64(0xCD9E8D57)
        mask = np.uint64(0xFFFFFFFF)
        a, b = second >> np.uint64(32) ^ b ^ np.uint64(low), second & mask
        c, d = first >> np.uint64(32) ^ d ^ np.uint64(high), first & mask
        low, high = (low + 0x9E3779B9) & 0xFFFFFFFF, (high + 0xBB67AE85) & 0xFFFFFFFF
    return [word.astype(np.uint32) for word in np.broadcast_arrays(a, b, c, d)]


def numbers(rows: np.ndarray, cols: np.ndarray, shared: int) -> np.ndarray:
    """The 32 random bits of each score, computed from the definition without tiles."""
    low, *second, middle, high = (1 << bit for bit in range(8) if shared >> bit & 1)
    half = cols & second[0] if second else rows & low
    words = philox((cols & ~shared, rows if second else rows & ~low, np.asarray(PLANE), np.asarray(OFFSET)), SEED)
    chosen = np.select(
        [(cols & (middle | high)) == expected for expected in (0, middle, high)],
        [np.broadcast_to(word, np.broadcast_shapes(rows.shape, cols.shape)) for word in words[:3]],
        words[3],
    )
    turn = (np.where(half, 16, 0) + np.where(cols & low, 8, 0)).astype(np.uint64)
    wide = chosen.astype(np.uint64)
    return ((wide << turn | wide >> (np.uint64(32) - turn)) & np.uint64(0xFFFFFFFF)).astype(np.uint32)


@pytest.mark.parametrize("shared", LAYOUTS, ids=bin)
@pytest.mark.parametrize(("rows", "cols"), [(16, 16), (16, 128), (64, 32), (128, 64)], ids=str)
@pytest.mark.parametrize("flip", [False, True], ids=["queries by keys", "keys by queries"])
def test_every_tiling_draws_the_definition(shared: int, rows: int, cols: int, flip: bool) -> None:
    p = 0.3
    kept = torch.zeros(SIZE, SIZE, dtype=torch.int8, device=DEVICE)
    state = torch.tensor([SEED, OFFSET], device=DEVICE)
    _store_mask[SIZE // rows, SIZE // cols](kept, state, p, PLANE, SIZE, rows, cols, shared, flip)
    expected = numbers(np.arange(SIZE)[:, None], np.arange(SIZE)[None, :], shared) >= np.uint32(np.float32(p) * 2**32)
    assert np.array_equal(kept.cpu().numpy().astype(bool), expected)


@pytest.mark.parametrize("p", [0.003, 0.1, 0.5])
def test_scores_of_a_call_are_dropped_independently(p: float) -> None:
    """Sixteen scores share a call: each is dropped with p, no two of them together more often than by chance."""
    shared = 0b1111
    size = 1 << 10
    drawn = numbers(np.arange(size)[:, None], np.arange(4 * size)[None, :], shared) < np.uint32(np.float32(p) * 2**32)
    calls = drawn.reshape(-1, 16).T.astype(np.float32)
    spread = np.sqrt(p * (1 - p))
    assert np.abs(calls.mean(1) - p).max() < 4.5 * spread / np.sqrt(calls.shape[1])
    centred = (calls - p) / spread
    correlation = centred @ centred.T / calls.shape[1]
    for one, other in itertools.combinations(range(16), 2):
        # 0.002 is what two scores of one word have in common when their first bytes do not decide.
        assert abs(correlation[one, other]) < 0.0025 + 4.5 / np.sqrt(calls.shape[1]), (one, other)
    assert abs(drawn.mean(0).std() - spread / np.sqrt(size)) < 0.1 * spread / np.sqrt(size)
    assert abs(drawn.mean(1).std() - spread / np.sqrt(4 * size)) < 0.1 * spread / np.sqrt(4 * size)
